"""Capture the tensors of LLM training under emulated number formats.

    import qcollect
    y = qcollect.fake_quantize(x, "mxfp8", axis=-1)
    q = qcollect.quantize(x, "mxfp4", axis=-1)  # q.codes, q.scales, q.dequantize()
    with qcollect.collect(model, quant_type="hifp8", out_dir="logs", target=50) as run: ...
    for capture in qcollect.open_run("enhanced_tensor_logs/mxfp8").select(tensor_name="query"): capture.load()
    x = qcollect.load(path)  # one file's tensor, whatever it is stored as

Names are loaded on first use: importing qcollect does not import torch.
"""

from typing import TYPE_CHECKING, Any

from qcollect._version import __version__

if TYPE_CHECKING:
    from qcollect.formats.quantizer import consumed, fake_quantize, quantize
    from qcollect.store.capture import load
    from qcollect.store.index import open_run
    from qcollect.worker.collect import collect

_HOMES = {
    "consumed": "qcollect.formats.quantizer",
    "fake_quantize": "qcollect.formats.quantizer",
    "quantize": "qcollect.formats.quantizer",
    "collect": "qcollect.worker.collect",
    "load": "qcollect.store.capture",
    "open_run": "qcollect.store.index",
}

__all__ = ["__version__", "collect", "consumed", "fake_quantize", "load", "open_run", "quantize"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'qcollect' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
