"""Importing what is selected and checking it against the contract: each fault is its own line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_distributions import write_distribution

from hp_core.errors import PluginError
from hp_core.plugins import PluginSet, Selection, find_plugins, load_plugin, load_plugins

HOOK = "    @hookimpl\n    def hp_shard_batch(self, batch, options):"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("acme", "bolt", "coil", "watch"):
        sys.modules.pop(f"{name}_module", None)


def load_error() -> str:
    with pytest.raises(PluginError) as caught:
        load_plugin(find_plugins().get("acme"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_plugin_loads(site: Path) -> None:
    write_distribution(site, keys=["accelerator.acme_size"])
    assert load_plugin(find_plugins().get("acme")).name == "acme"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def (:", "SyntaxError: invalid syntax (acme_module.py, line 1)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("plug = 1", "AttributeError: module 'acme_module' has no attribute 'plugin'"),
    ],
)
def test_pg03_a_used_plugin_that_cannot_be_imported(source: str, cause: str, site: Path) -> None:
    write_distribution(site, source=source)
    assert load_error() == f'plugin "acme" of acme-plugin 1.0 cannot be imported: {cause}'


def test_pg03_an_incompatible_plugin_is_refused_before_it_is_imported(site: Path) -> None:
    write_distribution(site, source="def (:", requires=["hp-core>=99"])
    assert load_error() == (
        'plugin "acme" of acme-plugin 1.0 needs hp-core >=99, found hp-core 0.1.0. pip install a matching pair.'
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "plugin = Plugin()",
            "plugin = Plugin",
            "acme_module:plugin is a class, expected an instance. Name the instance in the entry point.",
        ),
        (
            "plugin = Plugin()",
            "import sys as plugin",
            "acme_module:plugin is a module, expected an instance. Name the instance in the entry point.",
        ),
        (
            "plugin = Plugin()",
            "def plugin(): ...",
            "acme_module:plugin is a function, expected an instance. Name the instance in the entry point.",
        ),
        (
            "class Plugin:",
            "@dataclass\nclass Plugin:",
            "acme_module:plugin cannot be hashed. A dataclass needs eq=False or frozen=True for that.",
        ),
        ('name = "acme"', "", 'its name attribute is None, expected "acme", the name of its entry point.'),
        (
            'name = "acme"',
            'name = "acne"',
            "its name attribute is 'acne', expected \"acme\", the name of its entry point.",
        ),
        ("class Options:", "class Choices:", "Options is None, expected a frozen dataclass."),
        ("@dataclass(frozen=True)", "@dataclass", "Options is not frozen. Decorate it with @dataclass(frozen=True)."),
        ("axes = (", "axis = (", "axes is None, expected a tuple of MeshAxis (empty for none)."),
        (
            'axes = (MeshAxis("acme", "model", "acme_size"),)',
            'axes = ("acme",)',
            "axes is ('acme',), expected a tuple of MeshAxis (empty for none).",
        ),
        (
            '"model", "acme_size"',
            '"model", "size"',
            'axis "acme" takes its size from Options.size, which does not exist.',
        ),
        (
            '"model", "acme_size"',
            '"modle", "acme_size"',
            "axis \"acme\" has role 'modle', expected one of data, sequence, model, expert.",
        ),
        ("depth: int", "length: int", "it owns the key accelerator.depth, but Options has no field depth."),
        (
            "must_follow = ()",
            'must_follow = "*"',
            "must_follow is '*', expected a tuple of plugin names (empty for none).",
        ),
        ("hp_shard_batch", "hp_shrad_batch", "there is no hook hp_shrad_batch. Did you mean hp_shard_batch?"),
        (
            "batch, options):",
            "batch, option):",
            "Plugin 'acme' for hook 'hp_shard_batch' hookimpl definition: hp_shard_batch(batch, option) Argument(s) "
            "{'option'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            "    @hookimpl\n",
            "",
            "its hp_shard_batch is not marked as a hook. Decorate it with hp_core.hookimpl.",
        ),
        (
            "@hookimpl",
            "@hookimpl(tryfirst=True)",
            "hp_shard_batch uses tryfirst or trylast. The order in the configuration is the only order: "
            "use must_follow.",
        ),
        (
            "@hookimpl",
            "@hookimpl(trylast=True)",
            "hp_shard_batch uses tryfirst or trylast. The order in the configuration is the only order: "
            "use must_follow.",
        ),
        (
            HOOK,
            "    @hookimpl(wrapper=True)\n    def hp_load_model(self):\n        return (yield)\n\n" + HOOK,
            "hp_load_model is a wrapper, but the plugin also implements hooks. "
            "Wrappers are for observers, which do nothing else: make it a plugin of its own.",
        ),
    ],
)
def test_a_plugin_that_breaks_the_contract(old: str, new: str, problem: str, site: Path) -> None:
    write_distribution(site, keys=["accelerator.depth"], edits={old: new})
    assert load_error() == f'plugin "acme" of acme-plugin 1.0: {problem}'


OBSERVER = """
from dataclasses import dataclass
from hp_core import hookimpl

seen = []

class Plugin:
    name = "watch"
    axes = ()
    must_follow = ()

    @dataclass(frozen=True)
    class Options:
        pass

    @hookimpl(wrapper=True)
    def hp_shard_batch(self, options):
        result = yield
        seen.append((options, result))
        return result

plugin = Plugin()
"""


def load_set(*names: str) -> PluginSet:
    index = find_plugins()
    return load_plugins([Selection(index.get(name), {}, "here", in_order=True) for name in names])


def test_hooks_are_called_one_plugin_at_a_time_each_with_its_own_options(site: Path) -> None:
    write_distribution(site, "acme")
    write_distribution(site, "bolt")
    write_distribution(site, "coil", edits={"return (batch, self.name, options.depth)": "return None"})
    loaded = load_set("coil", "bolt", "acme")
    options = {plugin.name: plugin.instance.Options(depth=depth) for depth, plugin in enumerate(loaded.plugins)}
    loaded = loaded.with_options(options)
    assert loaded.call("hp_shard_batch", batch="b", mesh=None) == [
        ("bolt", ("b", "bolt", 1)),
        ("acme", ("b", "acme", 2)),
    ]
    assert loaded.first("hp_shard_batch", batch="b", mesh=None) == ("bolt", ("b", "bolt", 1))
    assert loaded.call_one("acme", "hp_shard_batch", batch="c", mesh=None) == ("c", "acme", 2)
    assert loaded.call("hp_load_model", config=None) == []
    assert loaded.first("hp_load_model", config=None) is None
    assert [(axis.name, size) for axis, size in loaded.axis_requests()] == [("coil", 1), ("bolt", 1), ("acme", 1)]


def test_a_hook_with_one_result_and_without_options(site: Path) -> None:
    method = "    @hookimpl\n    def hp_load_model(self, config):\n        return config * 2\n\n"
    write_distribution(site, edits={HOOK: method + HOOK})
    assert load_set("acme").first("hp_load_model", config=21) == ("acme", 42)


def test_an_observer_wraps_the_calls_of_the_others(site: Path) -> None:
    write_distribution(site, "acme")
    write_distribution(site, "watch", source=OBSERVER)
    loaded = load_set("watch", "acme")
    options = {plugin.name: plugin.instance.Options() for plugin in loaded.plugins}
    loaded = loaded.with_options(options)
    assert loaded.call("hp_shard_batch", batch="b", mesh=None) == [("acme", ("b", "acme", 0))]
    assert sys.modules["watch_module"].seen == [(options["acme"], [("b", "acme", 0)])]


def test_versions_and_description_tell_runs_apart(site: Path) -> None:
    write_distribution(site, "acme", version="1.5")
    write_distribution(site, "bolt")
    versions = load_set("acme").versions()
    assert set(versions) == {"hp-core", "torch", "transformers", "acme-plugin"}
    assert versions["acme-plugin"] == "1.5"
    assert load_set("acme", "bolt").describe() != load_set("bolt", "acme").describe()
    assert load_set("acme", "bolt").describe() == load_set("acme", "bolt").describe()
