"""`hp run CONFIG`: train, on as many ranks as asked for."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hp_core.cli.launcher import Ranks, launch
from hp_core.errors import ConfigError
from hp_core.mesh import MeshAxis, plan_mesh

if TYPE_CHECKING:
    from argparse import _SubParsersAction

WORKER = "hp_core.cli.worker"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of `hp run`."""
    parser = commands.add_parser(
        "run",
        help="train",
        usage="hp run CONFIG [--a.b=c ...] [--nproc-per-node N] [--nnodes M --node-rank R --rdzv-endpoint H:P]",
        epilog="Under torchrun or another launcher that sets RANK and WORLD_SIZE, the command is one rank.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the YAML file; --a.b=c overrides one of its keys")
    parser.add_argument(
        "--nproc-per-node",
        type=_positive,
        metavar="N",
        help="ranks to start here (default: one per accelerator; on CPU the fewest that the configuration allows)",
    )
    parser.add_argument("--nnodes", type=_positive, default=1, metavar="M", help="number of nodes (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="H:P", help="host and port of node 0, the same on all nodes")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Train. Returns the exit code."""
    # Heavy: transformers. `hp --help` and the other commands do without.
    from hp_core import pipeline

    config, overrides = arguments.config, arguments.overrides
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if arguments.nproc_per_node is not None:
            raise ConfigError(
                "--nproc-per-node asks for ranks to be started, but RANK and WORLD_SIZE say that this is one. "
                "Drop the option or unset them."
            )
        pipeline.run(config, overrides)
        return 0
    # Once here, so that a wrong configuration costs no start of ranks.
    loaded = pipeline.load(config, overrides)
    requests = loaded.plugins.axis_requests()
    ranks = _choose_ranks(arguments, loaded.config.training.backend, requests)
    plan_mesh(ranks.world_size, requests)
    if ranks.world_size == 1:
        pipeline.run(config, overrides)
        return 0
    return launch(ranks, ["-m", WORKER, str(config), *overrides])


def smallest_world(requests: Iterable[tuple[MeshAxis, int | None]]) -> int:
    """The fewest ranks that the requested axes can be laid over, by the rules of `plan_mesh`."""
    sizes: dict[str, list[int]] = {"data": [], "sequence": [], "model": []}
    for axis, size in requests:
        sizes[axis.role].append(size or 1)
    sequence, model = math.prod(sizes["sequence"]), math.prod(sizes["model"])
    # Storage is sharded over the data and sequence ranks together, so sequence ranks count for both.
    return math.lcm(sequence, *(size for size in sizes["data"] if size > 0)) * model


def _choose_ranks(
    arguments: argparse.Namespace, backend: str | None, requests: Iterable[tuple[MeshAxis, int | None]]
) -> Ranks:
    nodes = arguments.nnodes
    if nodes > 1 and arguments.rdzv_endpoint is None:
        raise ConfigError("--nnodes: more than one node needs --rdzv-endpoint HOST:PORT, where node 0 listens.")
    if not 0 <= arguments.node_rank < nodes:
        raise ConfigError(f"--node-rank: expected 0 to {nodes - 1}, found {arguments.node_rank}.")
    per_node = arguments.nproc_per_node or _num_accelerators(backend)
    if not per_node:
        if nodes > 1:
            raise ConfigError("--nnodes: more than one node without accelerators needs --nproc-per-node.")
        per_node = smallest_world(requests)
    return Ranks(per_node, nodes, arguments.node_rank, arguments.rdzv_endpoint)


def _num_accelerators(backend: str | None) -> int:
    if backend == "gloo" or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {text}")
    return value
