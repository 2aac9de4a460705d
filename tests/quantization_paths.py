"""The ways a tensor is quantized on a CPU. A test that names one takes that one, or is skipped and says why."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from qcollect.formats import backends, compiled, triton_launch
from qcollect.formats.eager import Choices

PATHS = ("eager", "compiled", "interpreted")
EXHAUSTIVE = "QCOLLECT_TEST_ALL_VARIANTS"
# What every run of the tests compiles: type, block size, along the last axis, dtype, rounding, blocks' scale rule.
USUAL = {
    ("mxfp8", 32, True, torch.float32, "nearest_even", "floor"),
    ("mxfp8", 32, False, torch.float32, "nearest_even", "floor"),
    ("mxfp8", 32, True, torch.bfloat16, "nearest_even", "floor"),
    ("mxfp8", 32, True, torch.float32, "stochastic", "floor"),
    ("mxfp4", 32, True, torch.float32, "nearest_even", "rceil"),
    ("nvfp4", 16, True, torch.float32, "nearest_even", "nearest"),
    ("nvfp4", (16, 16), True, torch.float32, "nearest_even", "nearest"),
    ("hif4", 64, True, torch.float32, "half_away", "nearest"),
    ("hifp8", None, True, torch.float32, "half_away", None),
    ("fp8_e4m3", None, True, torch.float32, "nearest_even", None),
    ("bf16", None, True, torch.float32, "nearest_even", None),
}


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
        mock.patch.object(compiled, "MIN_ELEMENTS", 1),
        mock.patch.object(backends, "_has_kernels", lambda x: path == "interpreted" and x.numel() > 0),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if path == "interpreted" else {}),
    ):
        yield asked


# ---------------------------------------------------------------------------------------------
# Compiled
# ---------------------------------------------------------------------------------------------


def load_variant(x: Tensor, choices: Choices, encode: Tensor | None, cache_dir: Path) -> None:
    """Make ready what ``compiled.run`` takes ``x`` through, and nothing else; skips what is not usual."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    variant = variant_of(x, choices, has_encode=encode is not None)
    if variant not in compiled._kernels:
        if not (is_usual(variant) or os.environ.get(EXHAUSTIVE)):
            pytest.skip(f"takes ten seconds to compile; {EXHAUSTIVE}=1 runs it, as shell/check --real does")
        compiled._kernels[variant] = compiled._load_or_compile(variant, cache_dir)


def variant_of(x: Tensor, choices: Choices, *, has_encode: bool) -> compiled.Variant:
    is_last = compiled._inner(x, choices) == 1
    return compiled._variant(choices, x.dtype, is_last=is_last, has_encode=has_encode)


def is_usual(variant: compiled.Variant) -> bool:
    name, size = variant.quant_type.name, variant.block_size
    return (name, size, variant.is_last, variant.dtype, variant.rounding, variant.scale_rule) in USUAL


# ---------------------------------------------------------------------------------------------
# Triton's interpreter
# ---------------------------------------------------------------------------------------------


def why_not_interpreted() -> str:
    """Empty if kernels run in Triton's interpreter here."""
    return _NOT_INTERPRETED


def _import_interpreted() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy"
    if torch.cuda.is_available():
        return "with a CUDA device, tests/gpu/formats.py runs the kernels themselves"
    if "triton" in sys.modules:
        return "Triton was imported before its interpreter was chosen"
    # Triton looks at the variable when a kernel is defined
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from qcollect.formats import triton_kernels  # noqa: F401
    return ""


_NOT_INTERPRETED = _import_interpreted()
