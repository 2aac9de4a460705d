"""Float32 numbers as bits: inputs that reach every corner, and a comparison that lets nothing through."""

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def random_bits(seed: int, *shape: int) -> Floats:
    """All float32 bit patterns alike, so NaN, Inf and subnormals are among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)


def around(seed: int, size: int, low: int, high: int) -> Floats:
    """Log-uniform magnitudes from 2^low to 2^high, half of them cut to 10 bits so that ties are met."""
    rng = np.random.default_rng(seed)
    x = (np.exp2(rng.uniform(low, high, size)) * rng.choice([-1, 1], size)).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return x


def random_blocks(seed: int, num_blocks: int, size: int = 32, low: int = -150, high: int = 126) -> Floats:
    """Normal draws, each row at its own power of two from 2^low to 2^high, one row in four with an outlier."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((num_blocks, size))
    blocks[::4, 5 % size] *= 1e4
    with np.errstate(over="ignore"):
        x = (blocks * np.exp2(rng.integers(low, high + 1, (num_blocks, 1)).astype(np.float64))).astype(np.float32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # bfloat16-valued: ties
    return x


def tensor_of(bits: NDArray[np.uint32]) -> torch.Tensor:
    """Stored bits as float32, in memory of its own."""
    return torch.from_numpy(bits.view(np.float32).copy())


def assert_bits(y: torch.Tensor, expected: NDArray[np.uint32] | Floats) -> None:
    """Every bit is the same, the sign of zero included; a NaN is any NaN."""
    got, wanted = y.numpy(), expected.view(np.float32)
    assert got.dtype == np.float32
    assert got.shape == wanted.shape
    both_nan = np.isnan(got) & np.isnan(wanted)
    wrong = np.argwhere((got.view(np.uint32) != wanted.view(np.uint32)) & ~both_nan)
    if len(wrong):
        place = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {got.size} differ, first at {place}: {got[place]!r} instead of {wanted[place]!r}"
        )


def assert_values(y: torch.Tensor, expected: NDArray[np.uint32] | Floats) -> None:
    """As ``assert_bits``, but zeros of either sign are the same."""
    assert_bits(y + 0.0, expected.view(np.float32) + np.float32(0.0))
