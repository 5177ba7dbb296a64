"""The contract between the core and its plugins: the one file that a plugin author must read.

A plugin is an *instance*, named by an entry point of group `hp.plugins`, with these attributes:

- `name`: the name used in the configuration, equal to the entry point's name;
- `Options`: a frozen dataclass; its instance is handed to every hook as `options`;
- `axes`: a tuple of `MeshAxis`, the mesh axes that it asks for (may be empty);
- `must_follow`: a tuple of plugin names that it has to come after in the configured order (`"*"`: all others).

Configuration keys belong to a plugin through a second entry-point group, `hp.keys`: `accelerator.acme_size`
becomes the field `acme_size` of `Options`, and a whole section such as `acme_config` becomes its fields.

Hooks are listed in firing order. Each is called plugin by plugin, in the configured order, with the plugin's own
options; a plugin implements those it needs, marked with `hp_core.hookimpl`, and may leave out arguments that it
does not use. The contract is provisional (0.x) until a conformance kit ships.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from hp_core.config import ModelConfig
    from hp_core.data import Batch
    from hp_core.mesh import Mesh, MeshSpec
    from hp_core.plan import PlanFragment, Precision, ShardingPlan
    from hp_core.training import Term

PROJECT = "hp"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def hp_load_model(config: ModelConfig) -> nn.Module | None:
    """Build the model on the meta device, with real buffers and without weights.

    None: not mine. The first plugin that returns a model wins; without one, core builds the HF class.
    """


@hookspec
def hp_replace_modules(model: nn.Module, mesh: MeshSpec, options: Any) -> Mapping[str, nn.Module] | None:
    """Give modules to put in the place of others: FQN to replacement, with the same parameters and call.

    The same FQN from two plugins is an error that names both.
    """


@hookspec
def hp_plan_sharding(
    model: nn.Module, mesh: MeshSpec, options: Any, precision: Precision, plan_so_far: Mapping[str, PlanFragment]
) -> PlanFragment | None:
    """Contribute to the sharding plan. Pure: no collectives, no change to the model, no real mesh.

    `precision` is what the configuration asks for; a strategy that casts says in its fragment what it will do.
    `plan_so_far` holds the fragments of the strategies before this one, by name.
    """


@hookspec
def hp_apply_plan(model: nn.Module, mesh: Mesh, plan: ShardingPlan, options: Any) -> nn.Module | None:
    """Do to the model on the meta device what core cannot do from the plan alone.

    A returned module takes the model's place; None keeps it.
    """


@hookspec(firstresult=True)
def hp_load_weights(model: nn.Module, plan: ShardingPlan, config: ModelConfig) -> bool | None:
    """Fill every parameter of the sharded model, each rank its own part. True: done; None: not mine (core loads)."""


@hookspec
def hp_shard_batch(batch: Batch, mesh: Mesh, options: Any) -> Batch | None:
    """Give this rank's part of a micro-batch that the ranks of one data rank share; None keeps it."""


@hookspec
def hp_begin_micro_batch(model: nn.Module, index: int, count: int, options: Any) -> None:
    """Called before the forward of micro-batch `index` of the `count` in an optimizer step.

    For what depends on whether the next backward is the step's last, such as when to reduce gradients.
    """


@hookspec
def hp_compute_loss(
    outputs: Any, batch: Batch, mesh: Mesh, plan: ShardingPlan, options: Any
) -> Mapping[str, Term] | None:
    """Give named loss terms, each a sum over this rank's share and what it is to be divided by.

    The same term from two plugins is an error; core supplies `ce` when nobody does.
    """
