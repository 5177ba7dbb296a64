"""Text, chat and token records as documents: markers, targets, vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import BOS, EOS, IM_END, VOCAB_SIZE, load, num_targets, rows, save_tokenizer, steps, write_jsonl

from hp_core.data import IGNORE_INDEX, load_tokenizer
from hp_core.data.chat import ChatEncoder
from hp_core.data.documents import Document, TextEncoder, TokensEncoder
from hp_core.errors import ConfigError, DataError

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}</s>")
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")


def _document(encode: Any, **record: Any) -> Document:
    document = encode(record)
    assert document is not None
    return document


@pytest.mark.parametrize("processor", [None, "<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("text", ["abc", "<s>abc", "abc</s>", "<s>abc</s></s>"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_pk07_pk08_one_bos_and_one_eos_per_text(
    tmp_path: Path, processor: str | None, text: str, append_eos: bool
) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer", processor=processor))
    tokens = _document(TextEncoder(tokenizer, "text", append_eos), text=text).tokens.tolist()
    has_bos = "<s>" in (processor or "") or "<s>" in text
    assert tokens.count(BOS) == has_bos
    assert tokens[0] == (BOS if has_bos else tokens[0])
    assert tokens.count(EOS) == append_eos
    assert (tokens[-1] == EOS) == append_eos
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "abc"


def test_pk08_packing_without_end_tokens_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = {
        "path": write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}]),
        "format": "text",
        "tokenizer": save_tokenizer(tmp_path / "tokenizer"),
    }
    load(**text)
    load(**text, append_eos=False, packing=False)
    assert "append_eos" not in caplog.text
    load(**text, append_eos=False)
    assert "dataset.append_eos is false" in caplog.text


def test_labels_are_shifted_on_the_document() -> None:
    document = _document(TokensEncoder(), input_ids=[5, 6, 7], labels=[5, -100, 9])
    assert document.labels.tolist() == [-100, 9, -100]
    assert _document(TokensEncoder(), input_ids=[5, 6, 7]).labels.tolist() == [6, 7, -100]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"ids": [1]}, 'no field "input_ids" (found ids)'),
        ({"input_ids": "12"}, 'field "input_ids": expected a list of integers, found str'),
        ({"input_ids": [1, 2.5]}, "expected a list of integers"),
        ({"input_ids": [1, "2"]}, "expected a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "expected a list of integers"),
        ({"input_ids": [1, -3]}, "negative id -3"),
        ({"input_ids": [1, 2], "labels": [1]}, '"labels" has 1 entries, "input_ids" has 2'),
        ({"input_ids": [1, 2], "labels": [1, -1]}, '"labels" may hold token ids and -100, found -1'),
    ],
)
def test_token_records_that_are_wrong(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, record])
    with pytest.raises(DataError) as error:
        steps(load(path=path, shuffle=False))
    assert f"{path}:2: " in str(error.value)
    assert reason in str(error.value)


def test_df06_a_token_outside_the_embedding_is_named_with_its_place(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [3, 64, 5]}])
    for policy in ("error", "skip"):  # it is never a single bad line
        with pytest.raises(DataError, match=f"{path}:2: token id 64 is outside the model's vocabulary of 64"):
            steps(load(path=path, vocab_size=64, shuffle=False, on_bad_line=policy))
    assert num_targets(steps(load(path=path, vocab_size=65))) == 3
    labels = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [1, 2], "labels": [1, 70]}])
    with pytest.raises(DataError, match="token id 70 is outside"):
        steps(load(path=labels, vocab_size=64))


def test_df06_a_pad_token_outside_the_embedding_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = {
        "path": write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}]),
        "format": "text",
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    with pytest.raises(DataError, match=rf"pads with token id {VOCAB_SIZE}, .* of {VOCAB_SIZE} \(data: .*a.jsonl\)"):
        load(**text, vocab_size=VOCAB_SIZE)
    assert num_targets(steps(load(**text, vocab_size=VOCAB_SIZE + 1))) == 3


def _supervised(document: Document) -> list[list[int]]:
    """The targets of each turn: runs of labels that are not ignored."""
    kept = np.flatnonzero(document.labels != IGNORE_INDEX)
    runs = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
    return [document.labels[run].tolist() for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END])
def test_pk04_exactly_the_assistants_tokens_are_targets(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer", processor="<s> $A", chat_template=template))
    document = _document(ChatEncoder(tokenizer), messages=TURNS)
    end = EOS if template is MARKED_WITHOUT_END else IM_END

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert _supervised(document) == [[*encode("hello"), end], [*encode("so long"), end]]
    # The first target sits at the last token of the prompt, and every target is the token that follows it.
    prompt = encode("<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert np.flatnonzero(document.labels != IGNORE_INDEX)[0] == len(prompt) - 1
    for i in np.flatnonzero(document.labels != IGNORE_INDEX):
        assert document.labels[i] == document.tokens[i + 1]


def test_pk07_a_chat_begins_with_one_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer", processor="<s> $A", chat_template=CHATML))
    tokens = _document(ChatEncoder(tokenizer), messages=TURNS).tokens.tolist()
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"message": TURNS}, 'expected a list of messages in the field "messages"'),
        ({"messages": []}, 'expected a list of messages in the field "messages"'),
        ({"messages": [{"content": "hi"}]}, 'message 1: expected an object with a "role"'),
        ({"messages": TURNS[:2]}, 'no message has the role "assistant"'),
        ({"messages": TURNS[1:], "tools": 3}, "refuses it"),
    ],
)
def test_conversations_that_are_wrong(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}, record])
    with pytest.raises(DataError) as error:
        steps(load(path=path, format="chat", tokenizer=tokenizer, shuffle=False))
    assert f"{path}:2: " in str(error.value)
    assert reason in str(error.value)


def test_a_template_that_rewrites_earlier_turns_is_named(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", chat_template=FORGETFUL)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    with pytest.raises(DataError, match=f"the chat template of {folder} writes message 3 differently"):
        steps(load(path=path, format="chat", tokenizer=folder))


def test_a_chat_is_packed_like_any_document(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}] * 3)
    found = steps(load(path=path, format="chat", tokenizer=tokenizer, seq_length=32))
    assert num_targets(found) == 3 * (len("hello") + 1 + len("so long") + 1)
    assert all(len(field) == 32 for row in rows(found) for field in row)


def test_what_a_format_needs_of_the_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}])
    folder = save_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"dataset\.tokenizer: format text needs the folder of a tokenizer"):
        load(path=path, format="text")
    with pytest.raises(DataError, match="there is no such folder"):
        load(path=path, format="text", tokenizer=str(tmp_path / "absent"))
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="no tokenizer can be loaded from") as error:
        load(path=path, format="text", tokenizer=str(tmp_path / "other"))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="has no chat template"):
        load(path=path, format="chat", tokenizer=folder)
