"""Structural rules: what a model's plan leaves out, or gets wrong, where the structure of a module makes it certain."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from hp_strategies_tp.hf_plan import HfPlan, Style, Styled
from hp_strategies_tp.regions import is_norm
from hp_strategies_tp.styles import num_inputs, num_outputs

_ATTENTION = {"q_proj": Style.COLUMN, "k_proj": Style.COLUMN, "v_proj": Style.COLUMN}
_LATENT_ATTENTION = {"q_b_proj": Style.COLUMN, "kv_b_proj": Style.COLUMN, "o_proj": Style.ROW}
_OUTPUTS = ("o_proj", "out_proj", "dense")


def complete_plan(model: nn.Module, plan: HfPlan) -> HfPlan:
    """`plan` with what its keys leave out but the structure of `model` makes certain."""
    modules, parameters = dict(plan.modules), dict(plan.parameters)
    for fqn, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "is_concatenated"):
            modules[fqn] = Styled(Style.EXPERTS, modules[fqn].source if fqn in modules else "rule: stacked experts")
            parameters.update(_stacked_experts(fqn, module))
        elif not any(f"{fqn}.{name}" in modules for name, _ in module.named_children()):
            found = _attention(module) or _latent_attention(module) or _mlp(module)
            rule = f"rule: {fqn.rpartition('.')[2]} of linear modules"
            modules.update({f"{fqn}.{name}": Styled(style, rule) for name, style in found.items()})
    return _tie(model, replace(plan, modules=modules, parameters=parameters))


def _stacked_experts(fqn: str, module: nn.Module) -> dict[str, Styled]:
    """Experts as transformers declares them: the module itself says how its weights lie, which a plan may not know."""
    source = "rule: stacked experts, " + ", ".join(
        f"{name}={getattr(module, name)}" for name in ("has_gate", "is_transposed", "is_concatenated")
    )
    packed = bool(module.has_gate and module.is_concatenated)
    last, second = (Style.PACKED_ROW, Style.PACKED_COLUMN) if packed else (Style.ROW, Style.COLUMN)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    styles = {
        first: last if module.is_transposed else second,
        f"{first}_bias": last,
        "down_proj": Style.COLUMN if module.is_transposed else Style.ROW,
        "down_proj_bias": Style.ADDED_ONCE,
    }
    own = dict(module.named_parameters(recurse=False))
    return {f"{fqn}.{name}": Styled(style, source) for name, style in styles.items() if name in own}


def _attention(module: nn.Module) -> dict[str, Style]:
    """Attention with separate projections, whose other parameters are per head or the same for every head."""
    children, output = dict(module.named_children()), next((name for name in _OUTPUTS if hasattr(module, name)), None)
    head_dim, groups = getattr(module, "head_dim", None), getattr(module, "num_key_value_groups", None)
    names = {*_ATTENTION, output}
    if output is None or not isinstance(head_dim, int) or not isinstance(groups, int):
        return {}
    if not all(isinstance(children.get(str(name)), nn.Linear) for name in names):
        return {}
    num_kv, rest = divmod(num_outputs(children["k_proj"]), head_dim)
    if rest or num_outputs(children["q_proj"]) != num_kv * groups * head_dim:
        return {}
    if any(param.shape != (num_kv * groups,) for _, param in module.named_parameters(recurse=False)):
        return {}
    others = [child for name, child in children.items() if name not in names and any(True for _ in child.parameters())]
    if not all(is_norm(child) and all(p.shape == (head_dim,) for p in child.parameters()) for child in others):
        return {}
    return {**_ATTENTION, output: Style.ROW}


def _latent_attention(module: nn.Module) -> dict[str, Style]:
    """Multi-head latent attention: heads begin at the second projections."""
    children = dict(module.named_children())
    names = dict(_LATENT_ATTENTION)
    if "q_b_proj" not in children:
        names["q_proj"] = names.pop("q_b_proj")
    if not isinstance(getattr(module, "num_heads", None), int):
        return {}
    if not all(isinstance(children.get(name), nn.Linear) for name in names):
        return {}
    known = {*names, "q_a_proj", "kv_a_proj_with_mqa"}
    others = [child for name, child in children.items() if name not in known and any(True for _ in child.parameters())]
    return names if all(map(is_norm, others)) and not dict(module.named_parameters(recurse=False)) else {}


def _mlp(module: nn.Module) -> dict[str, Style]:
    """Two or three linear modules, into a wider space and back."""
    name = type(module).__name__.lower()
    linear = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    if not name.endswith(("mlp", "feedforward")) or dict(module.named_parameters(recurse=False)):
        return {}
    if len(linear) not in (2, 3) or not all(type(child) is nn.Linear for child in linear.values()):
        return {}
    outer, inner = num_inputs(next(iter(linear.values()))), num_outputs(next(iter(linear.values())))
    shapes = {name: (num_inputs(child), num_outputs(child)) for name, child in linear.items()}
    if outer == inner or sorted(shapes.values()) != sorted([(outer, inner)] * (len(linear) - 1) + [(inner, outer)]):
        return {}
    return {name: Style.COLUMN if shape == (outer, inner) else Style.ROW for name, shape in shapes.items()}


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
