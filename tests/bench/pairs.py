"""Interleaved pairs of iterations: the work that is measured, and what it is measured against."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

NUM_BOOTSTRAPS = 2000

Times = tuple[float, float]  # seconds until the work has returned, and until the device is done too
Pair = tuple[Times, Times]


def take_pairs(
    time: Callable[[Callable[[], object]], Times],
    works: tuple[Callable[[], object], Callable[[], object]],
    num: int,
    num_warm: int,
) -> list[Pair]:
    """Times of both works, ``num`` times; which comes first alternates. ``num_warm`` pairs before them do not count."""
    pairs = []
    for number in range(num_warm + num):
        order = (0, 1) if number % 2 else (1, 0)
        times = {place: time(works[place]) for place in order}
        pairs.append((times[0], times[1]))
    return pairs[num_warm:]


def summarize_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The median of the pairs' own ratios with its bootstrap interval (95 %), until the device is done."""
    ratios = torch.tensor([collected[1] / bare[1] for collected, bare in pairs], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(ratios), (NUM_BOOTSTRAPS, len(ratios)), generator=generator)
    medians = ratios[chosen].quantile(0.5, dim=1)
    return {
        "pairs": len(pairs),
        "quantized_s": statistics.median(bare[1] for _, bare in pairs),
        "collect_s": statistics.median(collected[1] for collected, _ in pairs),
        "ratio": float(ratios.quantile(0.5)),
        "ratio_low": float(medians.quantile(0.025)),
        "ratio_high": float(medians.quantile(0.975)),
        "host_ratio": statistics.median(collected[0] / bare[0] for collected, bare in pairs),
    }
