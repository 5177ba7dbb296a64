"""What can be wrong with a checkpoint for a model, found from names, shapes and, for tied weights, values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform
from transformers.utils.loading_report import LoadStateDictInfo

from hp_core.errors import WeightsError
from hp_core.models.blocks import decoder_blocks
from hp_core.models.checkpoint_files import FileTensor
from hp_core.models.conversion import Recipe, Resolution, expected_sources
from hp_core.plan import ShardingPlan

MAX_NAMES = 10


@dataclass(frozen=True)
class LoadReport:
    """What a load left out, the same on every rank.

    `missing`: parameters and persistent buffers that the checkpoint lacks and that the caller has to initialise.
    `ignored`: checkpoint tensors that transformers drops for this architecture, such as the heads for multi-token
    prediction; an export will not have them. `cropped`: checkpoint tensors of layers that the model was built
    without. `transforms`: see `Resolution`.
    """

    missing: tuple[str, ...]
    ignored: tuple[str, ...]
    cropped: tuple[str, ...]
    transforms: tuple[WeightTransform, ...]


def check_match(
    template: PreTrainedModel,
    plan: ShardingPlan,
    folder: Path,
    files: Mapping[str, FileTensor],
    resolution: Resolution,
    init_missing: bool,
) -> LoadReport:
    """Compare names and shapes of checkpoint and model, without reading data; say what is left out.

    Raises WeightsError with everything that does not match, in one line.
    """
    state = template.state_dict()
    if not resolution.recipes:
        raise WeightsError(
            f"{folder}: none of its {len(files)} tensors is part of the model. It has {_list(sorted(files), 3)}; "
            f"{type(template).__name__} expects {_list(list(state), 3)}. Is it the checkpoint of another model?"
        )
    made = [fqn for recipe in resolution.recipes for fqn in recipe.shapes or (recipe.target,)]
    incomplete, misshapen = _check_recipes(template, files, resolution)
    cropped = _find_cropped(template, folder, resolution.unmatched)
    unmatched = {name: fqn for name, fqn in resolution.unmatched.items() if name not in cropped}
    tied = {alias: fqn for fqn, param in plan.params.items() for alias in param.tied_names}
    loaded = {tied.get(fqn, fqn) for fqn in made}
    missing = [fqn for fqn in state if fqn not in tied and fqn not in loaded]
    required, unexpected = _apply_exceptions(template, missing, unmatched)
    extra = [name for name in unmatched if unmatched[name] in unexpected] + [fqn for fqn in made if fqn not in state]
    twice = [fqn for fqn, count in Counter(made).items() if count > 1]
    problems = []
    if required and not init_missing:
        fix = "model.init_missing_weights: true initialises them"
        problems.append(f"{_count(required, 'tensor')} missing: {_list(required)} ({fix})")
    if incomplete:
        problems.append(f"{_count(incomplete, 'part')} of stacked or fused tensors missing: {_list(incomplete)}")
    if extra:
        problems.append(f"{_count(extra, 'tensor')} unexpected: {_list(extra)}")
    if twice:
        problems.append(f"{_count(twice, 'tensor')} present both as it is and as part of a fused one: {_list(twice)}")
    if misshapen:
        problems.append(f"{_count(misshapen, 'tensor')} of the wrong shape: {_list(misshapen)}")
    if problems:
        raise WeightsError(f"{folder} does not fit {type(template).__name__}: {'; '.join(problems)}")
    return LoadReport(
        missing=tuple(missing),
        ignored=tuple(name for name in unmatched if unmatched[name] not in unexpected),
        cropped=tuple(sorted(cropped)),
        transforms=resolution.transforms,
    )


def drop_equal_ties(
    template: PreTrainedModel,
    plan: ShardingPlan,
    folder: Path,
    files: Mapping[str, FileTensor],
    recipes: Iterable[Recipe],
) -> list[Recipe]:
    """The recipes without those that make a parameter which another one makes under a tied name.

    Raises WeightsError when the checkpoint has different values for one tied parameter. Every rank compares them
    whole, so that all ranks agree.
    """
    by_target = {recipe.target: recipe for recipe in recipes}
    for fqn, param in plan.params.items():
        first, *others = [name for name in (fqn, *param.tied_names) if name in by_target] or [fqn]
        for other in others:
            one, two = (
                by_target[name].make(template, lambda source, rows: files[source].rows(rows))[name]
                for name in (first, other)
            )
            if not torch.equal(one, two):
                raise WeightsError(
                    f"{folder}: {first} and {other} are one tensor in the model and differ in the checkpoint. "
                    "Set tie_word_embeddings: false in its config.json if they are to be two."
                )
            del by_target[other]
    return list(by_target.values())


def _check_recipes(
    template: PreTrainedModel, files: Mapping[str, FileTensor], resolution: Resolution
) -> tuple[list[str], list[str]]:
    """Names of sources that recipes lack; descriptions of what comes out in a wrong shape, or not at all."""
    state = template.state_dict()
    incomplete: list[str] = []
    misshapen: list[str] = []
    for recipe in resolution.recipes:
        origin = "" if recipe.converter is None else f" made of {_list(recipe.source_names, 3)}"
        problems = [
            f"{fqn}{origin} is {list(shape)} in the file, {list(state[fqn].shape)} in the model"
            for fqn, shape in recipe.shapes.items()
            if fqn in state and shape != tuple(state[fqn].shape)
        ]
        if recipe.problem:
            problems = [f"{recipe.target}{origin} cannot be ({recipe.problem})"]
        if problems:
            expected = expected_sources(template, recipe.target, resolution.transforms)
            # With none of them there, the checkpoint has other names for the same (no prefix): nothing is missing.
            absent = expected - set(files) if expected & set(files) else set()
            incomplete.extend(sorted(absent))
            misshapen.extend([] if absent else problems)
    return incomplete, misshapen


def _apply_exceptions(
    template: PreTrainedModel, missing: Sequence[str], unmatched: Mapping[str, str]
) -> tuple[list[str], set[str]]:
    """What stays missing and unexpected after transformers' exceptions for this architecture."""
    info = LoadStateDictInfo(
        missing_keys=set(missing),
        unexpected_keys=set(unmatched.values()),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    template._adjust_missing_and_unexpected_keys(info)
    return [fqn for fqn in missing if fqn in info.missing_keys], info.unexpected_keys


def _find_cropped(template: PreTrainedModel, folder: Path, unmatched: Mapping[str, str]) -> set[str]:
    """Unmatched tensors of layers that the checkpoint's config counts and the template's does not."""
    if not (folder / "config.json").is_file():
        return set()
    num_layers = template.config.get_text_config().num_hidden_layers
    whole = type(template.config).from_pretrained(folder).get_text_config().num_hidden_layers
    if whole <= num_layers:
        return set()
    base = f"{template.base_model_prefix}."
    stacks = {fqn.rpartition(".")[0].removeprefix(base) for fqn in decoder_blocks(template)}
    layer = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, sorted(stacks)))})\.(\d+)\.")
    found = {name: layer.search(fqn) for name, fqn in unmatched.items()}
    return {name for name, match in found.items() if match and num_layers <= int(match[1]) < whole}


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''}"


def _list(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} ... ({len(names)} in all)"
