"""What a captured value becomes on file, and that it comes back bit for bit."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import qcollect
import qcollect.errors
from qcollect.errors import CaptureError, MissingExtraError, SelectionError
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.formats.quantizer import Quantizer
from qcollect.store.capture import load, load_capture, plain, save_capture
from qcollect.store.compact import is_same, restore
from qcollect.vocab import Gemm, LayerType
from qcollect.worker.packing import Packing, pack
from qcollect.worker.policy import Use

CODES = Packing(storage="codes")
CODED = [name for name, entry in QUANT_TYPES.items() if entry.element is not None and not entry.element.is_cast]
NAN, INF = float("nan"), float("inf")


def special(shape=(5, 77), dtype=torch.float32):
    """Random numbers, and among them a block of each kind."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    for place, number in enumerate((NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-30, -1e-30, 3e38)):
        flat[place * 37 % flat.numel()] = number
    x[-1] = -0.0
    return x.to(dtype)


def use_of(x, name, axis=1, layout="token,in_features", **settings):
    entry = QUANT_TYPES[name]
    quantizer = Quantizer.create(name, axis=axis, saturate=entry.takes_tensor_scale, **settings)
    gemm = Gemm.FPROP if axis == 1 else Gemm.WGRAD
    return Use.of(
        x, quantizer, layer_type=LayerType.LINEAR, tensor_name="input", gemm=gemm, seeds=(0, 0, 0, "m")
    )  # fmt: skip


def packed_copy(x, packing, name, axis=1, num_samples=1, **settings):
    """A quantized copy as it is taken, and what is made of it."""
    use = use_of(x, name, axis, **settings)
    values = use.values()
    found = pack(
        values.clone(),
        packing,
        values="quantized",
        consumers=[use.describe(use.num_saturated())],
        token_layout="token,in_features",
        num_samples=num_samples,
        block_scales=use.binding.scales(),
    )
    return values, found


def content_of(packed):
    return {**packed.entries, "metadata": plain(packed.metadata), "tensor_info": {}}


def num_bytes(entries):
    tensors = [t for value in entries.values() for t in (value.values() if isinstance(value, dict) else [value])]
    flat = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
    return sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))


# ---- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CODED)
def test_codes_give_every_value_back_bit_for_bit(name, dtype, axis):
    entry = QUANT_TYPES[name]
    for rule in entry.scale_rules or (None,):
        for scaled in (False, True) if entry.takes_tensor_scale else (False,):
            values, found = packed_copy(
                special(dtype=dtype), CODES, name, axis, scale_rule=rule, tensor_scale=scaled
            )  # fmt: skip
            assert found.metadata["storage"] == "codes", (rule, found.metadata["storage_note"])
            assert "tensor" not in found.entries
            assert is_same(restore(content_of(found)), values)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "hif4", "hifp8"])
def test_codes_and_scales_are_those_of_quantize(name):
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    _, found = packed_copy(x, CODES, name, rounding="stochastic")
    expected = use_of(x, name, rounding="stochastic").binding.codes()
    assert found.entries["codes"].dtype == expected.codes.dtype
    assert torch.equal(found.entries["codes"].view(torch.uint8), expected.codes.view(torch.uint8))
    if expected.scales is None:
        assert "scales" not in found.entries
    else:
        assert torch.equal(found.entries["scales"]["fprop"].view(torch.uint8), expected.scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "bits"),
    [("mxfp8", 8.25), ("mxfp8_e5m2", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("hif4", 4.5), ("hifp8", 8)],
)
def test_a_value_takes_the_bits_of_its_type(name, bits, dtype, tmp_path):
    x = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, found = packed_copy(x, CODES, name)
    payload = num_bytes(found.entries) - (4 if "encode" in found.entries else 0)
    assert payload * 8 == x.numel() * bits
    path = tmp_path / "x.pt"
    stored = save_capture(path, found.entries, {}, plain(found.metadata))
    assert payload < stored.num_bytes < payload + 4096
    assert is_same(load(path), values)


@pytest.mark.parametrize("x", [torch.tensor(1.7), torch.zeros(0, 8), torch.zeros(3, 40), -torch.zeros(3, 40)])
@pytest.mark.parametrize("name", CODED)
def test_a_number_nothing_and_zeros_come_back(name, x):
    axis = 0 if x.dim() == 0 else 1
    quantizer = Quantizer.create(name, axis=axis)
    binding = quantizer.bind(x)
    consumer = {"gemm": "fprop", **quantizer.describe(), "axis": axis, "scale": None, "amax": quantizer.amax_of(x),
                "saturate": False, "seed": None, "shape": list(x.shape)}  # fmt: skip
    found = pack(
        binding.values(), CODES, values="quantized", consumers=[consumer], block_scales=binding.scales()
    )  # fmt: skip
    assert found.metadata["storage"] == ("codes" if x.numel() else "values")
    assert is_same(restore(content_of(found)), binding.values())


@pytest.mark.parametrize("name", ["bf16", "none"])
def test_what_has_no_smaller_codes_stays_values(name):
    x = torch.randn(4, 8).bfloat16()
    values, found = packed_copy(x, CODES, name)
    assert (found.metadata["storage"], found.metadata["storage_note"]) == ("values", None)
    assert is_same(found.entries["tensor"], values)


def test_a_cast_of_wider_numbers_has_codes():
    values, found = packed_copy(torch.randn(4, 8), CODES, "bf16")
    assert found.entries["codes"].dtype == torch.bfloat16
    assert is_same(restore(content_of(found)), values)


def test_tiles_and_transforms_come_back():
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(3))
    for settings in ({"block_size": (16, 16)}, {"block_size": 16, "hadamard": 16}):
        values, found = packed_copy(x, CODES, "mxfp4", **settings)
        assert found.metadata["storage"] == "codes"
        assert is_same(restore(content_of(found)), values)


def test_values_that_are_not_what_their_codes_say_stay_values():
    use = use_of(torch.randn(4, 64), "mxfp8")
    consumer = use.describe(use.num_saturated())
    other = use.values() * 1.01
    found = pack(other, CODES, values="quantized", consumers=[consumer], block_scales=use.binding.scales())
    assert found.metadata["storage"] == "values"
    assert found.metadata["storage_note"].startswith("its codes do not give back every value")
    assert found.entries["tensor"] is other


def test_an_original_stays_values():
    x = torch.randn(4, 64)
    use = use_of(x, "mxfp8")
    found = pack(x, CODES, consumers=[use.describe(use.num_saturated())])
    assert (found.metadata["storage"], set(found.entries)) == ("values", {"tensor"})


def test_without_settings_the_value_is_handed_on():
    x = torch.randn(4)
    found = pack(x, Packing(), consumers=[{"own": 1}])
    assert found.entries == {"tensor": x}
    assert found.metadata["consumers"] == [{"own": 1}]


CLEAN = """
import sys, torch
for mmap in (False, True):
    content = torch.load(sys.argv[1], weights_only=True, mmap=mmap)
    print(content["codes"].dtype, tuple(content["codes"].shape), content["scales"]["fprop"].dtype,
          tuple(content["scales"]["fprop"].shape), content["metadata"]["storage"], content["storage"])
assert "qcollect" not in sys.modules
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mxfp8", "torch.float8_e4m3fn (4, 64) torch.float8_e8m0fnu (4, 2)"),
        ("mxfp4", "torch.float4_e2m1fn_x2 (4, 32) torch.float8_e8m0fnu (4, 2)"),
        ("nvfp4", "torch.float4_e2m1fn_x2 (4, 32) torch.float8_e4m3fn (4, 4)"),
        ("hif4", "torch.uint8 (4, 32) torch.uint8 (4, 1)"),
    ],
)
def test_codes_load_in_a_clean_process_mapped_too(name, expected, tmp_path):
    _, found = packed_copy(torch.randn(4, 64), CODES, name)
    save_capture(tmp_path / "x.pt", found.entries, {}, plain(found.metadata))
    command = [sys.executable, "-c", CLEAN, str(tmp_path / "x.pt")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    storage = {"form": "codes", "shape": [4, 64], "dtype": "torch.float32", "gemm": "fprop"}
    assert lines == [f"{expected} codes {storage}"] * 2


def test_mxfp8_is_decoded_without_qcollect_as_the_readme_says():
    values, found = packed_copy(torch.randn(4, 64), CODES, "mxfp8")
    file = found.entries
    decoded = file["codes"].float().unflatten(-1, (-1, 32)) * file["scales"]["fprop"].float().unsqueeze(-1)
    assert is_same(decoded.flatten(-2), values)


def test_several_threads_pack_at_once():
    def work(seed):
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
        values, found = packed_copy(x, CODES, CODED[seed % len(CODED)])
        return is_same(restore(content_of(found)), values)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


@pytest.mark.parametrize(
    "damage",
    [
        {"storage": {"form": "codes", "shape": [4, 65], "dtype": "torch.float32", "gemm": "fprop"}},
        {"storage": {"form": "codes", "shape": [4, 64], "dtype": "torch.save", "gemm": "fprop"}},
        {"storage": {"form": "codes", "shape": [4, 64], "dtype": "torch.float32", "gemm": "dgrad"}},
        {"scales": {}},
        {"metadata": {}},
    ],
)
def test_codes_that_do_not_fit_what_is_said_of_them_are_refused(damage, tmp_path):
    _, found = packed_copy(torch.randn(4, 64), CODES, "mxfp8")
    content = {**content_of(found), **damage}
    metadata = content.pop("metadata")
    save_capture(tmp_path / "x.pt", content, {}, metadata)
    with pytest.raises(CaptureError, match=r"x\.pt: (what it stores cannot be made a tensor|it holds a tensor of)"):
        load(tmp_path / "x.pt")


def test_an_abs_max_that_is_not_finite_is_read_back():
    x = torch.randn(4, 64)
    x[0, 0] = NAN
    use = use_of(x, "fp8_e4m3")
    consumer = plain(use.describe(use.num_saturated()))
    assert consumer["amax"] == "nan"
    assert bool(qcollect.consumed(x, consumer).isnan().all())


# ---- scales ---------------------------------------------------------------------------------------


def test_scales_of_an_original_are_those_of_each_consumer():
    x = torch.randn(2, 48, 64)
    matrix = x.reshape(-1, 64)
    uses = [use_of(matrix, "mxfp8", axis) for axis in (1, 0)]
    consumers = [use.describe(use.num_saturated()) for use in uses]
    found = pack(x, Packing(scales=True), consumers=consumers, token_layout="batch,token,in_features")
    assert is_same(found.entries["tensor"], x)
    assert {gemm: tuple(codes.shape) for gemm, codes in found.entries["scales"].items()} == {
        "fprop": (96, 2),
        "wgrad": (3, 64),
    }
    for use, gemm in zip(uses, ("fprop", "wgrad"), strict=True):
        codes = found.entries["scales"][gemm]
        assert codes.dtype == torch.float8_e8m0fnu
        assert is_same(codes, use.binding.codes().scales)


def test_scales_of_a_quantized_copy_are_those_it_was_made_with():
    # under this rule they do not follow from the values
    values, found = packed_copy(torch.full((1, 32), 1.01), Packing(scales=True), "mxfp8", scale_rule="ceil")
    assert is_same(found.entries["tensor"], values)
    assert found.entries["scales"]["fprop"].float().tolist() == [[2.0**-7]]
    assert found.metadata["storage"] == "values"


def test_a_type_without_blocks_has_no_scales():
    _, found = packed_copy(torch.randn(4, 32), Packing(scales=True), "hifp8", tensor_scale=True)
    assert set(found.entries) == {"tensor"}


# ---- zstd -----------------------------------------------------------------------------------------


def test_compressed_values_come_back_bit_for_bit(tmp_path):
    pytest.importorskip("zstandard")
    tensors = [special((40, 77), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    tensors += [torch.arange(300).reshape(3, 100), torch.zeros(50, dtype=torch.bool)]
    tensors += [torch.zeros(200, dtype=torch.complex64)]
    for i, tensor in enumerate(tensors):
        found = pack(tensor, Packing(compress="zstd"))
        assert (found.metadata["storage"], set(found.entries)) == ("zstd", {"zstd", "storage"})
        assert found.entries["zstd"].dtype == torch.uint8
        save_capture(tmp_path / f"{i}.pt", found.entries, {}, plain(found.metadata))
        assert is_same(qcollect.load(tmp_path / f"{i}.pt"), tensor)
        assert is_same(load_capture(tmp_path / f"{i}.pt", mmap=True)["tensor"], tensor)


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.zeros(0, 4), torch.arange(8, dtype=torch.uint8)])
def test_what_compression_makes_no_smaller_stays_values(tensor):
    pytest.importorskip("zstandard")
    found = pack(tensor, Packing(compress="zstd"))
    assert (found.metadata["storage"], set(found.entries)) == ("values", {"tensor"})


def test_damaged_compressed_bytes_are_refused(tmp_path):
    pytest.importorskip("zstandard")
    found = pack(torch.zeros(64, 64), Packing(compress="zstd"))
    for i, (entry, text) in enumerate(
        [
            ({"zstd": found.entries["zstd"][:-3].clone()}, "its compressed bytes are damaged"),
            ({"zstd": torch.zeros(9, dtype=torch.uint8)}, "its compressed bytes are"),
            ({"zstd": torch.zeros(9)}, "what it stores cannot be made a tensor"),
            ({"storage": {"form": "zstd", "shape": [64, 65], "dtype": "torch.float32"}}, "are not those of a tensor"),
        ]
    ):
        save_capture(tmp_path / f"{i}.pt", {**found.entries, **entry}, {}, {})
        with pytest.raises(CaptureError, match=rf"{i}\.pt: .*{text}"):
            load(tmp_path / f"{i}.pt")


def test_high_bytes_together_make_bf16_smaller():
    zstandard = pytest.importorskip("zstandard")
    tensor = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = pack(tensor, Packing(compress="zstd"))
    as_it_is = zstandard.ZstdCompressor(level=3).compress(tensor.view(torch.uint8).numpy().tobytes())
    assert found.entries["zstd"].numel() < 0.95 * len(as_it_is)


def test_codes_are_not_compressed_the_rest_is():
    pytest.importorskip("zstandard")
    both = Packing(storage="codes", compress="zstd")
    x = torch.zeros(8, 64)
    assert packed_copy(x, both, "mxfp8")[1].metadata["storage"] == "codes"
    assert pack(x, both).metadata["storage"] == "zstd"


def test_missing_zstandard_is_one_line_with_the_way_to_get_it(monkeypatch):
    from qcollect.recipe.records import CaptureSpec

    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError) as missing:
        Packing.from_spec(CaptureSpec(compress="zstd"))
    assert str(missing.value) == "capture.compress: zstd needs zstandard: pip install 'qcollect[zstd]'"


# ---- tokens ---------------------------------------------------------------------------------------


def test_rows_of_an_original_are_whole_groups_of_every_sequence(tmp_path):
    x = torch.randn(2, 256, 8)
    found = pack(x, Packing(tokens="every:2"), token_layout="batch,token,in_features", num_samples=2)
    rows = torch.tensor([*range(64), *range(128, 192)])
    assert torch.equal(found.entries["rows"], rows)
    assert found.metadata["stored_rows"] == {"axis": 1, "num": 128, "of": 256}
    save_capture(tmp_path / "x.pt", found.entries, {}, plain(found.metadata))
    assert torch.equal(load(tmp_path / "x.pt"), x[:, rows])


def test_flattened_rows_are_the_same_tokens(tmp_path):
    found = pack(torch.randn(512, 8), Packing(tokens="100-130"), token_layout="token,in_features", num_samples=2)
    assert found.entries["rows"].tolist() == [*range(64, 192), *range(320, 448)]


@pytest.mark.parametrize("layout", ["out_features,in_features", None, "in_features"])
def test_what_has_no_tokens_is_stored_whole(layout):
    x = torch.randn(256, 8)
    found = pack(x, Packing(tokens=(0,)), token_layout=layout)
    assert found.entries == {"tensor": x}
    assert found.metadata["stored_rows"] is None


def test_what_gemms_consumed_follows_from_the_rows():
    x = torch.randn(2, 256, 64)
    uses = [use_of(x.reshape(-1, 64), "mxfp8", axis) for axis in (1, 0)]
    consumers = [use.describe(use.num_saturated()) for use in uses]
    packing = Packing(tokens="every:2", scales=True)
    found = pack(x, packing, consumers=consumers, token_layout="batch,token,in_features", num_samples=2)
    flat = torch.tensor([t for start in (0, 128, 256, 384) for t in range(start, start + 64)])
    for use, consumer in zip(uses, plain(found.metadata["consumers"]), strict=True):
        assert (consumer["shape"], consumer["not_from_rows"]) == ([256, 64], None)
        assert is_same(qcollect.consumed(found.entries["tensor"], consumer), use.values()[flat])
    assert found.entries["scales"]["fprop"].shape == (256, 2)
    wgrad = uses[1].binding.scales().scales.view(torch.uint8)
    assert torch.equal(found.entries["scales"]["wgrad"].view(torch.uint8), wgrad[[0, 1, 4, 5, 8, 9, 12, 13]])


def test_what_does_not_follow_from_the_rows_says_so():
    x = torch.randn(256, 64)
    cases = [
        (use_of(x, "mxfp8", axis=0, block_size=96), "capture.tokens cuts blocks of 96 tokens"),
        (use_of(x, "mxfp8", axis=1, rounding="stochastic"),
         "stochastic rounding draws by an element's place in the whole tensor"),
        (use_of(x, "mxfp8", axis=0, hadamard=256), "capture.tokens cuts blocks of 256 tokens"),
    ]  # fmt: skip
    for use, reason in cases:
        consumer = use.describe(use.num_saturated())
        found = pack(x, Packing(tokens=(0,)), consumers=[consumer], token_layout="token,in_features")
        (entry,) = plain(found.metadata["consumers"])
        assert entry["not_from_rows"] == reason
        with pytest.raises(qcollect.errors.FormatError, match=f"does not follow from the rows on file: {reason}"):
            qcollect.consumed(found.entries["tensor"], entry)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "hif4", "hifp8"])
def test_rows_of_a_quantized_copy_as_codes(name, axis):
    x = torch.randn(300, 72, generator=torch.Generator().manual_seed(0))
    values, found = packed_copy(x, Packing(storage="codes", tokens="64-70, 290"), name, axis)
    assert found.metadata["storage"] == "codes"
    rows = [*range(64, 128), *range(256, 300)]
    assert is_same(restore(content_of(found)), values[rows])


def test_rows_that_cut_the_blocks_of_a_copy_stay_values():
    x = torch.randn(256, 64)
    values, found = packed_copy(x, Packing(storage="codes", tokens=(70,), scales=True), "mxfp8", axis=0, block_size=96)
    assert (found.metadata["storage"], found.metadata["storage_note"]) == ("values", "capture.tokens cuts its blocks")
    assert is_same(found.entries["tensor"], values[64:128])
    assert found.entries["scales"]["wgrad"].shape == (2, 64)  # both blocks that the rows lie in


def test_positions_beyond_the_sequence_are_refused():
    with pytest.raises(SelectionError, match="capture.tokens is '0-99': index 32 does not exist, there are 32"):
        pack(torch.randn(32, 4), Packing(tokens="0-99"), token_layout="token,in_features")
