"""Check what the demo has made. Usage: verify.py CONFIG CHECKPOINT EXPORT STARTED [PART=SECONDS ...]

Loads the training checkpoint into hp's own model and the export into plain transformers, compares their logits, lets
the latter write a line, and compares the loss on held-out text with what word counts alone would give. Exits with 1
when the logits differ at all, or when the loss is not at least 0.5 nats better. STARTED is when the demo began, in
seconds since 1970; the parts are what has been done since.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from hp_core import pipeline
from hp_core.training.device import select_device, start_process_group

REQUIRED_GAIN = 0.5  # nats per token
PROMPT = "    def __init__(self"


def hp_logits(config: Path, checkpoint: Path, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[1, S, V]` of the checkpoint in the model that hp trains, here on one rank."""
    loaded = pipeline.load(config, ["--fsdp_config.dp_shard_size=1"])
    device = select_device("gloo")
    start_process_group(device)
    try:
        model = pipeline.prepare(loaded, device).model.eval()
        load_distributed({f"model.{fqn}": param for fqn, param in model.named_parameters()}, checkpoint_id=checkpoint)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=input_ids).logits
        return logits
    finally:
        dist.destroy_process_group()


def unigram_entropy(tokenizer: PreTrainedTokenizerBase, file: Path) -> float:
    """Entropy of the file's own distribution of tokens, in nats per token: the best loss without looking at context.

    Of the tokens that the loss is about, that is: nothing predicts the first one of a document.
    """
    counts: Counter[int] = Counter()
    for line in file.read_text(encoding="utf-8").splitlines():
        counts.update([*tokenizer(json.loads(line)["text"])["input_ids"][1:], tokenizer.eos_token_id])
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values())


def evaluation_loss(metrics: Path) -> float:
    """The last loss on held-out text that the run has logged."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return float([record["eval_loss"] for record in records if "eval_loss" in record][-1])


def main(config: Path, checkpoint: Path, export: Path, started: float, times: dict[str, float]) -> int:
    work = export.parent
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    held_out = work / "held_out.jsonl"
    text = json.loads(held_out.read_text(encoding="utf-8").splitlines()[0])["text"]
    input_ids = torch.tensor([tokenizer(text)["input_ids"][:256]])

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    with torch.no_grad():
        difference = (model(input_ids=input_ids).logits - hp_logits(config, checkpoint, input_ids)).abs().max().item()
        prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        written = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    print("it writes:", tokenizer.decode(written[0], skip_special_tokens=True).splitlines()[0])

    loss = evaluation_loss(work / "run/metrics.jsonl")
    entropy = unigram_entropy(tokenizer, held_out)
    total = time.time() - started
    times["verification"] = total - sum(times.values())
    rows = {
        "loss on held-out text": f"{loss:.3f} nats per token",
        "unigram entropy of that text": f"{entropy:.3f} nats per token",
        "difference": f"{entropy - loss:.3f} (required: {REQUIRED_GAIN})",
        "logits, hp against transformers": f"largest difference {difference:g} (required: 0)",
        **{part: f"{seconds:.0f} s" for part, seconds in times.items()},
        "total": f"{total:.0f} s",
    }
    print()
    for name, value in rows.items():
        print(f"{name:<33}{value}")
    return 0 if difference == 0 and entropy - loss >= REQUIRED_GAIN else 1


if __name__ == "__main__":
    config, checkpoint, export = map(Path, sys.argv[1:4])
    parts = {name: float(seconds) for name, seconds in (argument.split("=") for argument in sys.argv[5:])}
    sys.exit(main(config, checkpoint, export, float(sys.argv[4]), parts))
