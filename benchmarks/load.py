"""Loading a checkpoint on several ranks: hp against transformers' own sharded loading.

    python benchmarks/load.py [--folder FOLDER] [--ranks 2 4] [--rounds 3] [--models moe dense]

Makes two checkpoints of a little over 1 GB in FOLDER, kept for the next time: Qwen3-MoE in the hub's layout, one tensor
per expert and projection, and a dense Qwen3. Every round loads each with both systems, one after the other on the same
number of gloo ranks of one thread, from a cold page cache, in alternating order. What is timed is the same for both:
from the config to a model sharded with FSDP2 and filled, on all ranks, and every value of it written once in place, as
the first optimizer step does: shards that are views of the mapped file are read and copied only then. Prints medians
over the rounds, as a Markdown table.

FOLDER must be on a disk: a file system in memory has no cold cache. transformers needs accelerate for its part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hp_core import MeshAxis, ParamFragment, PlanFragment, Precision, Shard
from hp_core.mesh import plan_mesh
from hp_core.models.blocks import decoder_blocks
from hp_core.models.build import build_on_meta
from hp_core.models.materialize import materialize
from hp_core.models.weights import load_checkpoint
from hp_core.plan import merge_fragments
from hp_core.testing.meters import PeakMemory, bytes_read, drop_from_cache

SYSTEMS = ("hp", "transformers")
SHAPES = {
    "moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 10,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "dense": {"model_type": "qwen3", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 13},
}
COMMON = {"vocab_size": 32768, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hp-benchmark-load")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.worker:
        measure(options.worker, options.folder)
        return
    print("| checkpoint | ranks | system | load, s | read from disk / file | peak RssAnon, MB | shards, MB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        folder = options.folder / name
        if not (folder / "config.json").is_file():
            make_checkpoint(name, folder)
        for ranks in options.ranks:
            for line in compare(name, folder, ranks, options.rounds):
                print(line, flush=True)


def make_checkpoint(name: str, folder: Path) -> None:
    config = AutoConfig.for_model(**SHAPES[name], **COMMON, dtype=DTYPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="400MB")


def compare(name: str, folder: Path, ranks: int, rounds: int) -> list[str]:
    """Table lines: medians over the rounds, and of the pairwise ratio of times."""
    results: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for i in range(rounds):
        for system in SYSTEMS if i % 2 == 0 else SYSTEMS[::-1]:
            results[system].append(start_ranks(system, folder, ranks))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    lines = []
    for system in SYSTEMS:
        median = {key: statistics.median(run[key] for run in results[system]) for key in results[system][0]}
        lines.append(
            f"| {name}, {size / 1e9:.2f} GB | {ranks} | {system} | {median['seconds']:.2f} | "
            f"{median['bytes_read'] / size:.2f} | {median['peak'] / 1e6:.0f} | {median['shards'] / 1e6:.0f} |"
        )
    ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in zip(*results.values(), strict=True)]
    lines.append(f"| | {ranks} | time of transformers / hp, paired | {statistics.median(ratios):.2f} | | | |")
    return lines


def start_ranks(system: str, folder: Path, ranks: int) -> dict[str, float]:
    """Load once, from a cold cache, in fresh processes."""
    for path in folder.glob("*.safetensors"):
        drop_from_cache(path)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    done = subprocess.run(
        [sys.executable, *command, f"--worker={system}", f"--folder={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(system: str, folder: Path) -> None:
    """One rank: load, and let rank 0 print what all ranks needed."""
    dist.init_process_group("gloo")
    load = {"hp": load_with_hp, "transformers": load_with_transformers}[system]
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # imports, which are not to be timed
    dist.barrier()
    read_before, start = bytes_read(), time.perf_counter()
    with PeakMemory() as memory:
        model = load(folder)
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(1.0)
        dist.barrier()
    mine = {
        "seconds": time.perf_counter() - start,
        "bytes_read": bytes_read() - read_before,
        "peak": memory.peak,
        "shards": sum(p.to_local().nbytes for p in model.parameters()),
    }
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        total = {key: max(rank[key] for rank in everyone) for key in ("seconds", "peak", "shards")}
        print(json.dumps({**total, "bytes_read": sum(rank["bytes_read"] for rank in everyone)}))
    dist.destroy_process_group()


def load_with_hp(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    model = build_on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=DTYPE))
    template = deepcopy(model)
    size = dist.get_world_size()
    mesh = plan_mesh(size, [(MeshAxis("dp_shard", "data", "dp_shard_size"), size)])
    fragment = PlanFragment({fqn: ParamFragment({"dp_shard": Shard(0)}) for fqn, _ in model.named_parameters()})
    plan = merge_fragments(model, mesh, Precision(DTYPE, DTYPE, DTYPE), [("benchmark", fragment)])
    device_mesh = init_device_mesh("cpu", (size,))
    for module in (*decoder_blocks(model).values(), model):
        fully_shard(module, mesh=device_mesh)
    materialize(model, plan, "cpu")
    load_checkpoint(model, plan, template, folder, dist.get_rank())
    return model


def load_with_transformers(folder: Path) -> PreTrainedModel:
    parallel = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, distributed_config=parallel)


if __name__ == "__main__":
    main()
