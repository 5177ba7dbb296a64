"""The tensor-parallel plan that a HuggingFace model brings along: which style applies to which module or parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch import nn

from hp_core import PlanError


class Style(Enum):
    """The styles of transformers' plans. The value is transformers' name."""

    COLUMN = "colwise"
    COLUMN_GATHER = "colwise_gather_output"
    ROW = "rowwise"
    ROW_SPLIT = "rowwise_split_input"
    PACKED_COLUMN = "packed_colwise"
    PACKED_ROW = "packed_rowwise"
    EMBEDDING_ROWS = "embedding_rowwise"
    EMBEDDING_COLUMNS = "embedding_colwise"
    EXPERTS = "moe_tp_experts"
    IDENTITY_EXPERT = "moe_identity_expert"
    ALL_REDUCE = "all_reduce"
    # In hp every rank computes on local tensors, and gradients inside of a region are always summed: nothing to do.
    MLA = "mla_kv_a_proj"
    LOCAL = "local_params"
    GRADIENT_SUMMED = "replicated_with_grad_allreduce"
    REPLICATE = "replicate"
    FREE = "free_full_weight"
    KEEP = "keep_full_weight"
    ADDED_ONCE = "added_once"  # hp's own: a bias of what is summed over ranks


# Older names of the same styles.
_SYNONYMS = {"colwise_rep": Style.COLUMN_GATHER, "rowwise_rep": Style.ROW_SPLIT}
_NOTHING = frozenset((Style.MLA, Style.LOCAL, Style.GRADIENT_SUMMED, Style.REPLICATE, Style.FREE, Style.KEEP))


@dataclass(frozen=True)
class Styled:
    """A style and the key of the plan, or the rule, that gives it."""

    style: Style
    source: str


@dataclass(frozen=True)
class HfPlan:
    """What a plan says of a model: styles by FQN of modules and of parameters, and the keys that match nothing."""

    modules: Mapping[str, Styled]
    parameters: Mapping[str, Styled]
    unused: tuple[str, ...]


def read_hf_plan(model: nn.Module) -> HfPlan:
    """The plan of `model` (its `tp_plan`), with `*` standing for one part of a name.

    Raises PlanError for a style that is not known.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    module_names = [name for name, _ in model.named_modules() if name]
    parameter_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules: dict[str, Styled] = {}
    parameters: dict[str, Styled] = {}
    unused = []
    for key, name in plan.items():
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        found_modules = list(filter(pattern.fullmatch, module_names))
        found_parameters = list(filter(pattern.fullmatch, parameter_names))
        if not found_modules and not found_parameters:
            unused.append(key)
            continue
        style = _style(name, key)
        if style not in _NOTHING:
            modules.update(dict.fromkeys(found_modules, Styled(style, f"HF plan {key}: {name}")))
            parameters.update(dict.fromkeys(found_parameters, Styled(style, f"HF plan {key}: {name}")))
    return HfPlan(modules, parameters, tuple(unused))


def _style(name: str, key: str) -> Style:
    if name in _SYNONYMS:
        return _SYNONYMS[name]
    try:
        return Style(name)
    except ValueError:
        known = ", ".join(sorted(style.value for style in Style))
        raise PlanError(
            f'{key}: the tensor-parallel plan of the model has style "{name}", which hp does not know. Known: {known}.'
        ) from None
