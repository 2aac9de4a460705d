"""How many bytes a capture's tensor takes on disk, at most, by ``capture.storage``, ``scales`` and ``tokens``.

What ``capture.compress`` and ``capture.dedupe`` save is known afterwards only. Codes that do not give back every value
are stored as values, which this does not foresee: it takes a tensor at the very end of its dtype's range.
"""

from collections.abc import Iterable
from math import ceil, prod

from qcollect.formats.records import QuantType
from qcollect.recipe.records import CaptureSpec, QuantSpec
from qcollect.recipe.selectors import expand_tokens
from qcollect.vocab import Gemm, LayerType

_INDEX_BYTES = 8
_WITHOUT_TOKENS = frozenset({"weight", "grad_weight"})


def stored_bytes(
    shape: tuple[int, ...],
    element_bytes: int,
    *,
    layer_type: LayerType,
    tensor_name: str,
    copy_of: Gemm | None,
    consumers: Iterable[Gemm],
    quant: QuantSpec,
    spec: CaptureSpec,
) -> int:
    """The bytes of one capture's tensor and of what is stored beside it.

    Args:
        shape: of the original.
        element_bytes: of a value.
        layer_type, tensor_name: of the capture.
        copy_of: the gemm of a quantized copy; None: it is the original.
        consumers: the gemms that quantize the original.
        quant, spec: of the recipe.
    """
    num_rows = 0
    axis = _token_axis(shape, layer_type, tensor_name)
    if spec.tokens is not None and axis is not None and shape[axis]:
        kept = len(expand_tokens(spec.tokens, shape[axis], key="capture.tokens"))
        num_rows = 0 if kept == shape[axis] else kept * (1 if copy_of is None else prod(shape[:axis]))
        shape = (*shape[:axis], kept, *shape[axis + 1 :])
    value_bytes = prod(shape) * element_bytes
    matrix = shape if layer_type == LayerType.ATTENTION else (prod(shape[:-1]), *shape[-1:])
    rows_bytes = num_rows * _INDEX_BYTES
    if copy_of is None:
        scales = sum(_scale_bytes(matrix, tensor_name, gemm, quant) for gemm in consumers) if spec.scales else 0
        return value_bytes + scales + rows_bytes
    scales = _scale_bytes(matrix, tensor_name, copy_of, quant)
    codes = _code_bytes(matrix, quant.find_type(_type_name(quant, copy_of)))
    if spec.storage == "codes" and codes < value_bytes:
        return codes + scales + rows_bytes
    return value_bytes + (scales if spec.scales else 0) + rows_bytes


def _token_axis(shape: tuple[int, ...], layer_type: LayerType, tensor_name: str) -> int | None:
    if layer_type == LayerType.LINEAR:
        axis = None if tensor_name in _WITHOUT_TOKENS else len(shape) - 2
    else:  # the output's heads stand behind its tokens
        axis = len(shape) - (3 if tensor_name in ("output", "grad_output") else 2)
    return axis if axis is not None and axis >= 0 else None


def _type_name(quant: QuantSpec, gemm: Gemm) -> str:
    name: str = quant.overrides.get(gemm, {}).get("type") or quant.type
    return name


def _block_size(quant: QuantSpec, tensor_name: str, gemm: Gemm) -> int | tuple[int, int] | None:
    override = quant.overrides.get(gemm, {})
    own = None if "type" in override else quant.block_size
    if tensor_name == "weight" and "type" not in override and quant.weight_block_size is not None:
        own = quant.weight_block_size
    size: int | tuple[int, int] | None = override.get("block_size") or own
    return size or quant.find_type(_type_name(quant, gemm)).block_size


def _code_bytes(shape: tuple[int, ...], entry: QuantType) -> int:
    if entry.element is None:
        return prod(shape) * 8
    bits = entry.element.bits
    if bits > 4:
        # a complement has no -0, which has a bit of its own then
        return prod(shape) * ceil(bits / 8) + (ceil(prod(shape) / 8) if entry.element.encoding != "float" else 0)
    return max((_along(shape, axis, 2) for axis in _last_axes(shape)), default=1)


def _scale_bytes(shape: tuple[int, ...], tensor_name: str, gemm: Gemm, quant: QuantSpec) -> int:
    """Of the blocks along the axis with more of them: which it is makes no difference where they come out even."""
    entry, size = quant.find_type(_type_name(quant, gemm)), _block_size(quant, tensor_name, gemm)
    if entry.scale_format is None or size is None:
        return 0
    scale = entry.scale_format.bits // 8
    if not isinstance(size, int):
        rows, columns = size
        return prod(shape[:-2]) * ceil(shape[-2] / rows) * ceil(shape[-1] / columns) * scale if len(shape) > 1 else 0
    sizes = [(size, scale), *((8 * group, 1) for group, _ in entry.micro_exponents)]
    return max((sum(_along(shape, axis, n) * each for n, each in sizes) for axis in _last_axes(shape)), default=scale)


def _last_axes(shape: tuple[int, ...]) -> range:
    return range(max(0, len(shape) - 2), len(shape))


def _along(shape: tuple[int, ...], axis: int, size: int) -> int:
    """How many blocks of ``size`` there are along an axis, over all others."""
    return prod(shape[:axis]) * ceil(shape[axis] / size) * prod(shape[axis + 1 :])
