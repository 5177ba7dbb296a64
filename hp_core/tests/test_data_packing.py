"""Documents in rows: lengths, positions, document ids, and targets at the edges."""

from pathlib import Path

import pytest
from data_helpers import EOS, PAD, VOCAB_SIZE, load, num_targets, numbered, rows, save_tokenizer, steps, write_jsonl

from hp_core.data import IGNORE_INDEX

LENGTHS = [3, 7, 1, 12, 25, 2, 9]


def test_documents_are_joined_and_cut_at_the_edge(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8, 9]}])
    assert rows(steps(load(path=path, seq_length=5, shuffle=False))) == [
        ([1, 2, 3, 4, 5], [2, 3, -100, 5, 6], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([6, 7, 8, 9, 0], [7, 8, 9, -100, -100], [0, 1, 2, 3, 0], [0, 0, 0, 0, 1]),
    ]


def test_pk03_the_first_token_of_a_document_is_no_target(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 9, 11, 2]}, {"input_ids": [7, 3, 8, 2]}])
    ((ids, labels, positions, _),) = rows(steps(load(path=path, seq_length=8, shuffle=False)))
    assert ids == [5, 9, 11, 2, 7, 3, 8, 2]
    assert labels == [9, 11, 2, -100, 3, 8, 2, -100]
    assert positions == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seq_length", [1, 2, 3, 7, 8, 64])
def test_no_target_is_lost_or_made_at_row_edges(tmp_path: Path, seq_length: int, packing: bool) -> None:
    path = numbered(tmp_path / "a.jsonl", LENGTHS)
    found = steps(load(path=path, seq_length=seq_length, packing=packing))
    assert num_targets(found) == sum(LENGTHS) - len(LENGTHS)
    assert sum(token > 0 for row in rows(found) for token in row[0]) == sum(LENGTHS)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seq_length", [7, 13])
def test_pk10_all_fields_have_one_length_and_padding_is_a_document(
    tmp_path: Path, seq_length: int, packing: bool
) -> None:
    found = rows(steps(load(path=numbered(tmp_path / "a.jsonl", LENGTHS), seq_length=seq_length, packing=packing)))
    for ids, labels, positions, documents in found:
        assert {len(field) for field in (ids, labels, positions, documents)} == {seq_length}
        for i in range(1, seq_length):
            same = documents[i] == documents[i - 1]
            assert same == (ids[i] == ids[i - 1])
            assert positions[i] == (positions[i - 1] + 1 if same else 0)
            assert documents[i] in (documents[i - 1], documents[i - 1] + 1)
        assert all(label == IGNORE_INDEX for token, label in zip(ids, labels, strict=True) if token == 0)


def test_without_packing_every_document_has_its_own_rows(tmp_path: Path) -> None:
    found = rows(steps(load(path=numbered(tmp_path / "a.jsonl", LENGTHS), packing=False, shuffle=False)))
    assert [set(ids) - {0} for ids, *_ in found] == [{1}, {2}, {3}, {4}, {4}, {5}, {5}, {5}, {5}, {6}, {7}, {7}]


@pytest.mark.parametrize("packing", [True, False])
def test_pk05_end_tokens_are_learnt_although_padding_is_the_end_token(tmp_path: Path, packing: bool) -> None:
    texts = ["abc", "a longer text"]
    found = steps(
        load(
            path=write_jsonl(tmp_path / "a.jsonl", ({"text": text} for text in texts)),
            format="text",
            tokenizer=save_tokenizer(tmp_path / "tokenizer", pad_token="</s>"),
            vocab_size=VOCAB_SIZE,
            seq_length=24,
            packing=packing,
        )
    )
    lengths = [len(text) + 1 for text in texts]
    assert num_targets(found) == sum(lengths) - len(lengths)
    assert sum(label == EOS for row in rows(found) for label in row[1]) == len(texts)
    assert sum(token == EOS for row in rows(found) for token in row[0]) > len(texts)  # the padding


@pytest.mark.parametrize(("pad_token", "expected"), [("<pad>", PAD), (None, EOS)])
def test_padding_is_the_pad_token_else_the_end_token(tmp_path: Path, pad_token: str | None, expected: int) -> None:
    ((ids, *_),) = rows(
        steps(
            load(
                path=write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}]),
                format="text",
                tokenizer=save_tokenizer(tmp_path / "tokenizer", pad_token=pad_token),
                vocab_size=VOCAB_SIZE,
            )
        )
    )
    assert ids[4:] == [expected] * 4


def test_the_stream_goes_on_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [3])
    first, second = rows(steps(load(path=path, num_epochs=3)))
    assert first[0] == [1] * 8
    assert first[3] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert second[0] == [1] + [0] * 7
