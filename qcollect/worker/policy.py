"""Which quantizer each operand of each gemm goes through, from a recipe's ``quant`` section."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from qcollect.formats.catalog import get_quant_type
from qcollect.formats.quantizer import Quantizer
from qcollect.recipe.records import QuantSpec
from qcollect.vocab import Gemm, LayerType

# Contraction axis of each operand of Y = X W^T, on the matrices the gemm sees:
# X (tokens, in_features), W (out_features, in_features), dY (tokens, out_features).
# Source: TransformerEngine recipe docstrings and microxcaling mx/linear.py agree on all six.
LINEAR_AXES: dict[tuple[str, Gemm], int] = {
    ("input", Gemm.FPROP): 1,
    ("weight", Gemm.FPROP): 1,
    ("grad_output", Gemm.DGRAD): 1,
    ("weight", Gemm.DGRAD): 0,
    ("grad_output", Gemm.WGRAD): 0,
    ("input", Gemm.WGRAD): 0,
}
# query and key contract along head_dim, value along key tokens: (..., tokens, head_dim)
ATTENTION_AXES: dict[tuple[str, Gemm], int] = {
    ("query", Gemm.FPROP): -1,
    ("key", Gemm.FPROP): -1,
    ("value", Gemm.FPROP): -2,
}
AXES = {LayerType.LINEAR: LINEAR_AXES, LayerType.ATTENTION: ATTENTION_AXES}
GRADIENTS = frozenset({"grad_output"})

Quantizers = Mapping[tuple[str, Gemm], Quantizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPolicy:
    """The quantizers of linears and of attention kernels, and the modules left alone."""

    quant_type: str
    linear: Quantizers
    attention: Quantizers
    exclude: tuple[str, ...]

    @classmethod
    def from_spec(cls, spec: QuantSpec) -> "QuantPolicy":
        """The policy of a recipe.

        Raises:
            FormatError: a type, rule or rounding that does not exist together.
        """
        none = Quantizer.create("none")
        attention: dict[tuple[str, Gemm], Quantizer] = {
            operand: _quantizer(spec, operand[0], operand[1], axis) for operand, axis in ATTENTION_AXES.items()
        }
        if spec.attention == "none":
            attention = dict.fromkeys(ATTENTION_AXES, none)
        linear = {operand: _quantizer(spec, operand[0], operand[1], axis) for operand, axis in LINEAR_AXES.items()}
        return cls(quant_type=spec.type, linear=linear, attention=attention, exclude=tuple(spec.exclude))

    def excludes(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self.exclude)

    def quantizers(self, layer_type: LayerType, module: str | None) -> Quantizers:
        """By (tensor name, gemm) for one module; identities if it is excluded (or None: the output head)."""
        if module is None or self.excludes(module):
            return dict.fromkeys(AXES[layer_type], Quantizer.create("none"))
        return self.linear if layer_type == LayerType.LINEAR else self.attention


def _quantizer(spec: QuantSpec, tensor_name: str, gemm: Gemm, axis: int) -> Quantizer:
    override = spec.overrides.get(gemm, {})
    name = override.get("type", spec.type)
    # a rule set for the run's type says nothing about the type that replaces it in one gemm
    inherited: dict[str, Any] = (
        {}
        if "type" in override
        else {
            "scale_rule": spec.scale_rule,
            "rounding": spec.rounding,
            "block_size": spec.block_size,
        }
    )
    settings = {**inherited, **{k: v for k, v in override.items() if k != "type"}}
    takes_scale = get_quant_type(name).has_tensor_scale
    wants_scale = spec.hifp8_scale == "per_tensor" or (spec.hifp8_scale == "grads" and tensor_name in GRADIENTS)
    return Quantizer.create(name, axis=axis, tensor_scale=takes_scale and wants_scale, saturate=takes_scale, **settings)


def describe_consumer(
    layer_type: LayerType,
    tensor_name: str,
    gemm: Gemm,
    quantizer: Quantizer,
    operand: torch.Tensor,
    scale: torch.Tensor | None,
) -> dict[str, Any]:
    """One entry of ``consumers``: all that the quantized value follows from, bit for bit.

    The value is ``fake_quantize(tensor.reshape(shape), quant_type, axis, ...)``.

    Args:
        layer_type: of the module.
        tensor_name: of the operand.
        gemm: the consumer.
        quantizer: of this operand in this gemm.
        operand: the original operand in the shape the gemm sees.
        scale: the per-tensor scale it was quantized with, None without one.
    """
    return {
        "gemm": str(gemm),
        **quantizer.describe(),
        "axis": AXES[layer_type][tensor_name, gemm] % operand.dim(),
        "scale": None if scale is None else float(scale),
        "seed": None,
        "saturate": quantizer.saturate,
        "shape": list(operand.shape),
        "num_saturated": int(quantizer.num_saturated(operand, scale=scale)),
    }
