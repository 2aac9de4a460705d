"""One tensor and all that its values follow from, and what is made of that: values, codes, counts.

``backends`` chooses the way each is computed; what it has none for goes step by step (``eager``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qcollect.errors import FormatError
from qcollect.formats import backends
from qcollect.formats.eager import Choices, Scaled, limit_values, restore_values, round_values, scale_values
from qcollect.formats.error_stats import ErrorStats, Totals, measure
from qcollect.formats.quantized import Quantized, ScaleCodes, block_scale_codes, make_codes, scale_codes
from qcollect.formats.records import TensorScale
from qcollect.formats.triton_counts import PreparedCount, PreparedPair


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: that takes three times as long to make
class Binding:
    """A quantizer's choices bound to one tensor; ``Quantizer.bind`` makes it. Nothing here waits for the device.

    Args:
        x: as it was given, without grad.
        source: what is quantized: ``x`` itself, or its Hadamard transform.
        choices: for this tensor, with the seed.
        encode: 0-dim float32, what the whole tensor is multiplied with; None: nothing.
        own_scale: what ``encode`` follows from the abs max of ``source`` by; None: from something else.
    """

    x: Tensor
    source: Tensor
    choices: Choices
    encode: Tensor | None
    own_scale: TensorScale | None = None

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to quantize: the type does nothing, or the tensor is empty."""
        return self.choices.quant_type.element is None or self.x.numel() == 0

    def values(self, out: Tensor | None = None) -> Tensor:
        """``x`` quantized and dequantized, see ``fake_quantize``."""
        return self._values(out, with_tensor_scale=True)

    def operand(self) -> Tensor:
        """``values`` without a tensor's scale that belongs to the type, see ``Quantizer.operand``."""
        return self._values(None, with_tensor_scale=not self.choices.quant_type.has_tensor_scale)

    def codes(self) -> Quantized:
        """``x`` as codes and scales, see ``quantize``."""
        if self.choices.quant_type.element is None:
            raise FormatError(
                f"{self.choices.quant_type.name} quantizes nothing: it has no codes; choose another type."
            )
        if self.x.numel() == 0:
            raise FormatError(f"a tensor of shape {tuple(self.x.shape)} has nothing to make codes of.")
        scaled = self._rounded()
        limit_values(scaled, self.choices)
        return make_codes(scaled, self.choices, self.x.shape, self.x.dtype)

    def scales(self) -> ScaleCodes | None:
        """The scales of the blocks of ``x`` (transformed, with a Hadamard transform); None where there are none."""
        if self.is_trivial or self.choices.block_size is None:
            return None
        return block_scale_codes(scale_values(self.source, self.choices, self.encode), self.choices)

    def num_saturated(self) -> Tensor:
        """How many elements a saturating quantization clamps, 0-dim int64, see ``count_saturated``."""
        element = self.choices.quant_type.element
        if element is None or self.is_trivial:
            return torch.zeros((), dtype=torch.int64, device=self.x.device)
        found = backends.count_limited(self.source, self.choices, self.encode)
        if found is not None:
            return found
        return (self._rounded().blocks.values.abs_() > element.max_value).sum()

    def with_stats(self, out: Tensor | None = None, *, histograms: bool) -> tuple[Tensor, ErrorStats]:
        """``values`` and what was done to ``source``, see ``Quantizer.apply_with_stats``."""
        entry, x = self.choices.quant_type, self.x
        if entry.element is None or self.is_trivial:
            what = "quantizes nothing" if entry.element is None else f"got a tensor of shape {tuple(x.shape)}"
            raise FormatError(f"{entry.name} {what}: there is no error to measure.")
        found = backends.run_with_stats(self.source, self.choices, self.encode, histograms=histograms)
        if found is not None and entry.element.is_cast:
            return self.values(out), found[1]
        if found is not None:
            values = found[0].view(x.shape)
            return (values.to(x.dtype) if out is None else out.copy_(values)), found[1]
        scaled = self._rounded()
        clamped = scaled.blocks.view.abs() > entry.element.max_value
        clamped_blocks = clamped.any(dim=scaled.blocks.dims) if scaled.blocks.dims else clamped.any()
        values = self._finished(scaled, out, with_tensor_scale=True)
        codes = scale_codes(scaled, self.choices)
        return values, measure(self.source, values, clamped, clamped_blocks, scale_codes=codes, histograms=histograms)

    def measure(self, totals: Totals) -> None:
        """The totals of ``with_stats`` and nothing else; those of nothing are zero."""
        if self.is_trivial:
            totals.numbers.zero_()
        elif not backends.count(self.source, self.choices, self.encode, totals):
            totals.numbers.copy_(self.with_stats(histograms=False)[1].totals)

    def measured_values(self, totals: Totals) -> Tensor:
        """``values``, and ``measure`` in the same pass."""
        element = self.choices.quant_type.element
        if element is None or self.is_trivial:
            totals.numbers.zero_()
            return self.values()
        found = backends.run_and_count(self.source, self.choices, self.encode, totals)
        if found is None:
            values, stats = self.with_stats(histograms=False)
            totals.numbers.copy_(stats.totals)
            return values
        return self.values() if element.is_cast else self._as_given(found)

    def measured_operand(self, totals: Totals) -> Tensor:
        """``operand``, and ``measure``: in one pass, unless the type has a scale that an operand leaves out."""
        if not self.choices.quant_type.has_tensor_scale:
            return self.measured_values(totals)
        self.measure(totals)
        return self.operand()

    def prepare_count(self, *, with_values: bool) -> PreparedCount | None:
        """``measured_values`` or ``measure`` of tensors like ``x``, contiguous ones; None where each is different."""
        if not self._is_alike():
            return None
        return backends.prepare_count(self.x, self.choices, self.own_scale, with_values=with_values)

    def _is_alike(self) -> bool:
        """Whether all that tensors of this shape are treated by follows from themselves."""
        is_given = self.encode is not None and self.own_scale is None
        is_drawn = self.choices.rounding == "stochastic"
        return self.source is self.x and not (is_given or is_drawn or self.is_trivial)

    def _values(self, out: Tensor | None, *, with_tensor_scale: bool) -> Tensor:
        x, source = self.x, self.source
        if self.is_trivial:
            copy = x.clone(memory_format=torch.contiguous_format)
            return copy if out is None else out.copy_(copy)
        source = source.reshape(1) if source.dim() == 0 else source
        run = backends.find_run(source, self.choices, self.encode)
        if run is None:
            return self._finished(self._rounded(), out, with_tensor_scale=with_tensor_scale)
        is_own = out is not None and out.dtype == source.dtype and out.is_contiguous() and not _overlaps(out, x)
        values = torch.empty(source.shape, dtype=source.dtype, device=x.device) if out is None or not is_own else out
        run(source, values, self.choices, self.encode, with_tensor_scale=with_tensor_scale)
        if out is None:
            return self._as_given(values)
        return out if is_own else out.copy_(values.view(x.shape))

    def _as_given(self, values: Tensor) -> Tensor:
        """Values of ``source`` in the shape and dtype of ``x``."""
        return values if self.source is self.x and self.x.dim() else values.view(self.x.shape).to(self.x.dtype)

    def _rounded(self) -> Scaled:
        scaled = scale_values(self.source, self.choices, self.encode)
        round_values(scaled, self.source, self.choices)
        return scaled

    def _finished(self, scaled: Scaled, out: Tensor | None, *, with_tensor_scale: bool) -> Tensor:
        """What was rounded, limited and multiplied with its scales again, in the dtype of ``x``."""
        x = self.x
        limit_values(scaled, self.choices)
        restore_values(scaled, with_tensor_scale=with_tensor_scale)
        values = scaled.blocks.cut(x.shape)
        if out is not None:
            return out.copy_(values)
        # What is handed out has a storage of its own size, hence the copy of a cut one.
        is_cut = scaled.blocks.values.numel() > x.numel()
        return values.to(x.dtype, copy=is_cut, memory_format=torch.contiguous_format).view(x.shape)


def values_of_both(last: Binding, first: Binding, *, with_tensor_scale: bool = True) -> tuple[Tensor, Tensor]:
    """``values`` of two bindings of one tensor, along axis 1 and along axis 0, read once where it can be.

    Args:
        with_tensor_scale: False leaves out scales that belong to the types (``Binding.operand``).
    """
    pair = (last, first)
    scaled = [with_tensor_scale or not b.choices.quant_type.has_tensor_scale for b in pair]
    if scaled[0] == scaled[1] and all(b.source is b.x and not b.is_trivial for b in pair):
        encodes = (last.encode, first.encode)
        found = backends.run_both(last.x, last.choices, first.choices, encodes, with_tensor_scale=scaled[0])
        if found is not None:
            return found
    return (last.values(), first.values()) if with_tensor_scale else (last.operand(), first.operand())


def measured_both(last: Binding, first: Binding, totals: tuple[Totals, Totals]) -> tuple[Tensor, Tensor] | None:
    """``measured_operand`` of two bindings of one tensor, along axis 1 and along axis 0, by one launch; None: by two.

    Args:
        totals: whose results come later (``Totals.pending``).
    """
    pair = (last, first)
    if any(b.source is not b.x or b.is_trivial or b.choices.quant_type.has_tensor_scale for b in pair):
        return None
    return backends.run_both_and_count(last.x, (last.choices, first.choices), (last.encode, first.encode), totals)


def prepare_both(last: Binding, first: Binding, *, with_values: bool) -> PreparedPair | None:
    """``measured_both``, or ``measure`` of both, of tensors like this one, contiguous; None: each is different."""
    pair = (last, first)
    if any(b.encode is not None or not b._is_alike() for b in pair):
        return None
    return backends.prepare_pair(last.x, last.choices, first.choices, with_values=with_values)


def _overlaps(out: Tensor, x: Tensor) -> bool:
    """Whether the two share memory otherwise than by being the same."""
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return False
    return (out.data_ptr(), out.shape, out.stride()) != (x.data_ptr(), x.shape, x.stride())
