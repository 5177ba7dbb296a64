"""Words for error lines: a value as the user sees it, and what a misspelt name was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def found(value: Any) -> str:
    """A YAML value in words: `text "x"`, `true`, `a list`."""
    if isinstance(value, str):
        return f'text "{value}"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else str(value).lower()


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `name`; None when none is."""
    known = sorted(candidates)
    near = [each for each in known if _differ_once(name, each)] or get_close_matches(name, known, n=1)
    return near[0] if near else None


def suggestion(name: str, siblings: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """A sentence, with a leading blank, that leads from an unknown key to a known one.

    `siblings` are the keys that may stand where `name` stands; `elsewhere` are dotted keys of other sections, which
    win when they end in exactly `name`.
    """
    for dotted in sorted(elsewhere):
        section, _, leaf = dotted.rpartition(".")
        if name == dotted and section:
            return f" Keys nest in YAML: write {leaf} inside {section}."
        if name == leaf:
            return f" Did you mean {dotted}?"
    near = closest(name, siblings)
    if near:
        return f" Did you mean {near}?"
    known = ", ".join(sorted(siblings))
    return f" Known here: {known}." if known else ""


def _differ_once(one: str, other: str) -> bool:
    """Whether one character left out, added or replaced makes `other` of `one`."""
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    left, right = one[start:], other[start:]
    return left[1:] in (right, right[1:]) or left == right[1:]
