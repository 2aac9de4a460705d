"""The ways a tensor is quantized on a CPU. A test that names one takes that one, or is skipped and says why."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreted import why_not_interpreted
from torch import Tensor

from qcollect.formats import backends, compiled, triton_launch
from qcollect.formats.eager import Choices
from qcollect.formats.quantizer import Quantizer

PATHS = ("eager", "compiled", "interpreted")
EXHAUSTIVE = "QCOLLECT_TEST_ALL_VARIANTS"


@contextmanager
def taking(path: str, cache_dir: Path) -> Iterator[list[Choices]]:
    """Everything is quantized by ``path``; gives what it has been asked for so far."""
    if path == "interpreted" and (reason := why_not_interpreted()):
        pytest.skip(reason)
    asked: list[Choices] = []

    def find_run(x: Tensor, choices: Choices, encode: Tensor | None) -> backends.Run | None:
        if path == "eager":
            run = None
        elif path == "compiled":
            load_variant(x, choices, encode, cache_dir)
            assert compiled.supports(x, choices, has_encode=encode is not None)
            run = compiled.run
        else:
            if choices.quant_type.element is not None and choices.quant_type.element.is_cast:
                pytest.skip("a cast is torch's own: there is no kernel for it")
            assert triton_launch.supports(x, choices)
            run = triton_launch.run
        asked.append(choices)
        return run

    with (
        mock.patch.object(backends, "find_run", find_run),
        mock.patch.object(backends, "_has_kernels", lambda x: path == "interpreted" and x.numel() > 0),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if path == "interpreted" else {}),
    ):
        yield asked


def can_take(path: str, quantizer: Quantizer) -> bool:
    """Whether a usual run of the tests quantizes a float32 vector so by ``path``."""
    entry = quantizer.quant_type
    if path == "interpreted":
        return entry.element is not None and not entry.element.is_cast
    choices = quantizer.choices(0, torch.float32)
    return path == "eager" or variant_of(torch.ones(1), choices, has_encode=quantizer.has_tensor_scale) in USUAL


# ---------------------------------------------------------------------------------------------
# Compiled
# ---------------------------------------------------------------------------------------------


def load_variant(x: Tensor, choices: Choices, encode: Tensor | None, cache_dir: Path) -> None:
    """Make ready what ``compiled.run`` takes ``x`` through, and nothing else; skips what is not usual."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    variant = variant_of(x, choices, has_encode=encode is not None)
    if variant not in compiled._kernels:
        if not (variant in USUAL or os.environ.get(EXHAUSTIVE)):
            pytest.skip(f"takes ten seconds to compile; {EXHAUSTIVE}=1 runs it, as shell/check --real does")
        compiled._kernels[variant] = compiled._load_or_compile(variant, cache_dir)


def variant_of(x: Tensor, choices: Choices, *, has_encode: bool) -> compiled.Variant:
    is_last = compiled._inner(x, choices) == 1
    return compiled._variant(choices, x.dtype, is_last=is_last, has_encode=has_encode)


def _variant(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    is_last: bool = True,
    has_encode: bool | None = None,
    **settings: Any,
) -> compiled.Variant:
    choices = Quantizer.create(name, **settings).choices(0, dtype)
    return compiled._variant(choices, dtype, is_last=is_last, has_encode=has_encode)


# what every run of the tests compiles
USUAL = {
    _variant("mxfp8"),
    _variant("mxfp8", is_last=False),
    _variant("mxfp8", torch.bfloat16),
    _variant("mxfp8", rounding="stochastic"),
    _variant("mxfp4", scale_rule="rceil"),
    _variant("nvfp4"),
    _variant("nvfp4", block_size=(16, 16)),
    _variant("hif4"),
    _variant("hifp8"),
    _variant("hifp8", saturate=True),
    _variant("hifp8", has_encode=True),
    _variant("fp8_e4m3"),
    _variant("bf16"),
}
