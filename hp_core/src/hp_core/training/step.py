"""One optimizer step's gradients: every micro-batch forward and backward, summed and reduced by the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core.data import Batch
from hp_core.mesh import Mesh
from hp_core.plan import ShardingPlan
from hp_core.training.gradients import reduce_partial_gradients
from hp_core.training.loss import Term, step_denominators


@dataclass(frozen=True)
class PluginCalls:
    """The per-step hook calls, handed in by the pipeline."""

    shard_batch: Callable[[Batch], Batch]
    begin_micro_batch: Callable[[int, int], None]
    compute_loss: Callable[[Any, Batch], Mapping[str, Term]]


@dataclass(frozen=True)
class StepLoss:
    """Of one step, on all ranks: the loss per term, and the number of tokens that carried loss."""

    terms: Mapping[str, float]
    num_valid_tokens: int

    @property
    def loss(self) -> float:
        return sum(self.terms.values())


class LossSum:
    """Adds up the loss terms of one step's micro-batches on this rank; `result` sums them over ranks."""

    def __init__(self, micro_batches: list[Batch], mesh: Mesh, device: torch.device) -> None:
        self._group = mesh.batch_group
        self._denominators = step_denominators(micro_batches, self._group, device)
        self._shares: dict[str, torch.Tensor] = {}

    def add(self, terms: Mapping[str, Term]) -> torch.Tensor:
        """Record the terms of a micro-batch; returns this rank's share of the step's loss, to call backward on.

        Its gradients, summed over ranks and micro-batches, are those of the step's loss. A step without a single
        valid token has loss 0.
        """
        shares = {name: term.total / max(self._denominators[term.per], 1) for name, term in sorted(terms.items())}
        for name, share in shares.items():
            self._shares[name] = self._shares.get(name, 0) + share.detach().float()
        return torch.stack(list(shares.values())).sum()

    def result(self) -> StepLoss:
        """The step's loss. Collective."""
        names = sorted(self._shares)
        values = torch.stack([self._shares[name] for name in names])
        dist.all_reduce(values, group=self._group)
        return StepLoss(dict(zip(names, values.tolist(), strict=True)), self._denominators["tokens"])


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What the HF forward is called with. No mask and no cache: then transformers keeps packed documents apart.

    Models that take no `position_ids` count positions themselves.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = batch.position_ids
    return inputs


def accumulate_gradients(
    model: nn.Module, micro_batches: list[Batch], mesh: Mesh, plan: ShardingPlan, calls: PluginCalls
) -> StepLoss:
    """Forward and backward of all micro-batches of one optimizer step; gradients are then those of the step's loss.

    Collective. The denominators are counted before the first backward (see `Term`).
    """
    micro_batches, losses = _begin_step(micro_batches, mesh, calls)
    for index, batch in enumerate(micro_batches):
        calls.begin_micro_batch(index, len(micro_batches))
        outputs = model(**model_inputs(model, batch))
        losses.add(calls.compute_loss(outputs, batch)).backward()  # type: ignore[no-untyped-call]
    reduce_partial_gradients(model, mesh, plan)
    return losses.result()


@torch.no_grad()
def evaluate_step(model: nn.Module, micro_batches: list[Batch], mesh: Mesh, calls: PluginCalls) -> StepLoss:
    """The loss of one step's micro-batches without gradients. Collective."""
    micro_batches, losses = _begin_step(micro_batches, mesh, calls)
    for batch in micro_batches:
        losses.add(calls.compute_loss(model(**model_inputs(model, batch)), batch))
    return losses.result()


def _begin_step(micro_batches: list[Batch], mesh: Mesh, calls: PluginCalls) -> tuple[list[Batch], LossSum]:
    """This rank's parts of the micro-batches, on its device, and the sum that their losses go into. Collective."""
    device = torch.device(mesh.device_type)
    mine = [calls.shard_batch(batch.to(device)) for batch in micro_batches]
    return mine, LossSum(mine, mesh, device)
