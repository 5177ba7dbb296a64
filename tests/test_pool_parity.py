"""The parity bound."""

from __future__ import annotations

import pytest
import torch

from hp_core.testing import assert_close_gradients

BIG, ZERO = torch.full((4,), 10.0), torch.zeros(4)


def test_equal_gradients_pass() -> None:
    assert_close_gradients({"a": BIG, "b": ZERO}, {"a": BIG * (1 + 5e-6), "b": ZERO + 5e-8})


def test_worst_parameter_is_named_first() -> None:
    expected = {"small": BIG, "worst": BIG, "right": BIG}
    actual = {"small": BIG * 1.001, "worst": BIG * 1.1, "right": BIG}
    with pytest.raises(AssertionError, match=r"2 of 3 gradients differ\nworst: .*\nsmall: "):
        assert_close_gradients(expected, actual)


def test_noise_in_a_zero_gradient_is_judged_against_the_model() -> None:
    with pytest.raises(AssertionError, match="b: "):
        assert_close_gradients({"a": BIG, "b": ZERO}, {"a": BIG, "b": ZERO + 5e-7})


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({}, "no gradient for a"),
        ({"a": BIG, "b": BIG}, "unexpected gradient for b"),
        ({"a": BIG.reshape(2, 2)}, "a: expected shape"),
        ({"a": BIG * float("nan")}, "a: .difference. nan"),
    ],
)
def test_structural_differences_fail(actual: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close_gradients({"a": BIG}, actual)


def test_nothing_to_compare_fails() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close_gradients({"a": ZERO}, {"a": ZERO})
