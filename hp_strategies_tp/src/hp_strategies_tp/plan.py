"""Tensor parallelism as a plan: styles of the model's own plan become placements of parameters and boundaries. Pure."""

from __future__ import annotations

import inspect
from dataclasses import replace

from torch import nn

from hp_core import (
    EVERY,
    Boundary,
    ConfigError,
    MeshSpec,
    ParamFragment,
    Partial,
    PlanError,
    PlanFragment,
    Replicate,
    Shard,
    enter,
    leave,
    within,
)
from hp_strategies_tp.heads import Heads
from hp_strategies_tp.hf_plan import HfPlan, Style, Styled, read_hf_plan
from hp_strategies_tp.options import Options
from hp_strategies_tp.regions import Region, find_regions, is_norm
from hp_strategies_tp.rules import complete_plan
from hp_strategies_tp.sequence import split_sequence
from hp_strategies_tp.styles import (
    AXIS,
    column_parameters,
    grouped,
    num_inputs,
    num_outputs,
    row_parameters,
    sharded,
    single_parameter,
    summed,
)

VOCABULARY = "vocabulary-parallel embedding"
SPLIT_LOGITS = "logits stay split over the vocabulary"
FEATURES = Shard(-1)


def plan_sharding(model: nn.Module, mesh: MeshSpec, options: Options) -> PlanFragment | None:
    """The tensor-parallel part of the plan; None when one rank has it all."""
    size = mesh.size(AXIS)
    if size == 1:
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(options, name):
                raise ConfigError(f"accelerator.{name}: needs accelerator.tp_size of at least 2, found 1")
        return None
    builder = _Builder(model, complete_plan(model, read_hf_plan(model)), size, options)
    return builder.build()


class _Builder:
    """Collects the fragment, one style after the other."""

    def __init__(self, model: nn.Module, hf_plan: HfPlan, size: int, options: Options) -> None:
        self.model, self.hf, self.size, self.options = model, hf_plan, size, options
        self.params: dict[str, ParamFragment] = {}
        self.boundaries: dict[str, Boundary] = {}
        self.injections: dict[str, str] = {}
        self.attributes: dict[str, dict[str, int]] = {}
        self.regions = find_regions(model, hf_plan.modules)

    def build(self) -> PlanFragment:
        for fqn, entry in self.hf.parameters.items():
            param = self.model.get_parameter(fqn)
            fragment = single_parameter(fqn, param, entry.style, entry.source)
            self.check_even(fqn, param, fragment)
            self.claim(fqn, fragment)
        for region in self.regions.values():
            self.add_region(region)
        in_regions = {fqn for region in self.regions.values() for fqn in region.leaves}
        for fqn, entry in self.hf.modules.items():
            if fqn not in in_regions:
                self.add_leaf(fqn, entry)
        if self.options.sequence_parallel:
            self.split_sequence()
        notes = tuple(f"HF plan key {key} matches nothing" for key in self.hf.unused)
        return PlanFragment(
            params=self.params,
            boundaries=self.boundaries,
            injections=self.injections,
            attributes=self.attributes,
            notes=notes,
        )

    def split_sequence(self) -> None:
        split = split_sequence(self.model, self.hf.modules, self.regions)
        for fqn, boundary in split.boundaries.items():
            self.add_boundary(fqn, boundary)
        for fqn in split.partial:
            if fqn not in self.params:
                self.claim(fqn, summed("sees a part of the sequence"))

    def claim(self, fqn: str, fragment: ParamFragment) -> None:
        """Record what is said of a parameter. Shared parameters are recorded once, and must agree."""
        param = self.model.get_parameter(fqn)
        for name, other in self.params.items():
            if self.model.get_parameter(name) is param:
                if (other.layout, other.compute) != (fragment.layout, fragment.compute):
                    raise PlanError(f"{fqn} is shared with {name}, but the two are split in different ways")
                return
        self.params[fqn] = fragment

    def check_even(self, fqn: str, param: nn.Parameter, fragment: ParamFragment) -> None:
        """Experts pair gates with ups: their chunks have to be equal."""
        placement = fragment.layout[AXIS]
        if isinstance(placement, Shard) and param.ndim > 1:
            length = (placement.sections or (param.shape[placement.dim],))[0]
            if length % self.size:
                raise PlanError(
                    f"accelerator.tp_size: {self.size} does not divide the {length} intermediate features of {fqn}"
                )

    def add_boundary(self, fqn: str, boundary: Boundary) -> None:
        """Record inputs and outputs of a boundary; what comes later replaces what was there."""
        old = self.boundaries.get(fqn, Boundary(AXIS))
        sources = [source for source in (old.source, boundary.source) if source]
        self.boundaries[fqn] = Boundary(
            AXIS, {**old.inputs, **boundary.inputs}, {**old.outputs, **boundary.outputs}, "; ".join(sources)
        )

    def add_region(self, region: Region) -> None:
        module = self.model.get_submodule(region.fqn)
        source = "columns and rows of " + region.fqn.rpartition(".")[2]
        if region.heads is not None:
            region.heads.check(self.size, region.fqn)
            if region.heads.num_kv < self.size and hasattr(module, "num_key_value_groups"):
                self.attributes.setdefault(region.fqn, {})["num_key_value_groups"] = region.heads.num // self.size
        if region.is_whole:
            first = _first_input(module)
            self.add_boundary(region.fqn, Boundary(AXIS, {first: enter(Replicate(), Replicate())}, {}, source))
        for fqn in region.columns:
            self.add_column(fqn, region)
        for fqn in region.inner:
            self.add_row(fqn)
            edge = within(Partial(), FEATURES, num_outputs(self.model.get_submodule(fqn)))
            self.add_boundary(fqn, Boundary(AXIS, {}, {"0": edge}))
        for fqn in region.rows:
            self.add_row(fqn)
        if region.is_whole:
            for name, param in module.named_parameters():
                fqn = f"{region.fqn}.{name}"
                if fqn not in self.params and fqn.rpartition(".")[0] not in region.leaves:
                    source = f"inside of region {region.fqn}"
                    per_head = region.heads is not None and _is_per_head(module, name, param, region.heads)
                    self.claim(fqn, sharded(0, f"per head, {source}") if per_head else summed(source))

    def add_column(self, fqn: str, region: Region | None) -> None:
        entry, module = self.hf.modules[fqn], self.model.get_submodule(fqn)
        inside = region is not None
        if region is not None and region.heads is not None and self.is_grouped(fqn, region):
            for name, _ in module.named_parameters(recurse=False):
                self.claim(f"{fqn}.{name}", grouped(region.heads.num_kv, entry.source))
        else:
            for name, fragment in column_parameters(fqn, module, entry.source).items():
                self.claim(name, fragment)
        inputs, outputs = {}, {}
        if region is None or not region.is_whole:
            inputs[EVERY] = enter(Replicate(), Replicate())
        if entry.style is Style.COLUMN_GATHER:
            edge = within if inside else leave
            outputs["0"] = edge(FEATURES, Replicate(), num_outputs(module))
        elif not inside:
            raise PlanError(f"{fqn}: {entry.source} splits its outputs, but no module takes them so")
        if inputs or outputs:
            self.add_boundary(fqn, Boundary(AXIS, inputs, outputs, entry.source))

    def add_row(self, fqn: str) -> None:
        entry, module = self.hf.modules[fqn], self.model.get_submodule(fqn)
        for name, fragment in row_parameters(fqn, module, entry.source).items():
            self.claim(name, fragment)
        inputs = {}
        if entry.style is Style.ROW_SPLIT:
            inputs[_first_input(module)] = (within if self.parent_is_region(fqn) else enter)(
                Replicate(), FEATURES, num_inputs(module)
            )
        self.add_boundary(fqn, Boundary(AXIS, inputs, {"0": leave(Partial(), Replicate())}, entry.source))

    def add_leaf(self, fqn: str, entry: Styled) -> None:
        module = self.model.get_submodule(fqn)
        match entry.style:
            case Style.COLUMN | Style.COLUMN_GATHER:
                self.add_column(fqn, None)
                if module is self.head and self.options.loss_parallel:
                    self.boundaries[fqn] = replace(self.boundaries[fqn], outputs={})
                    self.injections[fqn] = SPLIT_LOGITS
            case Style.ROW | Style.ROW_SPLIT:
                self.add_row(fqn)
            case Style.EMBEDDING_ROWS:
                for name, _ in module.named_parameters():
                    self.claim(f"{fqn}.{name}", sharded(0, entry.source) if name == "weight" else summed(entry.source))
                self.injections[fqn] = VOCABULARY
                self.add_boundary(fqn, Boundary(AXIS, {}, {"0": leave(Partial(), Replicate())}, entry.source))
            case Style.EMBEDDING_COLUMNS:
                self.claim(f"{fqn}.weight", sharded(1, entry.source))
                length = self.model.get_parameter(f"{fqn}.weight").shape[1]
                edge = leave(FEATURES, Replicate(), length)
                self.add_boundary(fqn, Boundary(AXIS, {}, {"0": edge}, entry.source))
            case Style.EXPERTS:
                edges = {EVERY: enter(Replicate(), Replicate())}
                self.add_boundary(fqn, Boundary(AXIS, edges, {"0": leave(Partial(), Replicate())}, entry.source))
            case Style.ALL_REDUCE:
                edges = {EVERY: enter(Replicate(), Replicate())}
                self.add_boundary(fqn, Boundary(AXIS, edges, {"0": leave(Partial(), Replicate())}, entry.source))
            case Style.IDENTITY_EXPERT:
                edge = within(Replicate(), Partial())
                self.add_boundary(fqn, Boundary(AXIS, {}, {"0": edge}, entry.source))
            case _:
                raise PlanError(f"{fqn}: {entry.source}: the style is for parameters, not for a module")

    @property
    def head(self) -> nn.Module | None:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        return head if isinstance(head, nn.Module) else None

    def parent_is_region(self, fqn: str) -> bool:
        return fqn.rpartition(".")[0] in self.regions

    def is_grouped(self, fqn: str, region: Region) -> bool:
        """Whether a leaf makes key or value heads that are fewer than the ranks."""
        is_kv = fqn.rpartition(".")[2] in ("k_proj", "v_proj")
        is_split = self.hf.modules[fqn].style is Style.COLUMN
        return is_kv and is_split and region.heads is not None and region.heads.num_kv < self.size


def _is_per_head(region: nn.Module, name: str, param: nn.Parameter, heads: Heads) -> bool:
    """Whether a parameter has an entry, or a row, per head: a vector of the attention itself, or a norm's matrix."""
    owner = region.get_submodule(name.rpartition(".")[0])
    has_rows = param.ndim == 1 if owner is region else param.ndim == 2 and is_norm(owner)
    return has_rows and param.shape[0] in (heads.num, heads.num_kv)


def _first_input(module: nn.Module) -> str:
    """The first parameter of a module's forward: what the others call hidden states."""
    return list(inspect.signature(type(module).forward).parameters)[1]
