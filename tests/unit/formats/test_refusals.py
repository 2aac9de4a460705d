"""What does not exist is refused by name, with what exists or what to do."""

from functools import partial

import pytest
import torch

from qcollect.errors import FormatError
from qcollect.formats.catalog import QUANT_TYPES, get_quant_type
from qcollect.formats.quantizer import Quantizer, count_saturated, fake_quantize, quantize, tensor_scale
from qcollect.formats.records import ROUNDINGS, SCALE_RULES

X = torch.ones(2, 40)


def refusal(call: object, *args: object, **kwargs: object) -> str:
    assert callable(call)
    with pytest.raises(FormatError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_unknown_quant_type() -> None:
    known = (
        "known: bf16, fp16, fp8_e4m3, fp8_e5m2, hif4, hifp8, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, mxfp8_e5m2, "
        "mxint8, none, nvfp4"
    )
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
            "scale rule 'flor' is not known; known: floor, ceil, even, rceil, nearest; did you mean 'floor'?",
        ),
        (
            "mxfp8",
            {"rounding": "nearest"},
            "rounding 'nearest' is not known; known: nearest_even, half_away, hybrid, stochastic; did you mean",
        ),
        (
            "mxfp8",
            {"rounding": "stochastic"},
            "mxfp8 with stochastic rounding needs a seed from 0 to 2^63 - 1; seed is None.",
        ),
        ("mxfp8", {"rounding": "stochastic", "seed": -1}, "needs a seed from 0 to 2^63 - 1; seed is -1."),
        (
            "mxfp8",
            {"rounding": "stochastic", "seed": 2**63},
            "needs a seed from 0 to 2^63 - 1; seed is 9223372036854775808.",
        ),
        ("mxfp8", {"rounding": "stochastic", "seed": 1.0}, "needs a seed from 0 to 2^63 - 1; seed is 1.0."),
        ("mxfp8", {"rounding": "stochastic", "seed": True}, "needs a seed from 0 to 2^63 - 1; seed is True."),
        (
            "mxfp8",
            {"rounding": "hybrid"},
            "mxfp8 rounds nearest_even or half_away or stochastic only: rounding='hybrid'",
        ),
        (
            "mxfp8",
            {"scale_rule": "nearest"},
            "mxfp8 knows floor or ceil or even or rceil only: scale_rule='nearest' does not",
        ),
        (
            "nvfp4",
            {"scale_rule": "floor"},
            "nvfp4 knows nearest only: scale_rule='floor' does not apply; leave it out.",
        ),
        ("fp8_e4m3", {"scale_rule": "even"}, "fp8_e4m3 knows nearest or rceil only: scale_rule='even' does not apply;"),
        ("nvfp4", {"scale": 2.0}, "nvfp4 has its own block scales: scale=2.0 does not apply; leave it out."),
        (
            "fp8_e5m2",
            {"scale": 2.0},
            "fp8_e5m2 has its own scale, which follows from amax: scale=2.0 does not apply; leave it out.",
        ),
        ("mxfp8", {"amax": 1.0}, "mxfp8 has no scale for the whole tensor: amax does not apply; leave it out."),
        ("hifp8", {"amax": 1.0}, "hifp8 has no scale for the whole tensor: amax does not apply; leave it out."),
        ("none", {"amax": 1.0}, "none quantizes nothing: amax does not apply; leave it out."),
        ("nvfp4", {"amax": -1.0}, "amax is -1.0; it must be a number, 0 or more."),
        ("nvfp4", {"amax": float("nan")}, "amax is nan; it must be a number, 0 or more."),
        ("nvfp4", {"amax": "1"}, "amax is '1'; it must be a number, 0 or more."),
        ("nvfp4", {"amax": torch.ones(2)}, "amax is a tensor of shape (2,); it must be a float or a 0-dim tensor."),
        ("hifp8", {"block_size": (4, 4)}, "hifp8 has no blocks: block_size=(4, 4) does not apply; leave it out."),
        (
            "hif4",
            {"block_size": (8, 8)},
            "hif4 has groups along one axis: block_size=(8, 8) does not apply; leave it out.",
        ),
        ("hif4", {"block_size": 20}, "hif4 has groups of 8: block_size=20 must be a multiple of it."),
        ("mxfp8", {"block_size": (4,)}, "block_size is (4,); a tile is two whole numbers, rows and columns."),
        ("mxfp8", {"block_size": (4, 0)}, "block_size is (4, 0); a tile is two whole numbers, rows and columns."),
        ("mxfp8", {"block_size": (4, 2.0)}, "block_size is (4, 2.0); a tile is two whole numbers, rows and columns."),
        ("mxfp8", {"block_size": True}, "block_size is True; it must be a whole number of elements, 1 or more."),
        ("mxfp8", {"source_dtype": "bfloat16"}, "mxfp8 does not round hybrid: source_dtype='bfloat16' does not apply;"),
        ("hifp8", {"source_dtype": "bfloat16"}, "hifp8 does not round hybrid: source_dtype='bfloat16' does not apply;"),
        (
            "hifp8",
            {"source_dtype": "bf16", "rounding": "hybrid"},
            "source_dtype 'bf16' is not known; known: float32, bfloat16, float16; did you mean 'bfloat16'?",
        ),
        ("mxfp8", {"hadamard": 8}, "hadamard is 8; it must be one of 4, 16, 64, 256."),
        ("mxfp8", {"hadamard": True}, "hadamard is True; it must be one of 4, 16, 64, 256."),
        ("none", {"hadamard": 16}, "none quantizes nothing: hadamard=16 does not apply; leave it out."),
        ("hifp8", {"hadamard": 4, "axis": None}, "hifp8 needs an axis"),
        ("mxfp8", {"hadamard": 4, "axis": None, "block_size": (4, 4)}, "mxfp8 needs an axis"),
        (
            "mxfp8",
            {"hadamard": 16},
            "a Hadamard transform of 16 needs a multiple of 16 elements along axis 1, not 40; use another size "
            "(4, 16, 64, 256) or none.",
        ),
        (
            "hifp8",
            {"scale_rule": "flor"},
            "scale rule 'flor' is not known; known: floor, ceil, even, rceil, nearest; did you",
        ),
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
            "hifp8 rounds half_away or hybrid or stochastic only: rounding='nearest_even' does not apply; leave it",
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


@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "fp8_e4m3", "hifp8", "bf16", "none"])
def test_dtypes_that_are_not_taken(quant_type: str) -> None:
    for dtype in (torch.float64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        expected = (
            f"{quant_type} takes dense tensors of float32, bfloat16, float16, not {name}; convert the tensor first."
        )
        assert refusal(fake_quantize, torch.zeros(2).to(dtype), quant_type) == expected
        assert refusal(count_saturated, torch.zeros(2).to(dtype), quant_type) == expected
        assert refusal(quantize, torch.zeros(2).to(dtype), quant_type) == expected
        assert refusal(Quantizer.create(quant_type).amax_of, torch.zeros(2).to(dtype)) == expected
    assert "not the layout torch.sparse_coo" in refusal(fake_quantize, torch.ones(2).to_sparse(), quant_type)
    assert refusal(fake_quantize, [1.0], quant_type) == f"{quant_type} takes a torch tensor, not list."


def test_refusals_do_not_depend_on_the_tensor_being_empty() -> None:
    assert "out of range" in refusal(fake_quantize, torch.empty(0, 32), "mxfp8", axis=2)
    assert "does not apply" in refusal(fake_quantize, torch.empty(0), "mxfp8", scale=2.0)
    assert "needs a seed" in refusal(fake_quantize, torch.empty(0), "mxfp8", rounding="stochastic")
    assert "need two dimensions" in refusal(fake_quantize, torch.empty(0), "mxfp8", block_size=(4, 4))


ALL_TYPES = tuple(QUANT_TYPES)


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_every_scale_rule_a_type_does_not_know(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    for rule in set(SCALE_RULES) - set(entry.scale_rules):
        for call in (partial(fake_quantize, X), partial(quantize, X), partial(count_saturated, X), Quantizer.create):
            message = refusal(call, quant_type, scale_rule=rule)
            assert message.startswith(f"{quant_type} ")
            assert message.endswith(f": scale_rule={rule!r} does not apply; leave it out.")
    for rule in entry.scale_rules:
        assert Quantizer.create(quant_type, scale_rule=rule).scale_rule == rule


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_every_rounding_a_type_does_not_know(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    for rounding in set(ROUNDINGS) - set(entry.roundings):
        for call in (partial(fake_quantize, X), partial(quantize, X), partial(count_saturated, X), Quantizer.create):
            message = refusal(call, quant_type, rounding=rounding)
            assert message.startswith(f"{quant_type} ")
            assert message.endswith(f": rounding={rounding!r} does not apply; leave it out.")
    for rounding in entry.roundings:
        assert Quantizer.create(quant_type, rounding=rounding).rounding == rounding


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_every_setting_a_type_has_no_use_for(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    applies = {
        "block_size=32": entry.block_size is not None,
        "block_size=(4, 4)": entry.block_size is not None and not entry.micro_exponents,
        "saturate=True": entry.can_saturate,
        "tensor_scale=True": entry.takes_tensor_scale,
        "hadamard=4": entry.element is not None,
        "source_dtype='float32'": False,
    }
    values = {"block_size": [32, (4, 4)], "saturate": [True], "tensor_scale": [True], "hadamard": [4]}
    for name, choices in {**values, "source_dtype": ["float32"]}.items():
        for value in choices:
            shown = f"{name}={value!r}"
            if applies[shown]:
                assert Quantizer.create(quant_type, **{name: value}).quant_type is entry
            else:
                message = refusal(Quantizer.create, quant_type, **{name: value})
                assert message.startswith(f"{quant_type} ")
                assert message.endswith(f": {shown} does not apply; leave it out.")


@pytest.mark.parametrize("quant_type", ALL_TYPES)
def test_a_scale_or_an_abs_max_a_type_has_no_use_for(quant_type: str) -> None:
    entry = QUANT_TYPES[quant_type]
    takes_scale = quant_type in ("hifp8", "bf16", "fp16")
    for scale in (2.0, 2, torch.tensor(2.0)):
        if takes_scale:
            assert torch.equal(fake_quantize(X, quant_type, scale=scale), X)
        else:
            assert refusal(fake_quantize, X, quant_type, scale=scale).endswith("does not apply; leave it out.")
            assert refusal(quantize, X, quant_type, scale=scale).endswith("does not apply; leave it out.")
            assert refusal(count_saturated, X, quant_type, scale=scale).endswith("does not apply; leave it out.")
    for amax in (1.0, 1, torch.tensor(1.0)):
        if entry.has_tensor_scale:
            assert torch.equal(fake_quantize(X, quant_type, amax=amax), X)
        else:
            assert refusal(fake_quantize, X, quant_type, amax=amax).endswith(": amax does not apply; leave it out.")
            assert refusal(quantize, X, quant_type, amax=amax).endswith(": amax does not apply; leave it out.")


@pytest.mark.parametrize("quant_type", [name for name in ALL_TYPES if "stochastic" in QUANT_TYPES[name].roundings])
def test_stochastic_rounding_without_a_seed(quant_type: str) -> None:
    expected = f"{quant_type} with stochastic rounding needs a seed from 0 to 2^63 - 1; seed is None."
    for call in (fake_quantize, quantize, count_saturated):
        assert refusal(call, X, quant_type, rounding="stochastic") == expected
    quantizer = Quantizer.create(quant_type, rounding="stochastic")
    for method in (quantizer, quantizer.apply, quantizer.quantize, quantizer.operand, quantizer.num_saturated):
        assert refusal(method, X) == expected


def test_a_seed_is_of_no_consequence_without_stochastic_rounding() -> None:
    assert torch.equal(fake_quantize(X, "mxfp8", seed=5), X)


def test_tiles_of_a_tensor_with_one_dimension() -> None:
    for x in (torch.ones(40), torch.tensor(1.0)):
        expected = f"tiles of (4, 4) need two dimensions; the tensor has {x.dim()}."
        assert refusal(fake_quantize, x, "mxfp8", block_size=(4, 4)) == expected
        assert refusal(quantize, x, "nvfp4", block_size=(4, 4)) == expected


def test_codes_of_what_has_none() -> None:
    assert refusal(quantize, X, "none") == "none quantizes nothing: it has no codes; choose another type."
    assert refusal(quantize, torch.empty(0, 4), "mxfp8") == ("a tensor of shape (0, 4) has nothing to make codes of.")


def test_per_tensor_scaling_of_a_type_without_it() -> None:
    for name in sorted(set(ALL_TYPES) - {"hifp8", "none"}):
        assert refusal(tensor_scale, X, name) == (
            f"{name} takes no per-tensor scale: tensor_scale does not apply; leave it out."
        )
        assert refusal(Quantizer.create, name, tensor_scale=True) == (
            f"{name} takes no power-of-two scale: tensor_scale=True does not apply; leave it out."
        )
    assert refusal(tensor_scale, X, "none") == "none quantizes nothing: tensor_scale does not apply; leave it out."


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="not known"):
        fake_quantize(X, "fp9")


def test_a_refused_call_writes_nothing() -> None:
    out = X.clone()
    refusal(fake_quantize, torch.zeros(2, 40), "hifp8", scale_rule="floor", out=out)
    assert torch.equal(out, X)
