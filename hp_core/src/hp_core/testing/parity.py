"""The parity bound: how near two computations of the same gradients have to be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

RELATIVE = 1e-5
OF_WHOLE = 1e-8
_MAX_REPORTED = 5


def assert_close_gradients(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> None:
    """Assert `|actual - expected| <= 1e-5 |expected| + 1e-8 |G|` for every parameter, in Euclidean norms.

    G is the expected gradient of the whole model: a parameter whose true gradient is zero has only rounding noise,
    which is judged against the model. Names, shapes and finiteness have to agree too. Names the worst parameters.
    """
    times = gradient_differences(expected, actual)
    faults = [(excess, name) for name, excess in times.items() if not excess <= 1]  # NaN is a fault
    # NaN first, then the worst.
    faults.sort(key=lambda fault: (fault[0] == fault[0], -fault[0]))
    lines = [
        f"{name}: |difference| {(actual[name].double() - expected[name].double()).norm().item():.3g}, "
        f"|expected| {expected[name].double().norm().item():.3g}, {excess:.3g} x bound"
        for excess, name in faults[:_MAX_REPORTED]
    ]
    more = [f"and {len(faults) - _MAX_REPORTED} more"] if len(faults) > _MAX_REPORTED else []
    assert not faults, "\n".join([f"{len(faults)} of {len(expected)} gradients differ", *lines, *more])


def gradient_differences(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How far every gradient is from the expected one, in units of the bound of `assert_close_gradients`."""
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    assert not missing, f"no gradient for {', '.join(missing)}"
    assert not extra, f"unexpected gradient for {', '.join(extra)}"
    assert expected, "no gradients to compare"
    for name, gradient in expected.items():
        found = actual[name]
        assert found.shape == gradient.shape, f"{name}: expected shape {gradient.shape}, found {found.shape}"
        assert torch.isfinite(gradient).all(), f"{name}: the expected gradient is not finite"
    whole = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm().item()
    assert whole > 0, "every expected gradient is zero: nothing to compare"
    return {
        name: (actual[name].double() - gradient.double()).norm().item()
        / (RELATIVE * gradient.double().norm().item() + OF_WHOLE * whole)
        for name, gradient in expected.items()
    }
