"""Values on their way from a device, with the CPU in the place of the device: streams and events that need no waiting.

What depends on real streams is measured on a card (``tests/bench/capture_gpu.py``, part overwrite).
"""

import math
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch
from interpreted import why_not_interpreted

from qcollect.formats.quantized import ScaleCodes
from qcollect.formats.quantizer import Quantizer
from qcollect.plan.schedule import PlannedCapture
from qcollect.store import summary_cuda
from qcollect.store.capture import describe_tensor, load_capture
from qcollect.store.manifest import read_manifest
from qcollect.vocab import Gemm, LayerType, RankInfo, Values
from qcollect.worker import staging
from qcollect.worker.arena import can_share
from qcollect.worker.engine import CaptureEngine, EngineSettings
from qcollect.worker.frame import Frame, want_key
from qcollect.worker.packing import Packing
from qcollect.worker.policy import Use
from qcollect.worker.saver import Observation, Saver
from qcollect.worker.sink import Observer
from qcollect.worker.tensors import TensorSink
from qcollect.worker.tokens import hash_tokens

pytestmark = pytest.mark.skipif(not can_share(), reason="no memory can be shared here")


class Stream:
    stream_id = 1

    def __init__(self, device=None):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass


class Event:
    def record(self, stream):
        pass

    def query(self):
        return True

    def synchronize(self):
        pytest.fail("the training thread waits for the device")


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    """Engines for which every tensor is on a device, with buffers of 4 KiB."""
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(staging.Stager, "travels", lambda self, value: True)
    engines = []

    def make(packing=None, **settings):
        saver = Saver(tmp_path / "run", run_id="r", packing=packing, clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        settings.setdefault("host_memory_bytes", 1 << 20)
        engine = CaptureEngine(saver, EngineSettings(**settings), device=torch.device("cpu"), in_process=False)
        engine.stager._sizes = min(4096, engine.stager._sizes[0]), 2
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def observation(name, **fields):
    return Observation(
        layer_type="linear",
        layer_idx=0,
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="mxfp8",
        tensor_name=name,
        tensor=name,
        module="layers.0",
        rank=RankInfo(rank=0, local_rank=0, world_size=1),
        iteration=0,
        micro_batch=0,
        sample_idx=0,
        num_samples=1,
        **fields,
    )


def saved(engine):
    engine.drain()
    run_dir = engine.saver.paths.run_dir
    records = read_manifest(engine.saver.paths.manifest_path(0))
    return {record.metadata["tensor_name"]: load_capture(run_dir / record.file) for record in records}


def check(found, tensors):
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name]["tensor"], tensor), name
        assert found[name]["tensor_info"] == describe_tensor(tensor.contiguous()), name


def test_values_of_many_parcels_arrive_with_their_statistics(make_engine):
    engine = make_engine()
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.int16)
    tensors = {
        f"t{i}": (100 * torch.randn(1 + 37 * i % 300, 3, generator=generator)).to(dtypes[i % 4]) for i in range(60)
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 2), "turned": torch.randn(4, 6).t()}
    for i, (name, tensor) in enumerate(tensors.items()):
        engine.submit(tensor, observation(name), i + 1)
    check(saved(engine), tensors)


def test_the_last_capture_of_a_micro_batch_sends_all_of_it(make_engine):
    """Whatever comes then, an optimizer's step or a rank that is waited for, they are written meanwhile."""
    engine = make_engine()
    planned = [
        PlannedCapture(
            module="layers.0",
            layer_type=LayerType.LINEAR,
            layer_idx=0,
            operation="forward",
            phase="pre",
            tensor_name=name,
            gemm=None,
            values="original",
            num_bytes=0,
        )
        for name in ("input", "weight")
    ]
    kept = SimpleNamespace(to_compare=(), is_proven=lambda iteration: True)
    observer = Observer(quant_type="mxfp8", rank=RankInfo(rank=0, local_rank=0, world_size=1), loss_scale=1.0)
    sink = TensorSink(engine.saver, EngineSettings(), observer, kept, needed_bytes=0, on_written=lambda: None)
    sink._engine = engine
    wanted = {want_key(capture): (number, capture) for number, capture in enumerate(planned, 1)}
    frame = Frame(iteration=0, micro_batch=0, sample_idx=0, num_samples=1, wanted=wanted, taker=sink)
    path = engine.saver.paths.manifest_path(0)
    for capture in planned:
        claim = frame.claim("layers.0", capture.tensor_name, token_layout="tokens,features")
        sink.take(claim, torch.randn(8, 8), ())
    deadline = time.monotonic() + 30
    while len(read_manifest(path) if path.exists() else ()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_values_that_prepare_the_way_leave_nothing_behind(make_engine):
    engine = make_engine()
    stager = engine.stager
    stager.prepare(torch.device("cpu"), (torch.bfloat16, torch.float32))
    assert stager._lanes and not stager._seen
    assert stager.arena._free == [(0, stager.arena.num_bytes)]
    tensors = {"zeros": torch.zeros(128, 256), "other": torch.randn(128, 256)}
    for i, (name, tensor) in enumerate(tensors.items()):
        engine.submit(tensor, observation(name), i + 1)
    check(saved(engine), tensors)
    assert stager.num_shared == 0


def test_memory_for_two_parcels_is_enough_for_many(make_engine):
    engine = make_engine(host_memory_bytes=8192)
    tensors = {f"t{i}": torch.randn(700) for i in range(40)}
    for i, (name, tensor) in enumerate(tensors.items()):
        engine.submit(tensor, observation(name), i + 1)
    check(saved(engine), tensors)
    assert engine.stager.arena._free == [(0, 8192)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_copy_values_and_count_on_the_way(make_engine, monkeypatch):
    if reason := why_not_interpreted():
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(summary_cuda, "supports", lambda tensor: tensor.dtype in summary_cuda._DTYPES)
    monkeypatch.setattr(summary_cuda, "_MAX_TILES_OF_ONE", 1)
    monkeypatch.setattr(summary_cuda, "_NUM_PROGRAMS", 2)
    engine, generator = make_engine(), torch.Generator().manual_seed(1)
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.int32)
    tensors = {f"t{i}": (9 * torch.randn(100 * i + 3, generator=generator)).to(dtypes[i % 4]) for i in range(10)}
    tensors |= {"turned": torch.randn(30, 20, generator=generator).t(), "not finite": torch.ones(700)}
    tensors["not finite"][600:] = math.inf
    for i, (name, tensor) in enumerate(tensors.items()):
        value = tensor.clone(memory_format=torch.preserve_format)
        engine.submit(value, observation(name), i + 1)
        value.fill_(-1)
    found = saved(engine)
    for name, tensor in tensors.items():
        assert torch.equal(found[name]["tensor"], tensor), name
        info, expected = found[name]["tensor_info"], describe_tensor(tensor.contiguous())
        for field in ("mean", "std", "rms"):
            assert info.pop(field) == pytest.approx(expected.pop(field), rel=1e-9), (name, field)
        assert info == expected, name


def test_a_value_larger_than_all_memory_arrives(make_engine):
    engine = make_engine(host_memory_bytes=8192)
    tensors = {
        "small": torch.randn(10),
        "large": torch.randn(30_000),
        "larger": torch.randn(40_000),
        "between": torch.ones(3),
        "large again": torch.randn(30_000),
    }
    for i, (name, tensor) in enumerate(tensors.items()):
        engine.submit(tensor, observation(name), i + 1)
    (lane,) = engine.stager._lanes.values()
    assert lane._oversized.num_bytes == 160_000
    check(saved(engine), tensors)


def consumers_of(x):
    quantizer = Quantizer.create("mxfp8", axis=1)
    use = Use.of(
        x,
        quantizer,
        layer_type=LayerType.LINEAR,
        tensor_name="input",
        gemm=Gemm.FPROP,
        seeds=(0, 0, 0, "fc"),
    )
    return [use.describe(use.num_saturated())]


def test_numbers_from_the_device_are_whole_in_the_metadata_of_their_own_capture(make_engine):
    engine = make_engine()
    tensors = {}
    for i in range(30):
        x = torch.zeros(1, 32 * (1 + i))
        x[0, : i + 1] = 957.0
        tensors[f"t{i}"] = x
        engine.submit(x, observation(f"t{i}", consumers=consumers_of(x)), i + 1)
    found = saved(engine)
    check(found, tensors)
    for i in range(30):
        (consumer,) = found[f"t{i}"]["metadata"]["consumers"]
        count = consumer["num_saturated"]
        assert type(count) is int and count == int(consumers_of(tensors[f"t{i}"])[0]["num_saturated"]), i
    assert found["t7"]["metadata"]["consumers"][0]["num_saturated"] > 0


def test_a_value_that_was_sent_already_takes_the_numbers_of_a_later_parcel(make_engine):
    engine = make_engine()
    x = torch.randn(4, 32)
    engine.submit(x, observation("first", consumers=consumers_of(x)), 1)
    for lane in engine.stager._lanes.values():
        lane.flush()
    engine.submit(x, observation("second", consumers=consumers_of(x)), 2)
    found = saved(engine)
    assert engine.stager.num_shared == 1
    check(found, {"first": x, "second": x})
    assert found["first"]["metadata"]["consumers"] == found["second"]["metadata"]["consumers"]


def test_scales_of_blocks_come_along(make_engine):
    engine = make_engine(packing=Packing(scales=True))
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    (consumer,) = consumers_of(x)
    scales = torch.arange(8, dtype=torch.uint8).view(4, 2)
    engine.submit(
        x,
        observation(
            "q", consumers=[consumer], values=Values.QUANTIZED, block_scales=ScaleCodes(scales=scales, micro=())
        ),
        1,
    )
    found = saved(engine)
    assert torch.equal(found["q"]["scales"]["fprop"].view(torch.uint8), scales)


@pytest.mark.parametrize("num_columns", [32, 1024, 2560])
def test_scales_come_along_whatever_part_of_the_memory_the_value_takes(make_engine, num_columns):
    engine = make_engine(packing=Packing(scales=True), host_memory_bytes=8192)
    tensors = {}
    for i in range(4):
        x = tensors[f"t{i}"] = torch.randn(1, num_columns, dtype=torch.bfloat16)
        codes = torch.full((1, num_columns // 32), i, dtype=torch.uint8)
        seen = observation(
            f"t{i}",
            consumers=consumers_of(x),
            values=Values.QUANTIZED,
            block_scales=ScaleCodes(scales=codes, micro=()),
        )
        engine.submit(x, seen, i + 1)
    found = saved(engine)
    check(found, tensors)
    for i in range(4):
        assert (found[f"t{i}"]["scales"]["fprop"].view(torch.uint8) == i).all()
    assert engine.stager.arena._free == [(0, 8192)]


@pytest.mark.parametrize(("num_elements", "host_memory_bytes"), [(10, 1 << 20), (900, 8192), (1800, 8192)])
def test_tokens_are_hashed_by_who_writes_whatever_part_of_the_memory_they_take(
    make_engine, num_elements, host_memory_bytes
):
    engine = make_engine(host_memory_bytes=host_memory_bytes)
    tokens = [torch.arange(5 * i) for i in range(3)]  # those of an empty batch too
    tensors = {f"t{i}": torch.randn(num_elements) for i in range(30)}
    for i, (name, tensor) in enumerate(tensors.items()):
        if i in (15, 22):
            engine.forget()
        engine.submit(tensor, observation(name), i + 1, tokens=tokens[i // 10])
    found = saved(engine)
    check(found, tensors)
    for i in range(30):
        assert found[f"t{i}"]["metadata"]["token_hash"] == hash_tokens(tokens[i // 10]), i
    assert engine.stager.arena._free == [(0, engine.stager.arena.num_bytes)]


def test_tokens_of_a_micro_batch_are_brought_once(make_engine):
    engine, tokens = make_engine(), torch.arange(6)
    for i in range(10):
        engine.submit(torch.randn(20), observation(f"t{i}"), i + 1, tokens=tokens)
    assert engine.stager._lanes[tokens.device]._values[-1][0].value_id == 10  # beside the ten
    assert len({content["metadata"]["token_hash"] for content in saved(engine).values()}) == 1


def test_training_asks_no_device_for_its_tokens(
    make_engine, make_llama, tokens, train_llama, read_files, tmp_path, monkeypatch
):
    make_engine()  # every tensor is on a device from here on
    monkeypatch.setattr("qcollect.worker.tensors.hash_tokens", lambda tokens: pytest.fail("hashed by training"))
    ids = tokens(1, 5)
    train_llama(make_llama(), ids, "mxfp8", tmp_path / "device", 40)
    found = {content["metadata"]["token_hash"] for content in read_files(tmp_path / "device").values()}
    assert found == {hash_tokens(ids)}


def test_a_capture_on_another_device_gets_its_tokens_there():
    frame = Frame(iteration=0, micro_batch=0, sample_idx=0, num_samples=1, wanted={}, taker=None)
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert frame.tokens_near(cpu) is None
    frame.tokens[other] = ids = torch.arange(4, device=other)
    assert frame.tokens_near(other) is ids is frame.tokens_near(cpu)
    frame.tokens = {cpu: torch.arange(4)}
    assert frame.tokens_near(other).device == other and frame.tokens_near(other) is frame.tokens_near(other)


def test_all_memory_is_given_back(make_engine):
    engine = make_engine()
    for i in range(20):
        x = torch.randn(5, 32)
        engine.submit(x, observation(f"t{i}", consumers=consumers_of(x)), i + 1)
    engine.drain()
    stager = engine.stager
    assert stager.arena._free == [(0, stager.arena.num_bytes)]
    assert sum(size for _, size in stager._facts._free) == stager._facts.num_bytes - 4096  # the counter's
