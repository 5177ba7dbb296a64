"""Prefetch on real devices: parameters of the next block arrive while this one computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import write_run, write_tokens
from transformers import LlamaConfig, LlamaForCausalLM

Interval = tuple[float, float]


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """How long some interval of `first` and some of `second` run at once."""
    total = 0.0
    others = merge(second)
    for start, stop in merge(first):
        total += sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in others)
    return total


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def kernels(events: Iterable[Mapping[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """When gathers of parameters run on the device, and when other kernels do."""
    gathers, others = [], []
    for event in events:
        if event.get("cat") == "kernel":
            name, start = event["name"].lower(), float(event["ts"])
            interval = (start, start + float(event["dur"]))
            if "allgather" in name:
                gathers.append(interval)
            elif "nccl" not in name:
                others.append(interval)
    return gathers, others


def test_the_overlap_of_kernels_in_a_trace() -> None:
    def kernel(name: str, start: float, stop: float, cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": start, "dur": stop - start}

    events = [
        kernel("ncclDevKernel_AllGather_RING", 0, 10),
        kernel("ncclDevKernel_ReduceScatter_Sum", 0, 40),
        kernel("gemm", 5, 8),
        kernel("gemm_2", 7, 9),
        kernel("gemm_3", 20, 30),
        kernel("aten::mm", 0, 40, cat="cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    gathers, others = kernels(events)
    assert overlap(gathers, others) == 4
    assert overlap(others, gathers) == 4
    assert overlap(gathers, []) == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_prefetch_overlaps_gathers_with_computation(tmp_path: Path) -> None:
    """At depth 1 most of the time that gathers take is hidden; at depth 0 forward hides none of it."""
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 6, "num_attention_heads": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=4096, **shape))
    model.config.save_pretrained(tmp_path / "model")
    data = write_tokens(tmp_path / "data.jsonl", [{"input_ids": list(range(1024)) * 4}] * 32)
    hidden = {}
    for depth in (0, 1):
        path = write_run(
            tmp_path,
            tmp_path / "model",
            data,
            model={
                "_target_": "hp_core.models.HyperAutoModelForCausalLM.from_config",
                "config_path": str(tmp_path / "model"),
                "pretrained_model_name_or_path": None,
                "torch_dtype": "bfloat16",
            },
            dataset={"seq_length": 4096},
            training={"backend": "nccl", "train_iters": 6},
            fsdp_config={"forward_prefetch_depth": depth, "backward_prefetch_depth": depth},
            profiling={"enabled": True, "start_step": 4, "end_step": 6, "trace_dir": str(tmp_path / f"trace{depth}")},
        )
        subprocess.run([sys.executable, "-m", "hp_core.cli", "run", path, "--nproc-per-node", "2"], check=True)
        events = json.loads((tmp_path / f"trace{depth}" / "rank0-steps4-6.json").read_text())["traceEvents"]
        gathers, others = kernels(events)
        assert gathers
        hidden[depth] = overlap(gathers, others) / sum(stop - start for start, stop in merge(gathers))
    assert hidden[1] > 0.5
    assert hidden[1] > hidden[0]
