"""Which quantizer each operand of each gemm goes through, from a recipe's ``quant`` section."""

import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch

from qcollect.formats.binding import Binding, measured_both, values_of_both
from qcollect.formats.error_stats import Totals
from qcollect.formats.quantizer import prepare
from qcollect.formats.random import seed_of
from qcollect.formats.resolved import Quantizer
from qcollect.formats.scope import amax_scope, is_distributed
from qcollect.recipe.records import QuantSpec
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.gemm import Operand
from qcollect.worker.sharding import like, local_of

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
_HEAD_DIM = 64  # one for all: there is one kernel for all common ones
_NUM_ROWS = 128  # enough for several of a kernel's programs
GRADIENTS = frozenset({"grad_output"})

Quantizers = Mapping[tuple[str, Gemm], Quantizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPolicy:
    """The quantizers of linears and of attention kernels, and the modules left alone."""

    quant_type: str
    linear: Quantizers
    attention: Quantizers
    exclude: tuple[str, ...]
    seed: int = 0
    compile: bool = False

    def by_layer_type(self, layer_type: LayerType) -> Quantizers:
        """Those of its modules, but for the ones left alone."""
        return self.linear if layer_type == LayerType.LINEAR else self.attention

    @classmethod
    def from_spec(cls, spec: QuantSpec, seed: int = 0) -> "QuantPolicy":
        """The policy of a recipe; ``seed`` is the run's.

        Raises:
            FormatError: a type, rule or rounding that does not exist together.
        """
        none = Quantizer.create("none")
        attention: dict[tuple[str, Gemm], Quantizer] = {
            # untransformed: a kernel contracts value with probabilities that nobody can transform
            operand: replace(_quantizer(spec, operand[0], operand[1], axis), hadamard=None)
            for operand, axis in ATTENTION_AXES.items()
        }
        if spec.attention == "none":
            attention = dict.fromkeys(ATTENTION_AXES, none)
        linear = {operand: _quantizer(spec, operand[0], operand[1], axis) for operand, axis in LINEAR_AXES.items()}
        # equal ones are one object, by which they are known: comparing them takes longer than a small launch
        kept: dict[Quantizer, Quantizer] = {}
        linear, attention = ({o: kept.setdefault(q, q) for o, q in them.items()} for them in (linear, attention))
        return cls(
            quant_type=spec.type,
            linear=linear,
            attention=attention,
            exclude=tuple(spec.exclude),
            seed=seed,
            compile=spec.compile,
        )

    def prepare(self, dtype: torch.dtype) -> None:
        """Have what operands of ``dtype`` go through on the CPU compiled, if the recipe asks for it."""
        if not self.compile:
            return
        is_ready, reason = prepare([*self.linear.values(), *self.attention.values()], dtype)
        if not is_ready:
            warnings.warn(f"qcollect: quant.compile: {reason}; plain torch does it, more slowly", stacklevel=2)

    def prepare_counts(self, device: torch.device, dtypes: Iterable[torch.dtype], widths: Iterable[int]) -> None:
        """Have the kernels compiled that count what is clamped of operands, which only captures ask for.

        Args:
            device, dtypes: of operands.
            widths: of linears, what goes in and what comes out: there is a kernel for some, and another for others.
        """
        operands = [*((self.linear, width) for width in widths), (self.attention, _HEAD_DIM)]
        for (quantizers, width), dtype in product(operands, dtypes):
            x = torch.zeros(_NUM_ROWS, width, dtype=dtype, device=device)
            for quantizer in dict.fromkeys(quantizers.values()):
                quantizer.num_saturated(x, seed=0)

    @property
    def is_stochastic(self) -> bool:
        """Whether some operand is rounded by what is drawn for it."""
        return any(quantizer.is_stochastic for quantizer in (*self.linear.values(), *self.attention.values()))

    def excludes(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self.exclude)

    def quantizers(self, layer_type: LayerType, module: str | None) -> Quantizers:
        """By (tensor name, gemm) for one module; identities if it is excluded (or None: the output head)."""
        if module is None or self.excludes(module):
            return dict.fromkeys(AXES[layer_type], Quantizer.create("none"))
        return self.by_layer_type(layer_type)


def _quantizer(spec: QuantSpec, tensor_name: str, gemm: Gemm, axis: int) -> Quantizer:
    override = spec.overrides.get(gemm, {})
    name = override.get("type", spec.type)
    own: dict[str, Any] = {"scale_rule": spec.scale_rule, "rounding": spec.rounding, "block_size": spec.block_size}
    if tensor_name in GRADIENTS and spec.grad_rounding is not None:
        own["rounding"] = spec.grad_rounding
    if tensor_name == "weight" and spec.weight_block_size is not None:
        own["block_size"] = spec.weight_block_size
    # a rule set for the run's type says nothing about the type that replaces it in one gemm
    inherited = {} if "type" in override else own
    settings = {**inherited, **{k: v for k, v in override.items() if k != "type"}}
    entry = spec.find_type(name)
    takes_scale = entry.takes_tensor_scale
    wants_scale = spec.hifp8_scale == "per_tensor" or (spec.hifp8_scale == "grads" and tensor_name in GRADIENTS)
    return Quantizer.create(
        entry, axis=axis, tensor_scale=takes_scale and wants_scale, saturate=takes_scale, **settings
    )


def _draw(
    quantizer: Quantizer, seeds: tuple[int, int, int, str], tensor_name: str, gemm: Gemm
) -> tuple[int | None, int]:
    """The seeds of stochastic rounding (None: it does not round so) and of a Hadamard transform's signs."""
    if not quantizer.draws:
        return None, 0
    run_seed, _, _, module = seeds
    hadamard_seed = seed_of(run_seed, "hadamard", module, gemm) if quantizer.hadamard else 0
    return seed_of(*seeds, gemm, tensor_name) if quantizer.is_stochastic else None, hadamard_seed


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: that takes three times as long to make
class Use:
    """One gemm's use of one operand: its quantizer bound to the original, and what was drawn and measured for it.

    Of an ``original`` spread over ranks this rank's part is quantized, by the abs max of the whole.
    """

    original: torch.Tensor
    binding: Binding
    quantizer: Quantizer
    layer_type: LayerType
    tensor_name: str
    gemm: Gemm
    amax: torch.Tensor | None
    seeds: tuple[int, int, int, str]
    seed: int | None
    hadamard_seed: int

    @classmethod
    def of(
        cls,
        original: torch.Tensor,
        quantizer: Quantizer,
        *,
        layer_type: LayerType,
        tensor_name: str,
        gemm: Gemm,
        seeds: tuple[int, int, int, str],
    ) -> "Use":
        """The use of ``original`` in the shape the gemm sees.

        Args:
            seeds: the run's, iteration, micro-batch, module. Both operands of a gemm share the signs of their
                Hadamard transform, which stay the same all through training.
        """
        seed, hadamard_seed = _draw(quantizer, seeds, tensor_name, gemm)
        local, amax = original, None
        if quantizer.has_tensor_scale or is_distributed(original):
            amax = quantizer.amax_of(original, hadamard_seed=hadamard_seed)
            local = local_of(original)
        return cls(
            original=original,
            binding=quantizer.bind(local, amax=amax, seed=seed, hadamard_seed=hadamard_seed),
            quantizer=quantizer,
            layer_type=layer_type,
            tensor_name=tensor_name,
            gemm=gemm,
            amax=amax,
            seeds=seeds,
            seed=seed,
            hadamard_seed=hadamard_seed,
        )

    def under(self, quantizer: Quantizer) -> Binding:
        """This rank's part alone bound to another quantizer, as a use by that one would be; no other rank is asked."""
        seed, hadamard_seed = _draw(quantizer, self.seeds, self.tensor_name, self.gemm)
        return quantizer.bind(self.binding.x, seed=seed, hadamard_seed=hadamard_seed)

    def values(self) -> torch.Tensor:
        """The values consumed, in the dtype of the original: what is captured."""
        return like(self.original, self.binding.values())

    def whole(self, totals: Totals | None = None) -> Operand:
        """``values``, for a kernel whose result no factor can be multiplied into. Arguments as in ``operand``."""
        if self.quantizer.is_identity:
            return Operand(values=self.original)
        local = self.binding.values() if totals is None else self.binding.measured_values(totals)
        return Operand(values=like(self.original, local))

    def operand(self, totals: Totals | None = None) -> Operand:
        """What the gemm reads, exact; a scale of the whole tensor that belongs to the type is left for its result.

        Args:
            totals: where what quantization does to the original is counted in the same pass.
        """
        if self.quantizer.is_identity:
            return Operand(values=self.original)
        local = self.binding.operand() if totals is None else self.binding.measured_operand(totals)
        return Operand(values=like(self.original, local), factor=self._factor())

    def operands_with(self, first: "Use") -> tuple[Operand, Operand]:
        """``operand`` of this use, along the last axis, and of ``first``, along the first axis of the same original."""
        along_last, along_first = values_of_both(self.binding, first.binding, with_tensor_scale=False)
        return (
            Operand(values=like(self.original, along_last), factor=self._factor()),
            Operand(values=like(self.original, along_first), factor=first._factor()),
        )

    def measured_with(self, first: "Use", totals: tuple[Totals, Totals]) -> tuple[Operand, Operand] | None:
        """``operands_with``, and what it does to the original is counted; None where that takes two passes."""
        found = measured_both(self.binding, first.binding, totals)
        if found is None:
            return None
        last_operand, first_operand = (Operand(values=like(self.original, local)) for local in found)
        return last_operand, first_operand

    def _factor(self) -> torch.Tensor | None:
        return self.quantizer.scale_of(self.amax) if self.quantizer.quant_type.has_tensor_scale else None

    @property
    def count_key(self) -> tuple[Hashable, ...]:
        """The same for uses that clamp the same elements of the same operand."""
        return self.tensor_name, id(self.quantizer), self.seed, self.hadamard_seed

    def num_saturated(self) -> torch.Tensor:
        """How many elements are clamped, 0-dim, a whole number of some dtype: as much work as quantizing."""
        return self.binding.num_saturated()

    def describe(self, num_saturated: torch.Tensor) -> dict[str, Any]:
        """One entry of ``consumers``: all that the values follow from, bit for bit (``formats.consumed``).

        What is computed on the device is a 0-dim tensor in it: nothing waits here, but whoever writes the entry down
        (``store.capture.plain``).
        """
        quantizer, operand = self.quantizer, self.binding.x
        return {
            "gemm": str(self.gemm),
            **quantizer.describe(),
            "axis": AXES[self.layer_type][self.tensor_name, self.gemm] % operand.dim(),
            "scale": None if self.amax is None else quantizer.scale_of(self.amax),
            "amax": self.amax,
            "amax_scope": None if self.amax is None else amax_scope(self.original),
            "seed": self.seed,
            "hadamard_seed": self.hadamard_seed if quantizer.hadamard else None,
            "saturate": quantizer.saturate,
            "shape": list(operand.shape),
            "num_saturated": num_saturated,
        }
