"""Inputs that several tests of formats take, and a comparison that lets nothing through."""

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def block(*values: float) -> torch.Tensor:
    """A block of 32 that starts with these values and goes on with zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def seed_for(rounding: str | None) -> dict[str, int]:
    return {"seed": 1} if rounding == "stochastic" else {}


def assert_same_bits(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    same = (y == expected) & (y.signbit() == expected.signbit()) | (y.isnan() & expected.isnan())
    assert same.all(), (y, expected)
