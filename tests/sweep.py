"""Parity sweep: every causal-LM architecture of transformers that has a tensor-parallel plan, built tiny, under a list
of modes, against one process of plain HF. Loss and every gradient, in fp32.

    python tests/sweep.py                                 all architectures and modes; what is done is not done again
    python tests/sweep.py --models llama --modes tp2      some of them
    python tests/sweep.py --table                         write docs/sweep.md from the results

Results are lines of JSON in docs/sweep.jsonl. A case is `ok`, `refused` (an error of hp that says why), `wrong`
(a loss or gradient outside of the bound) or `error` (any other exception). Some models are so sensitive that a change
of every weight by its last bit moves their gradients by more than the bound: they are `ok` if the split model differs
by less than that, and the detail says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hp_core import IGNORE_INDEX, Batch, HpError, Shard, decoder_blocks, pipeline
from hp_core.runtime import whole_tensor
from hp_core.testing import RankPools, gradient_differences
from hp_core.training.device import select_device
from hp_core.training.step import accumulate_gradients

ROOT = Path(__file__).parent.parent
TINY_CONFIGS = Path(__file__).parent / "tiny_configs.json"
RESULTS, TABLE = ROOT / "docs" / "sweep.jsonl", ROOT / "docs" / "sweep.md"
ROWS, LENGTH, IDS = 4, 16, 90

# name: (world size, configuration)
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"accelerator": {"tp_size": 2}}),
    "tp2_fsdp2": (4, {"accelerator": {"tp_size": 2}, "fsdp_config": {}}),
    "tp2_sp": (2, {"accelerator": {"tp_size": 2, "sequence_parallel": True, "loss_parallel": True}}),
}


@dataclass(frozen=True)
class Result:
    """One architecture in one mode. `split`: the share of decoder parameters of which no rank holds all."""

    model: str
    mode: str
    outcome: str
    detail: str = ""
    split: float | None = None


@dataclass(frozen=True)
class Reference:
    """Loss and gradients of the model in `folder` in one process of plain HF."""

    folder: Path
    loss: float
    gradients: Mapping[str, torch.Tensor]


def make_model(name: str, folder: Path) -> None:
    """Build `name` from its config class, with random weights, and save it."""
    config = AutoConfig.for_model(name, **tiny_configs()[name])
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in made.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    made.save_pretrained(folder)


def make_reference(folder: Path, *, moved: bool = False) -> Reference:
    """What hp has to equal: the model in `folder` in one process of plain HF; its weights `moved` by their last bit."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                up = torch.rand(param.shape, generator=generator) < 0.5
                param.copy_(torch.nextafter(param, torch.where(up, torch.inf, -torch.inf)))
    loss = plain_loss(model)
    loss.backward()
    gradients = {fqn: param.grad for fqn, param in model.named_parameters() if param.grad is not None}
    return Reference(folder, loss.item(), gradients)


def plain_loss(model: PreTrainedModel) -> torch.Tensor:
    """Cross-entropy of plain HF's logits, which has to be what HF itself makes of labels."""
    rows = batch()
    inputs = {"input_ids": rows.input_ids, "position_ids": rows.position_ids, "use_cache": False}
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), ignore_index=IGNORE_INDEX)


def batch() -> Batch:
    """The rows of one step: one document each, with different numbers of valid tokens."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, IDS, (ROWS, LENGTH), generator=generator)
    labels = torch.roll(input_ids, -1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    labels[0, 3:] = IGNORE_INDEX
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return Batch(input_ids, labels, positions, torch.zeros_like(input_ids))


def run_case(name: str, mode: str, expected: Reference, pools: RankPools) -> Result:
    """Train one step of the model, split as `mode` says, and compare."""
    world, config = MODES[mode]
    path = expected.folder / f"{mode}.yaml"
    base = {
        "model": {"pretrained_model_name_or_path": str(expected.folder), "torch_dtype": "float32"},
        "training": {"backend": "gloo", "train_iters": 1},
        "dataset": {"packing": False, "seq_length": LENGTH},
    }
    OmegaConf.save(OmegaConf.create({**base, **config}), path)
    try:
        loss, gradients, split = pools(world).run(train_ranks, path)[0]
    except HpError as error:
        return Result(name, mode, "refused", first_line(error))
    except Exception as error:  # whatever a model's code raises is a result
        return Result(name, mode, "error", first_line(error))
    # FSDP gives zeros, one process gives nothing, to parameters that take no part (an indexer that only selects).
    gradients = {fqn: grad for fqn, grad in gradients.items() if fqn in expected.gradients or grad.any()}
    try:
        assert abs(loss - expected.loss) <= 1e-5 * abs(expected.loss), f"loss {loss}, expected {expected.loss}"
        worst, fqn = max((times, fqn) for fqn, times in gradient_differences(expected.gradients, gradients).items())
        if worst <= 1:
            return Result(name, mode, "ok", "", split)
        moved = make_reference(expected.folder, moved=True)
        noise = max(gradient_differences(expected.gradients, moved.gradients).values())
        fault = (
            f"gradient of {fqn}: {worst:.3g} x the bound; a last bit of the weights moves gradients by {noise:.3g} x"
        )
        return Result(name, mode, "ok" if worst <= noise else "wrong", fault, split)
    except AssertionError as error:
        return Result(name, mode, "wrong", first_line(error), split)


def train_ranks(path: Path) -> tuple[float, dict[str, torch.Tensor], float]:
    """On every rank: the loss, all gradients, and the share of decoder parameters that is split."""
    session = pipeline.prepare(pipeline.load(path), select_device("gloo"))
    rows = ROWS // session.mesh.data_size
    mine = slice(session.mesh.data_rank * rows, (session.mesh.data_rank + 1) * rows)
    whole = batch()
    micro = Batch(whole.input_ids[mine], whole.labels[mine], whole.position_ids[mine], whole.document_ids[mine])
    loss = accumulate_gradients(session.model, [micro], session.mesh, session.plan, session.calls).loss
    gradients = {
        fqn: whole_tensor(param.grad, session.plan, fqn)
        for fqn, param in session.model.named_parameters()
        if param.grad is not None
    }
    return loss, gradients, split_share(session)


def split_share(session: pipeline.Session) -> float:
    blocks = tuple(f"{fqn}." for fqn in decoder_blocks(session.template))
    total = split = 0
    for fqn, param in session.plan.params.items():
        if fqn.startswith(blocks):
            numel = torch.Size(param.shape).numel()
            total += numel
            split += numel * any(isinstance(param.layout[axis], Shard) for axis in session.mesh.spec.model_axes)
    return split / max(total, 1)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"


@cache
def tiny_configs() -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = json.loads(TINY_CONFIGS.read_text(encoding="utf-8"))
    return configs


def read_results() -> dict[tuple[str, str], Result]:
    if not RESULTS.exists():
        return {}
    results = [Result(**json.loads(line)) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {(result.model, result.mode): result for result in results}


def write_table(results: Mapping[tuple[str, str], Result]) -> None:
    modes = [mode for mode in MODES if any(key[1] == mode for key in results)]
    lines = [
        "# Parity sweep",
        "",
        "Written by `python tests/sweep.py --table` from `docs/sweep.jsonl`, which `python tests/sweep.py` makes:",
        "every causal-LM architecture of transformers with a tensor-parallel plan, built tiny, one step in fp32 on",
        "gloo ranks; loss and every gradient against one process of plain HF. `split` is the share of decoder",
        "parameters that is split over `tp`.",
        "",
        "| mode | ok | refused | wrong | error |",
        "|---|---|---|---|---|",
    ]
    for mode in modes:
        outcomes = [result.outcome for result in results.values() if result.mode == mode]
        counts = " | ".join(str(outcomes.count(outcome)) for outcome in ("ok", "refused", "wrong", "error"))
        lines.append(f"| {mode} | {counts} |")
    lines += ["", f"| model | split | {' | '.join(modes)} |", f"|---|---|{'---|' * len(modes)}"]
    for name in sorted({key[0] for key in results}):
        found = [results.get((name, mode)) for mode in modes]
        share = next((f"{result.split:.0%}" for result in found if result and result.split is not None), "")
        lines.append(f"| {name} | {share} | {' | '.join(result.outcome if result else '' for result in found)} |")
    lines += ["", "## Notes", ""]
    lines += [
        f"- {result.model}, {result.mode}: {result.outcome}. {result.detail}"
        for _, result in sorted(results.items())
        if result.detail
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=sorted(tiny_configs()))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--again", action="store_true", help="do what is done once more")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results = read_results()
    pools = RankPools()
    for name in () if arguments.table else arguments.models:
        missing = [mode for mode in arguments.modes if arguments.again or (name, mode) not in results]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_model(name, Path(folder))
            expected = make_reference(Path(folder))
            for mode in missing:
                start = time.perf_counter()
                result = results[name, mode] = run_case(name, mode, expected, pools)
                print(
                    f"{name} {mode}: {result.outcome} {result.detail} ({time.perf_counter() - start:.1f} s)", flush=True
                )
        RESULTS.write_text(
            "".join(json.dumps(asdict(result)) + "\n" for _, result in sorted(results.items())), encoding="utf-8"
        )
    pools.close()
    write_table(results)


if __name__ == "__main__":
    main()
