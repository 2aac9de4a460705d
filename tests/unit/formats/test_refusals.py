"""What does not exist is refused by name, with what exists or what to do."""

import pytest
import torch

from qcollect.errors import FormatError
from qcollect.formats.catalog import get_quant_type
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, tensor_scale

X = torch.ones(2, 40)


def refusal(call: object, *args: object, **kwargs: object) -> str:
    assert callable(call)
    with pytest.raises(FormatError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_unknown_quant_type() -> None:
    known = "known: bf16, fp16, hifp8, mxfp4, mxfp8, mxfp8_e5m2, none"
    expected = f"quant type 'mxfp9' is not known; {known}; did you mean 'mxfp8'? See 'qcollect formats'."
    assert refusal(get_quant_type, "mxfp9") == expected
    assert refusal(fake_quantize, X, "mxfp9") == expected
    assert refusal(Quantizer.create, "mxfp9") == expected
    far = refusal(get_quant_type, "zzz")
    assert far == f"quant type 'zzz' is not known; {known}. See 'qcollect formats'."
    assert "did you mean 'mxfp4'?" in refusal(get_quant_type, "MXFP4")


@pytest.mark.parametrize(
    ("quant_type", "arguments", "message"),
    [
        (
            "mxfp8",
            {"scale_rule": "flor"},
            "scale rule 'flor' is not known; known: floor, ceil, even, rceil; did you mean 'floor'?",
        ),
        (
            "mxfp8",
            {"rounding": "nearest"},
            "rounding 'nearest' is not known; known: nearest_even, half_away; did you mean 'nearest_even'?",
        ),
        (
            "mxfp8",
            {"rounding": "stochastic"},
            "rounding 'stochastic' is not known; known: nearest_even, half_away.",
        ),
        ("hifp8", {"scale_rule": "flor"}, "scale rule 'flor' is not known; known: floor, ceil, even, rceil; did you"),
        (
            "hifp8",
            {"scale_rule": "floor"},
            "hifp8 has no block scale: scale_rule='floor' does not apply; leave it out.",
        ),
        ("bf16", {"scale_rule": "rceil"}, "bf16 has no block scale: scale_rule='rceil' does not apply; leave it out."),
        ("hifp8", {"block_size": 32}, "hifp8 has no blocks: block_size=32 does not apply; leave it out."),
        (
            "hifp8",
            {"rounding": "nearest_even"},
            "hifp8 rounds half_away only: rounding='nearest_even' does not apply; leave it out.",
        ),
        (
            "fp16",
            {"rounding": "half_away"},
            "fp16 rounds nearest_even only: rounding='half_away' does not apply; leave it out.",
        ),
        ("none", {"rounding": "half_away"}, "none quantizes nothing: rounding='half_away' does not apply; leave it"),
        ("none", {"scale_rule": "floor"}, "none quantizes nothing: scale_rule='floor' does not apply; leave it out."),
        ("none", {"block_size": 32}, "none quantizes nothing: block_size=32 does not apply; leave it out."),
        ("none", {"saturate": True}, "none quantizes nothing: saturate=True does not apply; leave it out."),
        ("none", {"scale": 2.0}, "none quantizes nothing: scale=2.0 does not apply; leave it out."),
        ("mxfp8", {"scale": 2.0}, "mxfp8 has its own block scales: scale=2.0 does not apply; leave it out."),
        (
            "mxfp8",
            {"saturate": True},
            "mxfp8 clamps to its maximum in any case: saturate=True does not apply; leave it out.",
        ),
        ("mxfp8", {"block_size": 0}, "block_size is 0; it must be a whole number of elements, 1 or more."),
        ("mxfp8", {"block_size": 8.0}, "block_size is 8.0; it must be a whole number of elements, 1 or more."),
        ("mxfp8", {"axis": 2}, "axis 2 is out of range for a tensor of shape (2, 40); use -2 to 1."),
        ("mxfp8", {"axis": -3}, "axis -3 is out of range for a tensor of shape (2, 40); use -2 to 1."),
        ("mxfp8", {"axis": None}, "mxfp8 needs an axis for its blocks to run along; axis is None."),
        ("mxfp8", {"axis": 0.5}, "axis is 0.5; it must be a whole number."),
        ("hifp8", {"scale": 3.0}, "scale is 3.0; it must be a power of two from 2^-126 to 2^126."),
        ("hifp8", {"scale": 0.0}, "scale is 0.0; it must be a power of two from 2^-126 to 2^126."),
        ("hifp8", {"scale": -2.0}, "scale is -2.0; it must be a power of two from 2^-126 to 2^126."),
        ("hifp8", {"scale": float("inf")}, "scale is inf; it must be a power of two from 2^-126 to 2^126."),
        ("hifp8", {"scale": 2.0**-127}, "it must be a power of two from 2^-126 to 2^126."),
        ("hifp8", {"scale": torch.ones(2)}, "scale is a tensor of shape (2,); it must be a float or a 0-dim tensor."),
        ("mxfp8", {"out": torch.ones(2, 41)}, "out is float32 (2, 41) on cpu; it must be float32 (2, 40) on cpu as x"),
        ("none", {"out": torch.ones(2, 40).half()}, "out is float16 (2, 40) on cpu; it must be float32 (2, 40) on cpu"),
        ("mxfp8", {"out": [1.0]}, "out must be a torch tensor, not list."),
    ],
)
def test_combinations_that_do_not_exist(quant_type: str, arguments: dict[str, object], message: str) -> None:
    assert message in refusal(fake_quantize, X, quant_type, **arguments)


@pytest.mark.parametrize("quant_type", ["mxfp8", "hifp8", "bf16", "none"])
def test_dtypes_that_are_not_taken(quant_type: str) -> None:
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        expected = (
            f"{quant_type} takes dense tensors of float32, bfloat16, float16, not {name}; convert the tensor first."
        )
        assert refusal(fake_quantize, torch.zeros(2).to(dtype), quant_type) == expected
        assert refusal(count_saturated, torch.zeros(2).to(dtype), quant_type) == expected
    assert "not the layout torch.sparse_coo" in refusal(fake_quantize, torch.ones(2).to_sparse(), quant_type)
    assert refusal(fake_quantize, [1.0], quant_type) == f"{quant_type} takes a torch tensor, not list."


def test_refusals_do_not_depend_on_the_tensor_being_empty() -> None:
    assert "out of range" in refusal(fake_quantize, torch.empty(0, 32), "mxfp8", axis=2)
    assert "does not apply" in refusal(fake_quantize, torch.empty(0), "mxfp8", scale=2.0)


def test_per_tensor_scaling_of_a_type_without_it() -> None:
    for name in ("mxfp8", "bf16"):
        assert refusal(tensor_scale, X, name) == (
            f"{name} has no per-tensor scale: tensor_scale does not apply; leave it out."
        )
        assert refusal(Quantizer.create, name, tensor_scale=True) == (
            f"{name} has no per-tensor scale: tensor_scale=True does not apply; leave it out."
        )


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="not known"):
        fake_quantize(X, "fp9")


def test_a_refused_call_writes_nothing() -> None:
    out = X.clone()
    refusal(fake_quantize, torch.zeros(2, 40), "hifp8", scale_rule="floor", out=out)
    assert torch.equal(out, X)
