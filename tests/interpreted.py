"""Triton's interpreter, which runs the kernels on CPU tensors."""

import importlib.util
import os
from typing import Any
from unittest import mock

import pytest
import torch


def why_not_interpreted() -> str:
    """Empty if kernels run in Triton's interpreter here."""
    return _NOT_INTERPRETED


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter. It makes Triton's words ready again for every function called inside a kernel,
    which is most of its time; here that is done once for a module. What is left is by the step, whatever a tile's size.
    """
    from triton.runtime import interpreter

    from qcollect.formats import triton_launch
    from qcollect.formats.triton_constants import TileSize

    ready, make_ready = set(), interpreter._patch_lang

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module not in ready:
            make_ready(self.fn)
            ready.add(module)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    sizes = {key: TileSize(elements=2048, num_warps=1) for key in triton_launch._TILE_SIZES}
    monkeypatch.setattr(triton_launch, "_TILE_SIZES", sizes)


def _import_interpreted() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy"
    if torch.cuda.is_available():
        return "with a CUDA device, tests/gpu runs the kernels themselves"
    # Triton looks at the variable when a kernel is defined
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from triton import language
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(language.sum, InterpretedFunction):
            return "Triton was imported before its interpreter was chosen"
        from qcollect.formats import triton_kernels, triton_stats  # noqa: F401
        from qcollect.store import summary_kernels  # noqa: F401
    return ""


_NOT_INTERPRETED = _import_interpreted()
