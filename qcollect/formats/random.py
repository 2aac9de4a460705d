"""Random numbers that are a function of a seed and an element's place, the same on every device.

Philox-4x32-10 with the seed as key and a counter that follows from the element's place: nothing is consumed, so a
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
_LANES = 16  # as many 32-bit numbers as the widest vectors hold
_GROUP = 4 * _LANES


def seed_of(*parts: object) -> int:
    """A seed in [0, 2^63) from what names a use of random numbers: ``seed_of(seed, iteration, module, ...)``."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode()) >> 1


def random_bits(seed: int, index: Tensor) -> Tensor:
    """32 random bits for each index (int64, not negative), as int64 in [0, 2^32)."""
    zero = torch.zeros_like(index)
    return _philox(seed, (index & _MASK, index >> 32, zero, zero))[0]


def random_fractions(seed: int, num: int, *, first: int = 0, device: torch.device | None = None) -> Tensor:
    """Uniform in [0, 1) for ``num`` places from ``first`` on: float32, multiples of 2^-24.

    64 places side by side draw the four words of 16 counters: place ``p`` has word ``p // 16 % 4`` of the counter
    ``(p // 64 mod 2^32, p // 64 // 2^32, p % 16, 0)``.
    """
    group = first // _GROUP
    num_groups = -(-(first + num) // _GROUP) - group
    groups = torch.arange(group, group + num_groups, device=device).unsqueeze(1).expand(-1, _LANES)
    lanes = torch.arange(_LANES, device=device).expand_as(groups)
    words = torch.stack(_philox(seed, (groups & _MASK, groups >> 32, lanes, torch.zeros_like(lanes))), dim=1)
    skipped = first % _GROUP
    bits = words.view(-1)[skipped : skipped + num] >> (32 - _FRACTION_BITS)
    return bits.to(torch.float32) * 2.0**-_FRACTION_BITS


def random_signs(seed: int, num: int, device: torch.device) -> Tensor:
    """``num`` times +1 or -1, float32."""
    bits = random_bits(seed, torch.arange(num, device=device))
    return 1.0 - 2.0 * (bits & 1).to(torch.float32)


def _philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each counter, whose words are int64 in [0, 2^32), like these."""
    words, key = counter, [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(_ROUNDS):
        # products of 32-bit numbers wrap around in int64, which keeps all 64 bits
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = (
            (second >> 32 & _MASK) ^ words[1] ^ key[0],
            second & _MASK,
            (first >> 32 & _MASK) ^ words[3] ^ key[1],
            first & _MASK,
        )
        key = [(word + step) & _MASK for word, step in zip(key, _KEY_STEPS, strict=True)]
    return words
