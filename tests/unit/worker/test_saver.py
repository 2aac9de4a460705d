import re
from datetime import UTC, datetime

import pytest
import torch
import xxhash

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.capture import load_capture
from qcollect.store.manifest import read_manifest
from qcollect.vocab import RankInfo
from qcollect.worker.saver import Observation, Saver, fix_value

NOON = datetime(2024, 12, 1, 14, 30, 22, tzinfo=UTC)


def observation(**fields):
    known = {
        "layer_type": "attention",
        "layer_idx": 8,
        "operation": "forward",
        "phase": "pre",
        "component": "FA",
        "quant_type": "mxfp8",
        "tensor_name": "query",
        "tensor": "query",
        "module": "model.layers.8.self_attn",
        "rank": RankInfo(rank=0, local_rank=0, world_size=1),
        "iteration": 0,
        "micro_batch": 0,
        "sample_idx": 0,
        "num_samples": 1,
    }
    return Observation(**(known | fields))


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path, run_id="run1", clock=lambda: NOON)


def test_name_is_the_contracts_to_the_letter(saver, tmp_path):
    path = saver.save(torch.zeros(1), observation(), counter=1)
    assert path == tmp_path / "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt"
    linear = observation(layer_type="linear", component="linear", tensor_name="input", tensor="q_proj_input")
    path = saver.save(torch.zeros(1), linear, counter=9)
    assert path.name == "20241201_143022_0009_iter000_linear_L8_forward_pre_linear_mxfp8_rank0_sample0_q_proj_input.pt"


def test_row_of_a_large_tensor_is_saved_small(saver):
    """torch.save of a view writes the whole storage: pytorch/pytorch issue 1995."""
    big = torch.randn(1000, 1000)
    path = saver.save(big[0], observation())
    assert path.stat().st_size <= 4000 + 16 * 1024
    loaded = load_capture(path)["tensor"]
    assert torch.equal(loaded, big[0])
    assert loaded.untyped_storage().nbytes() == 4000


def test_chunks_of_a_fused_projection_are_saved_apart(saver):
    fused = torch.randn(2, 5, 3 * 64)
    for i, chunk in enumerate(fused.chunk(3, dim=-1)):
        path = saver.save(chunk, observation(tensor=f"part{i}"))
        assert path.stat().st_size <= chunk.numel() * 4 + 16 * 1024
        loaded = load_capture(path)["tensor"]
        assert torch.equal(loaded, chunk)
        assert loaded.is_contiguous()
        assert loaded.untyped_storage().nbytes() == chunk.numel() * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(),
        torch.randn(1).expand(5, 5),
        torch.randn(8)[::2],
        torch.nn.Parameter(torch.randn(3)),
        torch.randn(3, requires_grad=True) * 2,
        torch.eye(3).to_sparse(),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).imag,
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor(1.5),
    ],
    ids=["transposed", "expanded", "strided", "parameter", "with_grad", "sparse", "conj", "neg", "float8", "scalar"],
)
def test_any_tensor_becomes_a_dense_copy_of_its_own(tensor):
    fixed = fix_value(tensor)
    dense = tensor.detach()
    dense = dense.resolve_conj().resolve_neg() if dense.layout == torch.strided else dense.to_dense()
    assert type(fixed) is torch.Tensor
    assert (fixed.dtype, fixed.shape, fixed.device.type) == (tensor.dtype, tensor.shape, "cpu")
    assert torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (fixed, dense)))
    assert (fixed.requires_grad, fixed.is_leaf, fixed.grad_fn) == (False, True, None)
    assert fixed.is_contiguous()
    assert fixed.untyped_storage().nbytes() == fixed.numel() * fixed.element_size()
    if tensor.layout == torch.strided:
        assert fixed.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_value_is_that_of_the_call(saver):
    x = torch.zeros(3)
    path = saver.save(x, observation())
    x.fill_(7)
    assert load_capture(path)["tensor"].tolist() == [0, 0, 0]


def test_file_metadata_has_every_field(saver):
    consumer = {"gemm": "fprop", "axis": 1}
    seen = observation(consumers=[consumer], extra={"experiment": ("a", torch.Size([1])), "rank": 99})
    metadata = load_capture(saver.save(torch.zeros(1), seen))["metadata"]
    assert metadata == {
        "experiment": ["a", [1]],
        "schema": 1,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "sample_idx": 0,
        "num_samples": 1,
        "batch_idx": 0,
        "sequence_idx": 0,
        "iteration": 0,
        "micro_batch": 0,
        "layer_type": "attention",
        "layer_idx": 8,
        "operation": "forward",
        "phase": "pre",
        "component": "FA",
        "quant_type": "mxfp8",
        "tensor_name": "query",
        "module": "model.layers.8.self_attn",
        "values": "original",
        "consumers": [consumer],
        "token_layout": None,
        "loss_scale": 1.0,
        "token_hash": None,
        "save_time": "2024-12-01 14:30:22",
        "run_id": "run1",
        "sharding": None,
        "trigger": None,
        "storage": "values",
        "storage_note": None,
        "stored_rows": None,
        "stored_in": None,
        **dict.fromkeys(("visible_device", "gpu_name", "gpu_uuid", "gpu_index")),
    }


def test_tensor_info_has_every_field(saver):
    info = load_capture(saver.save(torch.tensor([1.0, -3.0]), observation()))["tensor_info"]
    assert info == {
        "shape": [2],
        "dtype": "torch.float32",
        "device": "cpu",
        "requires_grad": False,
        "is_leaf": True,
        "min": -3.0,
        "max": 1.0,
        "mean": -1.0,
        "std": 2.0,
        "abs_max": 3.0,
        "rms": pytest.approx(5**0.5),
        "min_nonzero_abs": 1.0,
        "num_nan": 0,
        "num_inf": 0,
        "num_zero": 0,
    }


def test_manifest_line_has_size_and_hash_of_the_file(saver, tmp_path):
    paths = [
        saver.save(torch.randn(3), observation(rank=RankInfo(rank=2, local_rank=0, world_size=3))) for _ in range(2)
    ]
    records = read_manifest(RunPaths(tmp_path).manifest_path(2))
    assert [r.file for r in records] == [path.name for path in paths]
    for record, path in zip(records, paths, strict=True):
        content = path.read_bytes()
        assert record.bytes == len(content)
        assert record.xxh3_128 == xxhash.xxh3_128(content).hexdigest()
    assert (saver.num_saved, saver.num_bytes) == (2, sum(path.stat().st_size for path in paths))


def test_number_that_is_taken_is_passed_over_and_nothing_overwritten(tmp_path):
    first, second = (Saver(tmp_path, run_id=name, clock=lambda: NOON) for name in "ab")
    paths = [s.save(torch.tensor([float(i)]), observation()) for i, s in enumerate((first, second, first))]
    assert [re.match(r"20241201_143022_(\d+)_", path.name)[1] for path in paths] == ["0001", "0002", "0003"]
    assert [load_capture(path)["tensor"].item() for path in paths] == [0, 1, 2]


def test_place_in_a_schedule_that_is_taken_is_an_error(saver):
    path = saver.save(torch.zeros(1), observation(), counter=4)
    with pytest.raises(CaptureError) as error:
        saver.save(torch.ones(1), observation(), counter=4)
    assert str(error.value) == f"{path}: exists already; nothing was overwritten"
    assert load_capture(path)["tensor"].item() == 0
    assert saver.num_saved == 1


def test_capture_whose_manifest_line_does_not_fit_is_taken_back(saver, tmp_path, monkeypatch):
    saver.save(torch.zeros(1), observation())

    def no_space(file, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qcollect.store.files.LineFile.append_encoded", no_space)
    with pytest.raises(CaptureError) as error:
        saver.save(torch.zeros(1), observation())
    manifest = RunPaths(tmp_path).manifest_path(0)
    assert str(error.value).startswith(f"{manifest}: cannot be written: No space left on device (")
    assert len(list(tmp_path.glob("*.pt"))) == len(read_manifest(manifest)) == saver.num_saved == 1


def test_tensor_names_stay_inside_the_folder(saver, tmp_path):
    path = saver.save(torch.zeros(1), observation(tensor="../../x/w[0]"))
    assert path.parent == tmp_path
    assert path.name.endswith("_..%2F..%2Fx%2Fw[0].pt")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed dtype")
def test_a_packed_tensor_keeps_its_codes(saver):
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    content = load_capture(saver.save(codes.view(torch.float4_e2m1fn_x2), observation()))
    assert content["tensor"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(content["tensor"].view(torch.uint8), codes)
