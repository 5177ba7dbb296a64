"""Reading JSONL: what is accepted, and what a bad line says."""

import pickle
from pathlib import Path

import pytest
from data_helpers import VOCAB_SIZE, documents, load, numbered, rows, save_tokenizer, steps, write_jsonl

from hp_core.data.jsonl import JsonLines, find_files
from hp_core.errors import DataError

GOOD = b'{"text": "one"}'


def _write(path: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path.write_bytes(end.join(lines))
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("trailing", [[], [b""], [b"", b"", b""]])
def test_df07_blank_lines_crlf_bom_and_trailing_newline_are_fine(
    tmp_path: Path, end: bytes, bom: bytes, trailing: list[bytes]
) -> None:
    path = _write(tmp_path / "a.jsonl", bom + GOOD, b"", b'{"text": "two"}', b"   ", GOOD, *trailing, end=end)
    lines = JsonLines([path])
    records = [lines.read(i) for i in range(len(lines))]
    assert [record["text"] for record in records if record] == ["one", "two", "one"]
    assert [lines.where(i) for i in range(len(lines)) if records[i]] == [f"{path}:{n}" for n in (1, 3, 5)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not valid JSON"),
        (b"x", "not valid JSON"),
        (b'["text"]', "expected a JSON object, found list"),
        (b'{"txt": "one"}', 'no field "text" (found txt)'),
        (b'{"text": 3}', 'field "text": expected a text, found int'),
        (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8"),
    ],
)
def test_df07_a_bad_line_is_named_or_counted(
    tmp_path: Path, line: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path / "a.jsonl", GOOD, b"", line, GOOD, b'{"text": ""}')
    text = {
        "path": str(path),
        "format": "text",
        "tokenizer": save_tokenizer(tmp_path / "tokenizer"),
        "shuffle": False,
        "vocab_size": VOCAB_SIZE,
    }
    with pytest.raises(DataError) as error:
        steps(load(**text))
    assert str(error.value).startswith(f"{path}:3: {reason}")
    assert "\n" not in str(error.value)

    loader = load(**text, on_bad_line="skip", packing=False)
    assert len(steps(loader)) == 2  # the others are kept, the empty text gives no document
    assert loader.num_skipped == 1
    assert f"{path}:3: {reason}" in caplog.text


def test_lines_of_several_files_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    for name, value in (("b", 2), ("a", 1), ("c", 3)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"input_ids": [value] * 4}] * 2)
    for path in (str(tmp_path / "*.jsonl"), [str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl")]):
        found = steps(load(path=path, shuffle=False, packing=False))
        assert [row[0][0] for row in rows(found)] == [1, 1, 2, 2, 3, 3]


def test_files_that_cannot_be_meant_are_errors(tmp_path: Path) -> None:
    file = numbered(tmp_path / "a.jsonl", [3])
    for patterns, reason in [
        (str(tmp_path / "*.json"), f'no file matches "{tmp_path}/*.json"'),
        (str(tmp_path), f'"{tmp_path}" is a folder'),
        ([file, str(tmp_path / "*")], f'"{file}" is matched twice'),
        ([], "expected a file, a glob or a list of them"),
        (None, "expected a file, a glob or a list of them"),
    ]:
        with pytest.raises(DataError, match=r"dataset\.path") as error:
            find_files(patterns, key="dataset.path")
        assert reason in str(error.value)


def test_an_empty_file_is_an_error_and_skipped_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbered(tmp_path / "a.jsonl", [8])
    empty = tmp_path / "b.jsonl"
    empty.write_bytes(b"\n\r\n")
    path = str(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl: the file is empty"):
        load(path=path)
    assert documents(steps(load(path=path, on_bad_line="skip"))) == [1]
    assert "b.jsonl: the file is empty (skipped)" in caplog.text
    with pytest.raises(DataError, match=r"b\.jsonl: the file is empty"):
        load(path=str(empty), on_bad_line="skip")


def test_files_without_a_single_document_are_an_error_not_a_hang(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": []}] * 3)
    with pytest.raises(DataError, match="no record gives a document"):
        load(path=path, num_epochs=None).next_step()


def test_do07_lines_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    lines = JsonLines([Path(numbered(tmp_path / "a.jsonl", [1, 2, 3]))])
    copy = pickle.loads(pickle.dumps(lines))
    assert [copy.read(i) for i in range(3)] == [lines.read(i) for i in range(3)]
    assert copy.fingerprint == lines.fingerprint
