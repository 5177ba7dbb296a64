"""TP for hp: tensor and sequence parallelism from the plans of HuggingFace models, collectives at region edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hp_core import Batch, Mesh, MeshAxis, MeshSpec, PlanFragment, ShardingPlan, Term, hookimpl
from hp_strategies_tp.options import Options as TpOptions
from hp_strategies_tp.plan import SPLIT_LOGITS, VOCABULARY, plan_sharding
from hp_strategies_tp.styles import AXIS
from hp_strategies_tp.vocabulary import split_embedding, vocabulary_parallel_cross_entropy

__all__ = ["plugin"]


class TpPlugin:
    """The plugin object; its hooks are documented in `hp_core.hookspecs`."""

    name = "tp"
    Options = TpOptions
    axes = (MeshAxis(AXIS, role="model", option="tp_size"),)
    must_follow = ()

    @hookimpl
    def hp_plan_sharding(self, model: nn.Module, mesh: MeshSpec, options: TpOptions) -> PlanFragment | None:
        return plan_sharding(model, mesh, options)

    @hookimpl
    def hp_apply_plan(self, model: nn.Module, mesh: Mesh, plan: ShardingPlan) -> None:
        for fqn, name in plan.injections.items():
            if name == VOCABULARY:
                split_embedding(model.get_submodule(fqn), plan.of(f"{fqn}.weight").shape[0], mesh)

    @hookimpl
    def hp_compute_loss(self, outputs: Any, batch: Batch, mesh: Mesh, plan: ShardingPlan) -> Mapping[str, Term] | None:
        heads = [fqn for fqn, name in plan.injections.items() if name == SPLIT_LOGITS]
        if not heads:
            return None
        vocab_size = plan.of(f"{heads[0]}.weight").shape[0]
        return {"ce": vocabulary_parallel_cross_entropy(outputs.logits, batch, mesh, vocab_size)}


plugin = TpPlugin()
