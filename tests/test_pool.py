"""The rank pool: results, failures, dead and stuck ranks, isolation between calls."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from hp_core import PlanError
from hp_core.testing import RankError, RankPools


def add_ranks(start: int) -> tuple[int, int, int]:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads()


def process_id() -> int:
    return os.getpid()


def test_results_come_by_rank(pool: RankPools) -> None:
    assert pool(2).run(add_ranks, 10) == [(0, 21, 1), (1, 21, 1)]


def test_ranks_stay_between_calls(pool: RankPools) -> None:
    assert pool(2).run(process_id) == pool(2).run(process_id)


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise PlanError("the message of rank 1")
    dist.barrier()  # never completes: rank 1 does not come


def test_first_exception_is_raised_with_its_traceback_while_others_wait(pool: RankPools) -> None:
    before = time.monotonic()
    with pytest.raises(PlanError, match="the message of rank 1") as caught:
        pool(2).run(raise_on_rank_one)
    assert time.monotonic() - before < 30
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "in raise_on_rank_one" in str(caught.value.__cause__)
    assert pool(2).run(add_ranks, 0)[0] == (0, 1, 1)


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raise_unpicklable() -> None:
    raise UnpicklableError("this", "that")


def test_exception_that_cannot_be_sent_is_described(pool: RankPools) -> None:
    with pytest.raises(RankError, match="UnpicklableError: this and that"):
        pool(1).run(raise_unpicklable)


def die_on_rank_one() -> None:
    print("last words")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_dead_rank_is_named(pool: RankPools) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 ---\ndied with signal SIGKILL"):
        pool(2).run(die_on_rank_one)


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        print("output before the hang", flush=True)
        time.sleep(60)


def test_stuck_rank_is_named_with_its_stack_and_output(pool: RankPools) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(hang_on_rank_zero, timeout=3)
    message = str(caught.value)
    assert "no answer in 3 s from rank 0\n" in message
    assert "in hang_on_rank_zero" in message
    assert "output before the hang" in message
    assert pool(2).run(add_ranks, 0)[0] == (0, 1, 1)


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.environ["HP_TEST_TRACE"] = "1"
    dist.new_group([0])


def look_at_state() -> tuple[torch.dtype, int, bool, str | None, float, float]:
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        os.environ.get("HP_TEST_TRACE"),
        torch.rand(()).item(),
        random.random(),
    )


def test_every_call_starts_from_the_same_state(pool: RankPools) -> None:
    first = pool(2).run(look_at_state)
    assert first[0][:4] == (torch.float32, 1, True, None)
    pool(2).run(leave_traces)
    assert pool(2).run(look_at_state) == first


def test_function_has_to_be_importable(pool: RankPools) -> None:
    with pytest.raises((AttributeError, TypeError), match=r"lambda|local"):
        pool(1).run(lambda: None)
