"""`dataset._target_` and `dataloader._target_`: records and loaders of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hp_core import Batch
from hp_core.config import RunConfig
from hp_core.config.schema import DataloaderConfig, DatasetConfig, TrainingConfig
from hp_core.data import build_loader
from hp_core.errors import DataError


class Countdown:
    """Record i holds the numbers n - i down to 1."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"input_ids": list(range(self.n - index, 0, -1)), "comment": "ignored"}


class OwnLoader:
    """Remembers what it was given."""

    def __init__(self, name: str, dataset: Sequence[Any], **given: Any) -> None:
        self.name, self.dataset, self.given = name, dataset, given


def build(dataset: DatasetConfig, dataloader: DataloaderConfig | None = None) -> Any:
    training = TrainingConfig(global_batch_size=2, micro_batch_size=1, num_epochs=1)
    config = RunConfig(training=training, dataset=dataset, dataloader=dataloader or DataloaderConfig())
    return build_loader(config, dp_rank=1, dp_size=2, vocab_size=16, seed=7)


def countdown(**fields: Any) -> DatasetConfig:
    return DatasetConfig(target=f"{__name__}.Countdown", args={"n": 4}, shuffle=False, **fields)


def test_records_of_a_dataset_target_are_packed_and_dealt_like_hps_own() -> None:
    (batch,) = build(countdown(seq_length=5)).next_step()
    assert isinstance(batch, Batch)
    # The rows are 4 3 2 1 3, which rank 0 gets, and 2 1 2 1 1.
    assert batch.input_ids.tolist() == [[2, 1, 2, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 0]]


def test_a_dataloader_target_takes_hps_loaders_place() -> None:
    loader = build(countdown(), DataloaderConfig(target=f"{__name__}.OwnLoader", args={"name": "mine"}))
    assert isinstance(loader, OwnLoader)
    assert isinstance(loader.dataset, Countdown)
    assert loader.name == "mine"
    assert loader.given == {
        "dp_rank": 1,
        "dp_size": 2,
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "seed": 7,
        "for_eval": False,
    }


@pytest.mark.parametrize(("target", "found"), [("builtins.dict", "dict"), ("builtins.object", "object")])
def test_what_is_no_dataset_is_named(target: str, found: str) -> None:
    with pytest.raises(DataError) as error:
        build(DatasetConfig(target=target))
    assert str(error.value) == (
        f"dataset._target_ {target}: expected a dataset with len() and [index], and at least one record, found {found}"
    )


def test_a_wrong_record_is_named_by_its_number() -> None:
    loader = build(DatasetConfig(target="builtins.str", args={"object": "ab"}, shuffle=False))
    with pytest.raises(DataError, match=r"builtins\.str\[0\]: expected a mapping with input_ids, found str"):
        loader.next_step()
