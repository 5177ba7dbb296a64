"""Boundaries: what happens to tensors at the edge of a module.

Inside of a *region* ranks work on their own shares of one computation. The region's output is the sum, or the
concatenation, of what its ranks make. So a value that all ranks hold alike inside has a *partial* gradient: each
rank knows only what went through its share. Outside, equal values have equal gradients. Forward and backward of
every edge follow from this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hp_core.plan.placements import Partial, Placement, Replicate, Shard

EVERY = "*"
"""In `Boundary.inputs`: every floating-point tensor argument that carries a gradient."""


@dataclass(frozen=True)
class Edge:
    """One tensor that crosses a boundary over one mesh axis: `src` becomes `dst`, and in backward `dst_grad`, the
    layout of the gradient that comes in, becomes `src_grad`. `length` is the whole length of a dim that is split or
    joined, where chunks may be uneven."""

    src: Placement
    dst: Placement
    src_grad: Placement
    dst_grad: Placement
    length: int | None = None

    @property
    def forward(self) -> str:
        """What the edge does in forward, in a word."""
        return movement(self.src, self.dst)

    @property
    def backward(self) -> str:
        """What the edge does in backward, in a word."""
        return movement(self.dst_grad, self.src_grad)


def enter(src: Placement, dst: Placement, length: int | None = None) -> Edge:
    """From outside into a region."""
    return Edge(src, dst, _outside(src), _inside(dst), length)


def leave(src: Placement, dst: Placement, length: int | None = None) -> Edge:
    """From the inside of a region to the outside."""
    return Edge(src, dst, _inside(src), _outside(dst), length)


def within(src: Placement, dst: Placement, length: int | None = None) -> Edge:
    """Between two places inside of one region."""
    return Edge(src, dst, _inside(src), _inside(dst), length)


def outside(src: Placement, dst: Placement, length: int | None = None) -> Edge:
    """Between two places outside of every region."""
    return Edge(src, dst, _outside(src), _outside(dst), length)


@dataclass(frozen=True)
class Boundary:
    """The edge of one module over one mesh axis.

    `inputs` maps names of the forward's parameters (or `EVERY`), `outputs` positions in what it returns ("0" is the
    tensor itself when it returns one), to edges. `source` says why, for people.
    """

    axis: str
    inputs: Mapping[str, Edge] = field(default_factory=dict)
    outputs: Mapping[str, Edge] = field(default_factory=dict)
    source: str = ""

    def to_json(self) -> dict[str, object]:
        """The boundary as plain JSON data."""
        return {
            "axis": self.axis,
            "inputs": {name: _edge_to_json(edge) for name, edge in self.inputs.items()},
            "outputs": {name: _edge_to_json(edge) for name, edge in self.outputs.items()},
            "source": self.source,
        }


def movement(src: Placement, dst: Placement) -> str:
    """The collective, or local change, that takes a tensor from `src` to `dst`. Raises ValueError if there is none."""
    match src, dst:
        case _ if src == dst:
            return "none"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial():
            return "first rank only"
        case Shard(), Replicate():
            return "all-gather"
        case Shard(), Partial():
            return "pad"
        case Partial(), Replicate():
            return "all-reduce"
        case Partial(), Shard():
            return "reduce-scatter"
        case Shard(), Shard():
            return "all-to-all"
    raise ValueError(f"nothing takes {src} to {dst}")


def _inside(placement: Placement) -> Placement:
    if isinstance(placement, Shard):
        return placement
    return Partial() if isinstance(placement, Replicate) else Replicate()


def _outside(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else Replicate()


def _edge_to_json(edge: Edge) -> dict[str, str]:
    return {
        "src": str(edge.src),
        "dst": str(edge.dst),
        "forward": edge.forward,
        "backward": edge.backward,
    }
