"""Structural rules that complete thin plans where a column-then-row pair is certain."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hp_strategies_tp.hf_plan import HfPlan, Style, Styled


def complete_plan(model: nn.Module, plan: HfPlan) -> HfPlan:
    """`plan` with what its keys leave out but the structure of `model` makes certain."""
    return _tie(model, plan)


def _tie(model: nn.Module, plan: HfPlan) -> HfPlan:
    """An embedding and a head that share their weight are split alike, over the vocabulary."""
    modules = dict(plan.modules)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is None or embedding is None or embedding.weight is not head.weight:
        return plan
    names = {id(module): name for name, module in model.named_modules()}
    lookup, output = names[id(embedding)], names[id(head)]
    if lookup in modules or output in modules:
        source = f"shares its weight with {output if lookup in modules else lookup}"
        if lookup not in modules or modules[lookup].style is not Style.EMBEDDING_ROWS:
            modules[lookup] = Styled(Style.EMBEDDING_ROWS, source)
        if output not in modules or modules[output].style is not Style.COLUMN_GATHER:
            modules[output] = Styled(Style.COLUMN_GATHER, source)
    return replace(plan, modules=modules)
