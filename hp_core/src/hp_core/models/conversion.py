"""How the tensors of a checkpoint become those of a model: transformers' own mapping, as recipes that know their parts.

The names and layouts that a model had when its weights were published are not those that transformers uses today:
experts are separate tensors there and one here, projections are fused or split. transformers keeps a mapping of
renamings and conversions (`conversion_mapping`). Here it is resolved by names and shapes alone; values are read
when a recipe is run, and only as much of them as the wanted rows need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hp_core.errors import WeightsError

ALL = slice(None)

Load = Callable[[str, slice], torch.Tensor]
"""(tensor name, rows) to those rows (dim 0) of the checkpoint tensor; `ALL` for the whole of it."""


@dataclass(frozen=True)
class Recipe:
    """What one target, or several that come out of one conversion, are made of.

    `target` is the first target. `sources` are the names of checkpoint tensors, in order, per source pattern of
    the converter; without a converter there is one source, which is the target as it stands. `shapes` has the shape
    of every target; it is empty if the sources do not fit together, for the reason that `problem` gives.
    """

    target: str
    sources: Mapping[str, tuple[str, ...]]
    converter: WeightConverter | None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(name for names in self.sources.values() for name in names)

    @property
    def splits_by_rows(self) -> bool:
        """Whether some rows (dim 0) of the targets can be made of the same rows of the sources alone.

        True only where that is certain: every operation is a known one that leaves dim 0 alone, but for a first
        one that stacks the sources on it, so that a source is a row.
        """
        operations = self.converter.operations if self.converter else []
        return all(map(_keeps_rows, operations[1:] if self._stacks else operations))

    @property
    def _stacks(self) -> bool:
        operations = self.converter.operations if self.converter else []
        return bool(operations) and type(operations[0]) is MergeModulelist and operations[0].dim == 0

    def make(self, template: PreTrainedModel, load: Load, rows: slice = ALL) -> dict[str, torch.Tensor]:
        """Every target; only its `rows` if asked, which needs `splits_by_rows`."""
        assert rows == ALL or self.splits_by_rows
        if self.converter is None:
            return {self.target: load(self.source_names[0], rows)}
        for pattern, names in self.sources.items():
            for name in names[rows] if self._stacks else names:
                self.converter.add_tensor(self.target, name, pattern, load(name, ALL if self._stacks else rows))
        made: dict[str, Any] = self.converter.convert(self.target, model=template, config=template.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Resolution:
    """Which checkpoint tensors make which targets.

    `unmatched` maps the names that are no part of the model to the names that the model would know them by.
    `transforms` are transformers' transforms that matched: set as `model._weight_conversions`, they make
    `save_pretrained` write the names and layouts of this checkpoint.
    """

    recipes: tuple[Recipe, ...]
    unmatched: Mapping[str, str]
    transforms: tuple[WeightTransform, ...]


def resolve(template: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> Resolution:
    """Match checkpoint tensors, given by name and shape, with the state dict of `template`, by transformers' rules.

    Raises WeightsError when a target is in the checkpoint more than once.
    """
    state = template.state_dict()
    transforms = get_model_conversion_mapping(template)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix = template.base_model_prefix
    collected: dict[str, dict[str | None, list[str]]] = {}
    unmatched: dict[str, str] = {}
    # Some renamings depend on the names before them, and the order of stacked tensors is the order of their names.
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed in state:
            collected.setdefault(renamed, {}).setdefault(pattern, []).append(name)
        else:
            unmatched[name] = renamed
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    recipes = tuple(
        _with_shapes(_make_recipe(target, sources, by_pattern), template, shapes)
        for target, sources in collected.items()
    )
    return Resolution(recipes, unmatched, tuple(transform for transform in transforms if transform.was_used()))


def expected_sources(template: PreTrainedModel, target: str, transforms: Iterable[WeightTransform]) -> set[str]:
    """Names of all checkpoint tensors that `target` is to be made of, found by running the conversion backwards."""
    # A shallow copy: the attribute that tells transformers what to revert must not stay on the template.
    shadow = copy(template)
    shadow._weight_conversions = list(transforms)
    return set(revert_weight_conversion(shadow, {target: template.state_dict()[target]}))


def _make_recipe(
    target: str, sources: Mapping[str | None, list[str]], by_pattern: Mapping[str, WeightConverter]
) -> Recipe:
    first = next(iter(sources))
    if first is None and len(sources) == 1 and len(sources[None]) == 1:
        return Recipe(target, {"": tuple(sources[None])}, None)
    converter = by_pattern[first] if first is not None else None
    if converter is None or any(pattern not in converter.source_patterns for pattern in sources):
        found = ", ".join(name for names in sources.values() for name in names[:2])
        raise WeightsError(f"{target}: is in the checkpoint more than once, as {found}")
    by_name = {pattern: tuple(names) for pattern, names in sources.items() if pattern is not None}
    return Recipe(target, by_name, deepcopy(converter))


def _with_shapes(recipe: Recipe, template: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
    """Run the conversion on the meta device to see what it makes."""
    try:
        made = recipe.make(template, lambda name, _: torch.empty(shapes[name], device="meta"))
    except Exception as error:  # conversions are code of transformers and third parties: they may raise anything
        return replace(recipe, problem=" ".join(str(error).split()))
    return replace(recipe, shapes={name: tuple(value.shape) for name, value in made.items()})


def _keeps_rows(operation: Any) -> bool:
    if type(operation) is Transpose:
        return bool(min(operation.dim0, operation.dim1) > 0 and not operation.check_dims)
    return type(operation) in (Chunk, Concatenate, Interleave, Split) and bool(operation.dim > 0)
