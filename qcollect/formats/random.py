"""Random numbers that are a function of a seed and an element's place, the same on every device.

Philox-4x32-10 with the seed as key and the element's index as counter: nothing is consumed, so a
recomputed tensor draws the same numbers, whatever ran before and however the work is split.

**Source:** Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
import xxhash
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_FRACTION_BITS = 24


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^63) from what names a use of random numbers: ``seed_of(seed, iteration, module, ...)``."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode()) >> 1


def random_bits(seed: int | Tensor, index: Tensor) -> Tensor:
    """32 random bits for each index (int64, not negative), as int64 in [0, 2^32); ``seed`` may be 0-dim int64."""
    counter = [index & _MASK, index >> 32, torch.zeros_like(index), torch.zeros_like(index)]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        # products of 32-bit numbers wrap around in int64, which keeps all 64 bits
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> 32 & _MASK) ^ counter[1] ^ key[0],
            second & _MASK,
            (first >> 32 & _MASK) ^ counter[3] ^ key[1],
            first & _MASK,
        ]
        key = [(word + step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
    return counter[0]


def random_fractions(seed: int | Tensor, index: Tensor) -> Tensor:
    """Uniform in [0, 1) for each index: float32, multiples of 2^-24."""
    return (random_bits(seed, index) >> (32 - _FRACTION_BITS)).to(torch.float32) * 2.0**-_FRACTION_BITS


def random_signs(seed: int, num: int, device: torch.device) -> Tensor:
    """``num`` times +1 or -1, float32."""
    bits = random_bits(seed, torch.arange(num, device=device))
    return 1.0 - 2.0 * (bits & 1).to(torch.float32)
