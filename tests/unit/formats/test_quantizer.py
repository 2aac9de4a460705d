"""Edge cases, the scale of a whole tensor, and the record: what a quantizer gives and what it says of itself."""

import copy
import json
import math
import pickle

import pytest
import torch
from format_inputs import assert_same_bits, block, seed_for

from qcollect.formats.catalog import E8M0, POWER_OF_TWO_RULES, QUANT_TYPES
from qcollect.formats.checks import DTYPES
from qcollect.formats.quantizer import Quantizer, consumed, count_saturated, fake_quantize, quantize, tensor_scale
from qcollect.formats.scales import block_scales, power_of_two_scale, scale_exponents, tensor_amax

ALL_TYPES = tuple(QUANT_TYPES)
MX_TYPES = ("mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
FP8_TYPES = ("fp8_e4m3", "fp8_e5m2")
BLOCK_TYPES = tuple(name for name, entry in QUANT_TYPES.items() if entry.block_size)
NAN, INF = math.nan, math.inf


def every_choice(quant_type: str) -> list[dict[str, object]]:
    """The settings of every rule and rounding of a type."""
    entry = QUANT_TYPES[quant_type]
    return [
        {"scale_rule": rule, "rounding": rounding, **seed_for(rounding)}
        for rule in entry.scale_rules or (None,)
        for rounding in entry.roundings or (None,)
    ]


# --- edge cases ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quant_type", ALL_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_blocks_stay_zero(quant_type: str, dtype: torch.dtype) -> None:
    ones = 0.9375 if quant_type == "hif4" else 1.0  # no scale of hif4 makes a block of ones exact
    for arguments in every_choice(quant_type):
        zeros = torch.zeros(4, 64, dtype=dtype)
        assert_same_bits(fake_quantize(zeros, quant_type, **arguments), zeros)
        zeros[2] = 1
        if quant_type == "hif4" and arguments["rounding"] == "stochastic":
            continue  # nor does any draw
        if arguments["rounding"] == "hybrid":
            assert_same_bits(fake_quantize(zeros[:2], quant_type, **arguments), zeros[:2])
        assert_same_bits(fake_quantize(zeros, quant_type, **arguments), zeros * ones)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if name != "none"])
def test_codes_of_all_zero_blocks_have_finite_scales_and_no_nan(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    for arguments in every_choice(quant_type):
        for x in (torch.zeros(4, 64), torch.full((4, 64), -0.0)):
            quantized = quantize(x, quant_type, **arguments)
            y = quantized.dequantize()
            assert torch.equal(y, torch.zeros(4, 64))
            if quantized.scales is not None:
                assert entry.scale_format is not None
                codes = quantized.scales.view(torch.uint8)
                assert (codes == 0).all() and entry.scale_format.nan_code != 0
            if quantized.tensor_scale is not None:
                assert quantized.tensor_scale.isfinite()


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_all_zero_block_has_the_smallest_scale(quant_type: str) -> None:
    element = QUANT_TYPES[quant_type].element
    assert element is not None
    for rule in POWER_OF_TWO_RULES:
        assert scale_exponents(torch.zeros(1, dtype=torch.int32), element, E8M0, rule).item() == -127
        scales = block_scales(torch.zeros(1, dtype=torch.int32), QUANT_TYPES[quant_type], rule)
        assert scales.scale.tolist() == scales.decode.tolist() == [2.0**-127]


def test_all_zero_tensor_has_a_tensor_scale_of_one() -> None:
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    y, amax = quantizer(torch.zeros(4, 64))
    assert amax is not None and amax.item() == 0.0
    scale = quantizer.scale_of(amax)
    assert scale is not None and scale.item() == 1.0
    assert torch.equal(y, torch.zeros(4, 64))


@pytest.mark.parametrize("quant_type", MX_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", POWER_OF_TWO_RULES)
def test_nan_or_inf_makes_its_block_nan_and_no_other(quant_type: str, dtype: torch.dtype, rule: str) -> None:
    # NVIDIA/TransformerEngine issue 3550: a maximum that drops NaN hides it.
    x = torch.ones(3, 64, dtype=dtype)
    x[0, 5], x[1, 40], x[2, 0] = NAN, INF, -INF
    y = fake_quantize(x, quant_type, scale_rule=rule)
    expected = torch.ones(3, 64, dtype=dtype)
    expected[0, :32] = expected[1, 32:] = expected[2, :32] = NAN
    assert_same_bits(y, expected)
    assert count_saturated(x, quant_type, scale_rule=rule) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("quant_type", BLOCK_TYPES)
def test_a_block_without_nan_or_inf_is_as_if_there_were_none(quant_type: str, bad: float, dtype: torch.dtype) -> None:
    entry = QUANT_TYPES[quant_type]
    assert entry.block_size is not None and entry.scale_format is not None
    size = entry.block_size
    x = torch.randn(2, 2 * size, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[1, -1] = 100.0  # where the tensor has a scale, it follows from this
    with_bad = x.clone()
    with_bad[0, 5] = bad
    for axis in (1, 0):
        for arguments in every_choice(quant_type):
            clean, spoiled = (x, with_bad) if axis else (x.t().contiguous(), with_bad.t().contiguous())
            expected = fake_quantize(clean, quant_type, axis, **arguments)
            (expected if axis else expected.t())[0, :size] = NAN
            assert_same_bits(fake_quantize(spoiled, quant_type, axis, **arguments), expected)
            quantized = quantize(spoiled, quant_type, axis, **arguments)
            y = quantized.dequantize()
            assert torch.equal(y.nan_to_num(77), expected.nan_to_num(77))
            assert quantized.scales is not None
            codes = quantized.scales.view(torch.uint8)
            assert (codes == entry.scale_format.nan_code).flatten().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("quant_type", FP8_TYPES)
def test_nan_or_inf_makes_a_tensor_with_one_scale_nan(quant_type: str, bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5] = bad
    for arguments in every_choice(quant_type):
        assert fake_quantize(x, quant_type, **arguments).isnan().all()
        assert quantize(x, quant_type, **arguments).dequantize().isnan().all()


@pytest.mark.parametrize("quant_type", ["hifp8", "bf16", "fp16", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_where_there_are_no_blocks(quant_type: str, dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 5], x[1, 40], x[1, 41] = NAN, INF, -INF
    for arguments in every_choice(quant_type):
        assert_same_bits(fake_quantize(x, quant_type, **arguments), x)
        if quant_type != "none":
            assert_same_bits(quantize(x, quant_type, **arguments).dequantize(), x)


@pytest.mark.parametrize("quant_type", MX_TYPES)
def test_negative_nan_payloads_are_nan(quant_type: str) -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for one in bits.view(torch.float32):
        assert fake_quantize(block(one.item()).index_put((torch.tensor([0]),), one), quant_type).isnan().all()


def test_negative_zero() -> None:
    x = torch.tensor([-0.0, 0.0, -1e-30, 1.0])
    for quant_type in (*MX_TYPES, *FP8_TYPES, "bf16", "fp16", "none"):
        for arguments in every_choice(quant_type):
            assert fake_quantize(x, quant_type, **arguments).signbit().tolist() == [True, False, True, False]
    for quant_type in ("nvfp4", "hif4"):  # -0 is 0, and a negative number that becomes zero is not
        assert fake_quantize(x, quant_type).signbit().tolist() == [False, False, True, False]
    for saturate in (False, True):
        assert fake_quantize(x, "hifp8", saturate=saturate).signbit().tolist() == [False] * 4


def test_none_changes_no_bit() -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    y = fake_quantize(x.view(torch.float32), "none")
    assert torch.equal(y.view(torch.int32), x)


# --- per-tensor scale ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([8.0], 1.0),
        ([15.999999], 1.0),
        ([16.0, -1.0], 2.0),
        ([-3e-6], 2.0**-22),
        ([1.0, NAN, INF], 2.0**-3),
        ([NAN, INF], 1.0),
        ([0.0, -0.0], 1.0),
        ([], 1.0),
        ([2.0**-149], 2.0**-126),
        ([3.4028235e38], 2.0**124),
    ],
)
def test_tensor_scale_puts_the_finite_abs_max_between_8_and_16(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    assert tensor_scale(x, "hifp8") == scale
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    _, amax = quantizer(x)
    assert amax is not None and amax.dtype == torch.float32 and amax.shape == ()
    in_tensor = quantizer.scale_of(amax)
    assert in_tensor is not None and in_tensor.dtype == torch.float32 and in_tensor.shape == ()
    assert in_tensor.item() == scale
    rule = quantizer.quant_type.tensor_scale
    assert rule is not None and rule.target == 3
    assert power_of_two_scale(tensor_amax(x, rule), rule.target).item() == scale


def test_value_is_scale_times_element() -> None:
    x = torch.tensor([3e-6, -1.1e-6, 1e-12, 0.0, NAN])
    scale = tensor_scale(x, "hifp8")
    expected = fake_quantize(x / scale, "hifp8") * scale
    assert_same_bits(fake_quantize(x, "hifp8", scale=scale), expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=torch.tensor(scale, dtype=torch.float64)), expected)
    quantizer = Quantizer.create("hifp8", tensor_scale=True, saturate=True)
    quantized, amax = quantizer(x)
    assert_same_bits(quantized, expected)
    assert_same_bits(fake_quantize(x, "hifp8", scale=quantizer.scale_of(amax)), expected)
    assert_same_bits(quantizer.apply(x, amax=amax), expected)
    assert_same_bits(quantizer.apply(x, amax=float(amax)), expected)
    assert_same_bits(quantizer.quantize(x).dequantize(), expected)


def test_scaled_values_are_a_fixed_point_under_their_recorded_scale() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 1e-5
    quantizer = Quantizer.create("hifp8", tensor_scale=True)
    y, amax = quantizer(x)
    assert torch.equal(fake_quantize(y, "hifp8", scale=quantizer.scale_of(amax)), y)


@pytest.mark.parametrize("quant_type", ["nvfp4", *FP8_TYPES])
def test_a_part_under_the_abs_max_of_the_whole_is_a_part_of_the_result(quant_type: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 64)
    whole = fake_quantize(x, quant_type)
    amax = Quantizer.create(quant_type).amax_of(x)
    assert amax is not None and amax.item() == x.abs().max().item()
    for value in (amax, float(amax)):
        parts = [fake_quantize(part, quant_type, amax=value) for part in x.chunk(4)]
        assert_same_bits(torch.cat(parts), whole)
    assert not torch.equal(fake_quantize(x[:, :32], quant_type), whole[:, :32])


@pytest.mark.parametrize("quant_type", ["nvfp4", *FP8_TYPES])
def test_operands_without_the_tensor_scale_are_exact_in_bfloat16(quant_type: str) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    quantizer = Quantizer.create(quant_type)
    operand = quantizer.operand(x)
    assert torch.equal(operand.bfloat16().float(), operand)
    scale = quantizer.scale_of(quantizer.amax_of(x))
    assert scale is not None
    torch.testing.assert_close(operand * scale, quantizer.apply(x), rtol=2.0**-22, atol=0)
    assert torch.equal(Quantizer.create("mxfp8").operand(x), fake_quantize(x, "mxfp8"))


def test_abs_max_of_blocks_is_over_finite_values_and_that_of_fp8_is_not() -> None:
    x = torch.tensor([1.0, -3.0, NAN, INF])
    assert Quantizer.create("nvfp4").amax_of(x) == 3.0
    assert Quantizer.create("hifp8", tensor_scale=True).amax_of(x) == 3.0
    in_fp8 = Quantizer.create("fp8_e4m3").amax_of(x)
    assert in_fp8 is not None and in_fp8.isnan()
    assert Quantizer.create("mxfp8").amax_of(x) is None
    assert Quantizer.create("mxfp8").scale_of(None) is None


def test_saturated_elements_of_unblocked_types() -> None:
    x = torch.tensor([40959.0, 40960.0, -1e9, INF, -INF, NAN, 0.0])
    assert count_saturated(x, "hifp8") == 4
    assert count_saturated(x, "hifp8", scale=2.0**20) == 2
    assert count_saturated(x, "fp16") == 3
    assert count_saturated(x, "none") == 0
    assert count_saturated(torch.empty(0), "hifp8") == 0


# --- the record ---------------------------------------------------------------------------------


def test_quantizer_resolves_every_default() -> None:
    assert Quantizer.create("mxfp8", axis=0).describe() == {
        "axis": 0,
        "quant_type": "mxfp8",
        "definition": None,
        "scale_rule": "floor",
        "rounding": "nearest_even",
        "block_size": 32,
        "source_dtype": None,
        "hadamard": None,
    }
    tiles = Quantizer.create("nvfp4", block_size=[16, 16], hadamard=16, axis=0)
    assert tiles == Quantizer.create("nvfp4", block_size=(16, 16), hadamard=16, axis=0)
    assert tiles.describe() == {
        "axis": 0,
        "quant_type": "nvfp4",
        "definition": None,
        "scale_rule": "nearest",
        "rounding": "nearest_even",
        "block_size": [16, 16],
        "source_dtype": None,
        "hadamard": 16,
    }
    assert Quantizer.create("hifp8").describe() == {
        "axis": None,
        "quant_type": "hifp8",
        "definition": None,
        "scale_rule": None,
        "rounding": "half_away",
        "block_size": None,
        "source_dtype": None,
        "hadamard": None,
    }
    hybrid = Quantizer.create("hifp8", rounding="hybrid", source_dtype="bfloat16")
    assert hybrid.describe()["source_dtype"] == "bfloat16"
    assert set(Quantizer.create("none").describe().values()) == {None, "none"}


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("hadamard", [None, 16])
@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_what_is_recorded_gives_the_same_values_again(quant_type: str, hadamard: int | None, tiles: bool) -> None:
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(2))
    entry = QUANT_TYPES[quant_type]
    if (hadamard and quant_type == "none") or (tiles and (not entry.block_size or entry.micro_exponents)):
        pytest.skip("there is no such combination")
    for arguments in every_choice(quant_type):
        seed = arguments.pop("seed", None)
        size = (4, 16) if tiles else None
        quantizer = Quantizer.create(quant_type, hadamard=hadamard, block_size=size, **arguments)
        y, amax = quantizer(x, seed=seed, hadamard_seed=3)
        recorded = quantizer.describe()
        assert recorded == json.loads(json.dumps(recorded))
        scale = quantizer.scale_of(amax)
        consumer = {
            **recorded,
            "gemm": "fprop",
            "shape": [6, 80],
            "scale": None if scale is None else float(scale),
            "amax": None if amax is None else float(amax),
            "saturate": quantizer.saturate,
            "seed": seed,
            "hadamard_seed": 3 if hadamard else None,
        }
        assert_same_bits(consumed(x.reshape(2, 3, 80), consumer), y)


def test_a_recorded_power_of_two_scale_gives_the_same_values_again() -> None:
    x = torch.randn(6, 80, generator=torch.Generator().manual_seed(2)) * 1e-4
    quantizer = Quantizer.create("hifp8", tensor_scale=True, saturate=True)
    y, amax = quantizer(x)
    scale = quantizer.scale_of(amax)
    assert scale is not None and amax is not None
    consumer = {"shape": [480], "scale": float(scale), "amax": float(amax), "saturate": True, "seed": None}
    assert_same_bits(consumed(x, quantizer.describe() | consumer), y.flatten())


@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if name not in ("none", "hif4")])
def test_what_is_called_quantized_differs_and_is_a_fixed_point(quant_type: str) -> None:
    """Under the recorded abs max. Zeros may change their sign in nvfp4; in hif4 a block's abs max need be no value."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    quantizer = Quantizer.create(quant_type)
    y, amax = quantizer(x)
    assert not torch.equal(y, x)
    assert torch.equal(quantizer.apply(y, amax=amax), y)
    assert quantizer.amax_of(y) is None or quant_type == "nvfp4" or torch.equal(quantizer.apply(y), y)


def test_only_none_is_the_identity() -> None:
    assert [name for name in ALL_TYPES if Quantizer.create(name).is_identity] == ["none"]


def test_quantizers_that_do_the_same_are_equal() -> None:
    assert Quantizer.create("mxfp8") == Quantizer.create("mxfp8", scale_rule="floor", block_size=32)
    assert Quantizer.create("bf16", axis=0) == Quantizer.create("bf16", axis=1)
    assert Quantizer.create("mxfp8", axis=0, block_size=(4, 4)) == Quantizer.create("mxfp8", axis=1, block_size=(4, 4))
    assert len({Quantizer.create("mxfp8"), Quantizer.create("mxfp8"), Quantizer.create("mxfp4")}) == 2


def test_a_copy_of_a_quantizer_that_was_used_is_its_equal_and_knows_its_own_records():
    quantizer = Quantizer.create("mxfp8", axis=1)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    expected = quantizer.apply(x)
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert other == quantizer and torch.equal(other.apply(x), expected)
        choices = other.choices_for(x)
        assert choices.key[0] == id(choices.quant_type) != id(quantizer.quant_type)
