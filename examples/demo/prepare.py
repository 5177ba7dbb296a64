"""Make what the demo trains on: text, a tokenizer and a model configuration. Usage: prepare.py OUTPUT_DIR

The text is what every machine with Python has: the sources of its standard library, cut into short documents so
that every batch has some of many files. Every 40th file is held out, whole.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

# Not prose or programs: other people's packages, tests with odd contents, tables of character codes.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
HELD_OUT_EVERY = 40
DOCUMENT_LENGTH = 600  # characters
VOCABULARY_SIZE = 512  # small: its statistics are learnt from the few tokens that fit into a minute
END, PAD = "<|end|>", "<|pad|>"


def read_files(folder: Path) -> list[list[str]]:
    """The documents of every Python file below `folder`, in the order of paths."""
    paths = sorted(path for path in folder.rglob("*.py") if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts))
    return [list(cut(path.read_text(encoding="utf-8", errors="ignore"))) for path in paths]


def cut(text: str) -> Iterator[str]:
    """Whole lines, as many as make up a document."""
    document = ""
    for line in text.splitlines(keepends=True):
        document += line
        if len(document) >= DOCUMENT_LENGTH:
            yield document
            document = ""
    if document.strip():
        yield document


def write_jsonl(path: Path, documents: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)


def train_tokenizer(documents: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it covers every text, and its tokens join back to the very same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """A Qwen3-MoE with everything that the big ones have, in small: 3 layers of 8 experts, 2 per token."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=256,
        intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size): the usual 0.02 is meant for wide models
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    files = read_files(Path(sysconfig.get_paths()["stdlib"]))
    held_out = [text for texts in files[::HELD_OUT_EVERY] for text in texts]
    train = [text for index, texts in enumerate(files) if index % HELD_OUT_EVERY for text in texts]
    write_jsonl(output / "train.jsonl", train)
    write_jsonl(output / "held_out.jsonl", held_out)
    tokenizer = train_tokenizer(train)
    tokenizer.save_pretrained(output / "tokenizer")
    model_config(tokenizer).save_pretrained(output / "model")
    size = sum(map(len, train)) / 1e6
    print(f"{len(train)} documents to train on ({size:.1f} million characters), {len(held_out)} held out,", end=" ")
    print(f"a vocabulary of {len(tokenizer)} tokens: {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
