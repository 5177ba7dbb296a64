"""Which modules are regions: the insides that run on each rank's share, with collectives at their edges only.

A region is the module that owns a row-wise leaf together with the column-wise leaves that feed it. Everything before
the row-wise leaf has a partial gradient, which is summed once, where the region is entered; the row-wise leaf's output
is the region's exit. That holds as long as nothing reaches the output of the module past the row-wise leaf, so a
module with parts that hp does not know (embeddings, lists of modules) is not made a region: there every column-wise
leaf is entered on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from hp_strategies_tp.heads import Heads, find_heads
from hp_strategies_tp.hf_plan import Style, Styled
from hp_strategies_tp.styles import num_outputs

_COLUMN = frozenset((Style.COLUMN, Style.COLUMN_GATHER, Style.PACKED_COLUMN))
_ROW = frozenset((Style.ROW, Style.ROW_SPLIT, Style.PACKED_ROW))


@dataclass(frozen=True)
class Region:
    """`columns`, `rows` and `inner` are FQNs of leaves in it. Inner ones are rows that do not make the output but
    something per head. `is_whole`: it is entered at its own edge, not leaf by leaf. `heads`: of an attention whose
    heads are split."""

    fqn: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inner: tuple[str, ...]
    is_whole: bool
    heads: Heads | None

    @property
    def leaves(self) -> tuple[str, ...]:
        return (*self.columns, *self.inner, *self.rows)


def find_regions(model: nn.Module, styled: Mapping[str, Styled]) -> dict[str, Region]:
    """The regions of linear leaves, by FQN of the module that owns the leaves."""
    by_parent: dict[str, list[str]] = {}
    for fqn, entry in styled.items():
        if entry.style in _COLUMN | _ROW:
            by_parent.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    regions = {}
    for parent, leaves in sorted(by_parent.items()):
        module = model.get_submodule(parent)
        columns = tuple(fqn for fqn in leaves if styled[fqn].style in _COLUMN)
        heads = find_heads(module) if any(styled[fqn].style is Style.COLUMN for fqn in columns) else None
        rows = tuple(fqn for fqn in leaves if styled[fqn].style in _ROW)
        inner = tuple(
            fqn for fqn in rows if heads is not None and len(rows) > 1 and _is_per_head(model.get_submodule(fqn), heads)
        )
        rows = tuple(fqn for fqn in rows if fqn not in inner)
        if rows and columns:
            is_whole = len(rows) == 1 and _is_known(module, parent, styled)
            regions[parent] = Region(parent, columns, rows, inner, is_whole, heads)
    return regions


def _is_per_head(module: nn.Module, heads: Heads) -> bool:
    return num_outputs(module) in (heads.num, heads.num_kv)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises every token on its own."""
    return "norm" in type(module).__name__.lower()


def _is_known(module: nn.Module, fqn: str, styled: Mapping[str, Styled]) -> bool:
    """Whether every part of `module` that owns parameters is a leaf of the region, or certain to come before one."""
    for name, child in module.named_children():
        entry = styled.get(f"{fqn}.{name}")
        if entry is None and not any(True for _ in child.parameters()):
            continue
        if entry is not None and entry.style in _COLUMN | _ROW:
            continue
        if entry is not None or isinstance(child, nn.Embedding | nn.ModuleList):
            return False
    return True
