"""Steps and ranks, epochs and order, resuming, background processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import (
    VOCAB_SIZE,
    documents,
    load,
    num_targets,
    numbered,
    rows,
    save_tokenizer,
    steps,
    write_jsonl,
)

from hp_core.data import BatchLoader, Loader
from hp_core.errors import ConfigError, DataError

LENGTHS = [3, 7, 1, 12, 25, 2, 9, 16]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return numbered(tmp_path / "corpus.jsonl", LENGTHS)


def _resumed(loader: Loader, **options: Any) -> Loader:
    """A new loader that goes on where `loader` stands, its state having been through a file."""
    state = json.loads(json.dumps(loader.state_dict()))
    fresh = load(**options)
    fresh.load_state_dict(state)
    return fresh


def test_the_rows_of_a_step_do_not_depend_on_the_data_ranks(corpus: str) -> None:
    whole = [rows([step]) for step in steps(load(path=corpus, global_batch_size=8))]
    for dp_size, micro in ((1, 2), (2, 1), (2, 2), (4, 2), (8, 1)):
        ranks = [
            steps(load(path=corpus, global_batch_size=8, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size))
            for rank in range(dp_size)
        ]
        for number, expected in enumerate(whole):
            micro_batches = [rank[number] for rank in ranks]
            assert {len(batches) for batches in micro_batches} == {8 // (micro * dp_size)}
            dealt = [batch for batches in zip(*micro_batches, strict=True) for batch in batches]
            assert rows([dealt]) == expected
        assert {len(rank) for rank in ranks} == {len(whole)}


def test_a_global_batch_that_cannot_be_dealt_is_an_error(corpus: str) -> None:
    with pytest.raises(ConfigError, match="global_batch_size: 6 is not a multiple of micro_batch_size 2 x 2 data"):
        load(path=corpus, global_batch_size=6, micro_batch_size=2, dp_size=2)


def test_ln07_fillers_at_the_end_count_for_nothing(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [5, 6, 7])
    ranks = [
        steps(load(path=path, packing=False, global_batch_size=2, dp_rank=rank, dp_size=2, micro_batch_size=1))
        for rank in range(2)
    ]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sum(num_targets(rank) for rank in ranks) == 4 + 5 + 6
    ((ids, labels, positions, document_ids),) = rows([ranks[1][1]])
    assert (ids, labels, positions, document_ids) == ([0] * 8, [-100] * 8, list(range(8)), [0] * 8)


def test_hg01_evaluation_has_as_many_micro_batches_on_every_rank(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [8, 8, 5, 3, 8])
    options: dict[str, Any] = {"eval_path": path, "for_eval": True, "num_epochs": None, "global_batch_size": 4}
    single = steps(load(**options, micro_batch_size=2), 3)
    assert len(single) == 1  # one pass, although training has no end
    assert documents(single) == [1, 2, 3, 4, 5]  # and in order, although training shuffles
    loaders = [load(**options, dp_size=2, dp_rank=rank) for rank in range(2)]
    for _ in range(2):  # every pass starts again
        passes = [steps(loader) for loader in loaders]
        assert [[len(step) for step in found] for found in passes] == [[2], [2]]
        assert sum(map(num_targets, passes)) == num_targets(single) == 7 + 7 + 4 + 2 + 7
        for loader in loaders:
            assert loader.next_step() is None
            loader.rewind()


def test_do03_every_epoch_has_its_own_order_of_all_documents(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", [8] * 8)
    order = documents(steps(load(path=path, num_epochs=3)))
    epochs = [order[i : i + 8] for i in (0, 8, 16)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 9))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert documents(steps(load(path=path, num_epochs=3))) == order
    assert documents(steps(load(path=path, num_epochs=3, seed=8))) != order
    unshuffled = documents(steps(load(path=path, num_epochs=3, shuffle=False)))
    assert unshuffled == list(range(1, 9)) * 3


@pytest.mark.parametrize("count", range(16))
@pytest.mark.parametrize("packing", [True, False])
def test_do04_a_run_resumed_at_any_step_of_any_epoch_goes_on(corpus: str, count: int, packing: bool) -> None:
    options: dict[str, Any] = {"path": corpus, "num_epochs": 3, "global_batch_size": 2, "packing": packing}
    straight = load(**options)
    first = steps(straight, count)
    resumed = _resumed(straight, **options)
    assert resumed.epoch == straight.epoch
    assert rows(steps(resumed)) == rows(steps(straight))
    assert len(first) == count


def test_do01_resuming_twice_goes_on(corpus: str) -> None:
    options: dict[str, Any] = {"path": corpus, "num_epochs": None, "global_batch_size": 2}
    straight = rows(steps(load(**options), 9))
    loader, found = load(**options), []
    for _ in range(3):
        loader = _resumed(loader, **options)
        found += rows(steps(loader, 3))
    assert found == straight


def test_a_resumed_run_may_have_other_ranks_and_batch_sizes(corpus: str) -> None:
    options: dict[str, Any] = {"path": corpus, "num_epochs": 2, "global_batch_size": 4}
    straight = load(**options, micro_batch_size=2)
    steps(straight, 2)
    ranks = [steps(_resumed(straight, **options, dp_size=4, dp_rank=rank)) for rank in range(4)]
    assert rows([batch for step in zip(*ranks, strict=True) for batch in step]) == rows(steps(straight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_length": 9}, "dataset.seq_length: the run was saved with 8, it is 9 now"),
        ({"seed": 8}, "dataset.seed: the run was saved with 7, it is 8 now"),
        ({"shuffle": False}, "dataset.shuffle: the run was saved with True, it is False now"),
        ({"packing": False}, "dataset.packing: the run was saved with True, it is False now"),
        ({"text_key": "body"}, "dataset.text_key: the run was saved with text, it is body now"),
    ],
)
def test_do06_resuming_with_another_setting_is_an_error(corpus: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        _resumed(load(path=corpus), **{"path": corpus, **change})
    assert str(error.value).startswith(message)


def test_do06_resuming_on_other_files_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    numbered(path, [3, 4])
    saved = load(path=str(path))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    _resumed(saved, path=str(moved))  # only the content counts
    path.write_text(path.read_text().replace("1", "5"))
    assert path.stat().st_size == moved.stat().st_size
    with pytest.raises(DataError, match=r"dataset\.path: .*a\.jsonl \(\d+ bytes\) is not the file"):
        _resumed(saved, path=str(path))
    numbered(tmp_path / "z.jsonl", [3])
    with pytest.raises(DataError, match=r"dataset\.path: the run was saved with 1 files, there are 2 now"):
        _resumed(saved, path=[str(moved), str(tmp_path / "z.jsonl")])


def test_do06_resuming_with_another_tokenizer_is_an_error(tmp_path: Path) -> None:
    text = {"path": write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}]), "format": "text", "vocab_size": VOCAB_SIZE}
    saved = load(**text, tokenizer=save_tokenizer(tmp_path / "one"))
    _resumed(saved, **text, tokenizer=save_tokenizer(tmp_path / "copy"))
    with pytest.raises(DataError, match=r"dataset\.tokenizer: the run was saved with"):
        _resumed(saved, **text, tokenizer=save_tokenizer(tmp_path / "two", processor="<s> $A"))


def test_do07_background_processes_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ({"text": "x" * (1 + 7 * i % 40)} for i in range(50)))
    path.write_text(path.read_text() + "broken\n")
    options: dict[str, Any] = {
        "path": str(path),
        "format": "text",
        "tokenizer": save_tokenizer(tmp_path / "tokenizer"),
        "vocab_size": VOCAB_SIZE,
        "num_epochs": 2,
        "on_bad_line": "skip",
        "global_batch_size": 4,
    }
    alone, background = load(**options), load(**options, num_workers=2)
    assert rows(steps(background, 5)) == rows(steps(alone, 5))
    assert background.state_dict() == alone.state_dict()  # what was handed out, not what was read ahead
    assert rows(steps(background)) == rows(steps(alone))
    assert background.num_skipped == alone.num_skipped == 2


@pytest.mark.parametrize(("dp_size", "num_steps"), [(4, 2), (2, 4), (1, 8)])
def test_ac01_steps_per_epoch_follow_the_data_ranks(tmp_path: Path, dp_size: int, num_steps: int) -> None:
    path = numbered(tmp_path / "a.jsonl", [8] * 16)
    for rank in range(dp_size):
        loader = load(path=path, global_batch_size=2 * dp_size, dp_size=dp_size, dp_rank=rank)
        epochs = []
        while (step := loader.next_step()) is not None:
            assert len(step) == 2
            epochs.append(loader.epoch)
        assert epochs == [(i + 1) / num_steps for i in range(num_steps)]


def test_loading_leaves_the_global_random_generators_alone(corpus: str) -> None:
    before = torch.get_rng_state()
    steps(load(path=corpus))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loader_is_what_training_expects(corpus: str) -> None:
    loader: BatchLoader = load(path=corpus)
    step = loader.next_step()
    assert step is not None
    assert step[0].input_ids.dtype == torch.int64
    assert step[0].input_ids.shape == step[0].document_ids.shape == (1, 8)
