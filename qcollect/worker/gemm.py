"""Products of quantized operands: where a tensor has a scale of its own, it multiplies the result in float32."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qcollect.worker.sharding import like, local_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What a gemm consumes: ``values`` are exact in their dtype, ``factor`` (0-dim float32) is left for the result."""

    values: Tensor
    factor: Tensor | None = None

    def t(self) -> "Operand":
        return Operand(values=self.values.t(), factor=self.factor)


def multiply(a: Operand, b: Operand) -> Tensor:
    """``a @ b``, (rows, columns) in the dtype of ``a``; with factors summed and scaled in float32, rounded once."""
    factor = _product(a.factor, b.factor)
    if factor is None:
        return a.values.mm(b.values)
    return _scaled(_float32_product(a.values, b.values), factor).to(a.values.dtype)


def project(x: Operand, weight: Operand, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, as torch's own linear computes it where no factor takes part."""
    factor = _product(x.factor, weight.factor)
    if factor is None:
        return F.linear(x.values, weight.values, bias)
    output = _scaled(_float32_product(x.values, weight.values.t()), factor)
    return (output if bias is None else output + bias).to(x.values.dtype)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a * b


def _scaled(product: Tensor, factor: Tensor) -> Tensor:
    return like(product, local_of(product) * factor)  # partial sums of ranks stay so


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(torch.float32).mm(b.to(torch.float32))
