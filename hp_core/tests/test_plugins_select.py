"""Which plugins a configuration uses, and the order it gives them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_distributions import write_distribution

from hp_core.config import read_config
from hp_core.errors import PluginError
from hp_core.plugins import PluginSet, Selection, find_plugins, load_plugins, select_plugins


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the plugins acme, bolt (follows acme) and coil (follows all)."""
    folder = tmp_path / "site"
    write_distribution(folder, "acme", keys=["accelerator.acme_size", "accelerator.depth"])
    write_distribution(folder, "bolt", keys=["bolt_config"], edits={"must_follow = ()": 'must_follow = ("acme",)'})
    write_distribution(
        folder, "coil", keys=["accelerator.coil_size"], edits={"must_follow = ()": 'must_follow = ("*",)'}
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    yield folder
    for name in ("acme", "bolt", "coil", "zinc", "last"):
        sys.modules.pop(f"{name}_module", None)


def select(text: str, *overrides: str) -> tuple[Selection, ...]:
    Path("train.yaml").write_text(text)
    return select_plugins(find_plugins(), read_config(Path("train.yaml"), overrides))


def load(text: str) -> PluginSet:
    return load_plugins(select(text))


def error_of(text: str) -> str:
    with pytest.raises(PluginError) as caught:
        load(text)
    return str(caught.value)


def test_strategies_are_taken_in_the_order_given() -> None:
    loaded = load("strategies: [acme, bolt, {name: coil, depth: 2}]")
    assert loaded.names == ("acme", "bolt", "coil")
    assert [spec.inline for spec in loaded.option_specs] == [{}, {}, {"depth": 2}]
    assert [spec.where for spec in loaded.option_specs] == ["train.yaml:1"] * 3


def test_an_empty_list_of_strategies_selects_none() -> None:
    assert load("strategies: []").names == ()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{}", []),
        ("accelerator: {acme_size: 2}", ["acme"]),
        ("accelerator: {acme_size: -1}", ["acme"]),
        ("accelerator: {acme_size: 1}", []),
        ("accelerator: {acme_size: null}", []),
        ("accelerator: {depth: 3}", ["acme"]),
        ("accelerator: {depth: false}", []),
        ("bolt_config: {}", ["bolt"]),
        ("bolt_config:", ["bolt"]),
        ("bolt_config: {depth: 1}\naccelerator: {acme_size: 2}", ["acme", "bolt"]),
    ],
)
def test_without_strategies_the_used_keys_select(text: str, names: list[str]) -> None:
    assert [selection.found.name for selection in select(text)] == names


def test_an_override_selects_too() -> None:
    (selection,) = select("accelerator: {acme_size: 1}", "--accelerator.acme_size=2")
    assert (selection.found.name, selection.where) == ("acme", "--accelerator.acme_size=2")


def test_without_strategies_must_follow_orders_and_the_log_says_so(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_distribution(site, "zinc", keys=["accelerator.zinc_size"])
    text = "accelerator:\n  coil_size: 2\n  zinc_size: 2\n  acme_size: 2\nbolt_config: {}"
    with caplog.at_level(logging.INFO):
        loaded = load(text)
    assert loaded.names == ("acme", "bolt", "zinc", "coil")
    assert caplog.messages == [
        "strategies not given, taken from the keys that are used, in this order: "
        "acme (train.yaml:4), bolt (train.yaml:5), zinc (train.yaml:3), coil (train.yaml:2)"
    ]


def test_a_violated_must_follow_names_both_and_a_valid_order() -> None:
    assert error_of("strategies: [coil, bolt, acme]") == (
        'strategies: "coil" must follow "bolt" but comes before it. A valid order: acme, bolt, coil.  (train.yaml:1)'
    )


def test_must_follow_a_plugin_that_is_not_selected_is_fine() -> None:
    assert load("strategies: [bolt]").names == ("bolt",)


def test_two_plugins_that_each_must_follow_all_others(site: Path) -> None:
    write_distribution(site, "last", edits={"must_follow = ()": 'must_follow = ("*",)'})
    assert error_of("strategies: [acme, coil, last]") == (
        'strategies: "coil" and "last" must each follow another of them; no order can satisfy that.'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "strategies: acme",
            "strategies: expected a list of names, found str. Write strategies: [NAME, ...].  (train.yaml:1)",
        ),
        ("strategies: [acme, 3]", "strategies[1]: expected a name or {name: ..., options}, found 3.  (train.yaml:1)"),
        (
            "strategies:\n- {depth: 2}",
            "strategies[0]: expected a name or {name: ..., options}, found {'depth': 2}.  (train.yaml:2)",
        ),
        (
            "strategies: [acme, acme]",
            'strategies[1]: strategy "acme" is listed twice. Remove one.  (train.yaml:1)',
        ),
        (
            "strategies:\n- acne",
            'strategies[0]: strategy "acne" is not installed. Closest installed: "acme".  (train.yaml:2)',
        ),
        (
            "strategies: [tp]",
            'strategies[0]: strategy "tp" is not installed. pip install hp-strategies-tp  (train.yaml:1)',
        ),
        (
            "strategies: [acme]\nbolt_config:\n  depth: 1",
            'bolt_config: belongs to strategy "bolt", which is not in strategies. '
            "Add bolt to strategies or remove the key.  (train.yaml:2)",
        ),
        (
            "strategies: []\naccelerator:\n  acme_size: 2",
            'accelerator.acme_size: belongs to strategy "acme", which is not in strategies. '
            "Add acme to strategies or remove the key.  (train.yaml:3)",
        ),
    ],
)
def test_a_wrong_selection_is_one_line(text: str, message: str, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site)])
    with pytest.raises(PluginError) as caught:
        select(text)
    assert str(caught.value) == message


def test_pg03_a_broken_plugin_that_is_not_used_is_a_warning(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_distribution(site, "olden", requires=["hp-core<0.1"])
    write_distribution(site, "syntax", source="def (:")
    assert load("strategies: [acme]").names == ("acme",)
    assert caplog.messages == [
        'not used here, but broken: plugin "olden" of olden-plugin 1.0 needs hp-core <0.1, found hp-core 0.1.0. '
        "pip install a matching pair."
    ]
    assert "syntax_module" not in sys.modules
