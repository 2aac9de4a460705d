"""Captures on their way from the training thread to the disk."""

import errno
import gc
import os
import re
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import UTC, datetime

import psutil
import pytest
import torch

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.capture import load_capture
from qcollect.store.manifest import read_manifest
from qcollect.vocab import RankInfo
from qcollect.worker.arena import HostArena, Memory, can_share
from qcollect.worker.engine import CaptureEngine, EngineSettings
from qcollect.worker.saver import Observation, Saver, Source
from qcollect.worker.staging import Order, Stager, held_bytes
from qcollect.worker.writers import WriterPool


def observation(name: str = "input") -> Observation:
    return Observation(
        layer_type="linear",
        layer_idx=0,
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="none",
        tensor_name=name,
        tensor=name,
        module="layers.0",
        rank=RankInfo(rank=0, local_rank=0, world_size=1),
        iteration=0,
        micro_batch=0,
        sample_idx=0,
        num_samples=1,
    )


@pytest.fixture(params=["threads", "process"])
def make_engine(request, tmp_path):
    """Engines whose writers are threads here, or another process."""
    is_process = request.param == "process"
    if is_process and not can_share():
        pytest.skip("no memory can be shared here")
    engines = []

    def make(**settings):
        saver = Saver(tmp_path / "run", run_id="r", clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        needed = settings.pop("needed_bytes", 1 << 20)
        engines.append(
            CaptureEngine(
                saver,
                EngineSettings(**settings),
                device=torch.device("cpu"),
                needed_bytes=needed,
                in_process=not is_process,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def tensors_of(engine):
    records = read_manifest(engine.saver.paths.manifest_path(0))
    return {
        record.metadata["tensor_name"]: load_capture(engine.saver.paths.run_dir / record.file) for record in records
    }


# -- the value --------------------------------------------------------------------------------


def test_what_is_done_to_a_tensor_afterwards_does_not_reach_its_file(make_engine):
    engine = make_engine()
    x = torch.empty(1 << 12)
    for i in range(60):
        engine.submit(x.fill_(i), observation(f"t{i}"), i + 1)
        x.fill_(-1)
    engine.drain()
    found = tensors_of(engine)
    assert len(found) == 60
    for i in range(60):
        assert torch.equal(found[f"t{i}"]["tensor"], torch.full((1 << 12,), float(i)))
        assert found[f"t{i}"]["tensor_info"]["mean"] == i


def test_a_view_is_saved_without_the_rest_of_its_storage(make_engine):
    engine = make_engine()
    big = torch.arange(1_000_000.0).view(1000, 1000)
    engine.submit(big[1], observation("row"), 1)
    engine.submit(big[:, 3], observation("column"), 2)
    engine.drain()
    found = tensors_of(engine)
    assert torch.equal(found["row"]["tensor"], big[1]) and torch.equal(found["column"]["tensor"], big[:, 3])
    assert found["row"]["tensor"].untyped_storage().nbytes() == 4000
    assert max(record.bytes for record in read_manifest(engine.saver.paths.manifest_path(0))) < 4000 + 16384


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3.0]).conj(),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(3, 5, dtype=torch.bfloat16).t(),
    ],
    ids=["0-dim", "empty", "bool", "complex", "float8", "transposed"],
)
def test_every_kind_of_tensor_keeps_shape_dtype_and_value(make_engine, tensor):
    engine = make_engine()
    engine.submit(tensor, observation(), 1)
    engine.drain()
    saved = tensors_of(engine)["input"]["tensor"]
    assert (saved.shape, saved.dtype) == (tensor.shape, tensor.dtype)
    assert saved.is_contiguous() and torch.equal(saved.to(torch.complex64), tensor.to(torch.complex64))


# -- shared values ----------------------------------------------------------------------------


def nobody_releases():
    raise AssertionError("waits for ever")


def make_stager(num_bytes=1 << 20):
    arena = HostArena(num_bytes)
    shipped = []
    return Stager(arena, ship=shipped.extend, wait=nobody_releases), shipped


def value_of(staged):
    return staged.piece.open(Memory.map_of)


def test_the_same_memory_seen_again_is_staged_once():
    stager, _ = make_stager()
    x = torch.randn(100)
    first, second, view = stager.stage(x), stager.stage(x.detach()), stager.stage(x[:50])
    assert second is first and view is not first


def test_a_shared_value_is_summarized_once(make_engine, monkeypatch):
    engine = make_engine()
    x = torch.randn(100)
    for i in range(5):
        engine.submit(x, observation(f"t{i}"), i + 1)
    engine.drain()
    assert engine.stager.num_shared == 4
    found = [content["tensor_info"] for content in tensors_of(engine).values()]
    assert found == [found[0]] * 5


def test_memory_changed_in_place_is_staged_anew():
    stager, _ = make_stager()
    x = torch.zeros(100)
    first = stager.stage(x)
    assert stager.stage(x.add_(1)) is not first
    assert value_of(first).sum() == 0


def test_memory_given_to_another_tensor_is_staged_anew():
    stager, _ = make_stager()
    seen = []
    for i in range(50):  # the allocator gives the same memory again
        x = torch.full((1000,), float(i))
        seen.append(stager.stage(x))
        del x
    assert [float(value_of(staged)[0]) for staged in seen] == [float(i) for i in range(50)]


def test_memory_that_a_storage_gave_back_is_another_tensors():
    """FSDP frees a gathered weight so: the storage lives on, empty, and its memory is the next tensor's."""
    stager, _ = make_stager()
    memory = bytearray(4000)
    gathered = torch.frombuffer(memory, dtype=torch.float32)
    first = stager.stage(gathered)
    memory[:] = struct.pack("f", 1) * 1000
    gradient = torch.frombuffer(memory, dtype=torch.float32)
    assert (gradient.data_ptr(), gradient._version) == (gathered.data_ptr(), gathered._version)
    second = stager.stage(gradient)
    assert second is not first
    assert (value_of(first).sum(), value_of(second).sum()) == (0, 1000)


def test_after_forgetting_the_memory_is_given_back():
    stager, shipped = make_stager(1 << 16)
    arena = stager.arena
    for _ in range(3):
        orders = [
            Order(
                ticket=i,
                staged=stager.stage(x),
                source=Source.of(x),
                seen=observation(),
                counter=None,
                now=datetime(2026, 1, 1, tzinfo=UTC),
            )
            for i, x in enumerate(torch.randn(4, 1000))
        ]
        for order in orders:
            stager.submit(order)
        stager.forget()
        for order in orders:
            stager.release(order)
        assert arena._free == [(0, arena.num_bytes)]
    assert [shipment.ticket for shipment in shipped] == [0, 1, 2, 3] * 3


# -- bounded memory ---------------------------------------------------------------------------


def test_who_asks_for_more_than_is_free_waits_for_a_release():
    arena = HostArena(8192)
    held = [arena.try_allocate(4096), arena.try_allocate(4096)]
    assert arena.try_allocate(1) is None

    def release_later():
        time.sleep(0.2)
        arena.release(held[0])
        return True

    assert arena.allocate(100, release_later).offset == held[0].offset
    assert arena.waited_s > 0.1


def test_who_holds_all_memory_and_asks_for_more_gets_memory_of_its_own():
    arena = HostArena(8192)
    held = arena.try_allocate(8192)
    more = arena.allocate(100, lambda: False)
    assert more.memory is not held.memory and more.num_bytes == 4096
    arena.release(more)
    arena.release(held)
    assert arena._free == [(0, 8192)]


def test_what_is_larger_than_the_arena_gets_memory_of_its_own_one_at_a_time():
    arena = HostArena(4096)
    large = arena.try_allocate(1 << 20)
    assert large.num_bytes == 1 << 20 and arena.try_allocate(1 << 20) is None
    assert arena.tensor(large, (1 << 18,), torch.float32).sum() == 0
    arena.release(large)
    assert arena.try_allocate(1 << 20) is not None


def test_neighbours_given_back_in_any_order_are_one_piece_again():
    arena = HostArena(5 * 4096)
    slots = [arena.try_allocate(4000) for _ in range(5)]
    for i in (1, 3, 0, 4, 2):
        arena.release(slots[i])
    assert arena.try_allocate(5 * 4096).offset == 0


def test_captures_of_many_times_the_memory_all_arrive(make_engine):
    engine = make_engine(host_memory_bytes=3 * held_bytes(40_000))
    values = [torch.randn(10_000) for _ in range(40)]
    for i, value in enumerate(values):
        engine.submit(value, observation(f"t{i}"), i + 1)
    engine.drain()
    found = tensors_of(engine)
    assert all(torch.equal(found[f"t{i}"]["tensor"], value) for i, value in enumerate(values))


def test_a_graph_is_not_kept_alive_by_what_was_captured_of_it(make_engine):
    class Mark:
        pass

    engine, mark = make_engine(), Mark()
    y = torch.randn(10, requires_grad=True) * 2
    y.grad_fn.metadata["mark"] = mark
    gone = weakref.ref(mark)
    del mark
    assert gone() is not None
    engine.submit(y, observation(), 1)
    del y
    gc.collect()
    assert gone() is None
    engine.drain()


# -- failures ---------------------------------------------------------------------------------


def test_a_capture_that_cannot_be_written_stops_the_training_and_names_the_path(make_engine):
    engine = make_engine()
    engine.saver.paths.run_dir.write_text("a file where the folder should be")
    engine.submit(torch.zeros(3), observation(), 1)
    with pytest.raises(CaptureError, match=str(engine.saver.paths.run_dir)):
        engine.drain()
    with pytest.raises(CaptureError):
        engine.submit(torch.zeros(3), observation(), 2)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_quota_that_is_exceeded_is_named_with_what_is_free(make_engine, monkeypatch, on_error):
    engine = make_engine(on_error=on_error)
    if engine.stager.arena.is_shared:
        pytest.skip("another process would have to exceed it")
    writev, left = os.writev, [2]

    def until_it_is_exceeded(descriptor, parts):
        if not left[0]:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        left[0] -= 1
        return writev(descriptor, parts)

    monkeypatch.setattr(os, "writev", until_it_is_exceeded)
    for number in range(1, 5):
        with suppress(CaptureError):
            engine.submit(torch.zeros(3), observation(f"t{number}"), number)
    run_dir = engine.saver.paths.run_dir
    expected = f"{run_dir}.*{os.strerror(errno.EDQUOT)} .*bytes and .* inodes free in {run_dir}"
    if on_error == "stop":
        with pytest.raises(CaptureError, match=expected):
            engine.drain()
    else:
        engine.drain()
        assert engine.counts.num_missing == 2 and re.search(expected, engine.counts.first_missing)
    assert len(tensors_of(engine)) == len(list(run_dir.glob("*.pt"))) == 2
    assert not [path for path in run_dir.iterdir() if path.is_file() and path.suffix != ".pt"]


def test_or_it_is_counted_and_the_training_goes_on(make_engine):
    engine = make_engine(on_error="continue")
    engine.submit(torch.zeros(3), observation("a"), 1)
    engine.submit(torch.zeros(3), observation("b"), 1)
    engine.drain()
    (engine.saver.paths.run_dir / "moved").mkdir()
    for path in engine.saver.paths.run_dir.glob("*.pt"):
        path.rename(path.parent / "moved" / path.name)
    engine.saver.paths.manifest_path(0).unlink()
    engine.saver.paths.manifest_path(0).mkdir()
    engine.submit(torch.zeros(3), observation("c"), 3)
    engine.drain()
    assert engine.counts.num_missing == 1 and "rank00000.jsonl" in str(engine.counts.first_missing)
    assert not list(engine.saver.paths.run_dir.glob("*.pt"))


def test_what_is_no_fault_of_the_disks_says_what_it_is(make_engine):
    engine = make_engine(on_error="continue")
    engine.submit(torch.zeros(3), observation("a"), "no number")
    with pytest.raises(ValueError if engine.stager.arena.is_shared is False else RuntimeError, match="format code"):
        engine.drain()


def test_threads_work_on_all_jobs():
    done = []
    pool = WriterPool(2, done.append)
    for job in range(10):
        pool.submit(job)
    pool.close()
    assert sorted(done) == list(range(10))


def test_a_writing_process_that_is_killed_is_an_error_that_names_it(make_engine):
    engine = make_engine()
    if not engine.stager.arena.is_shared:
        pytest.skip("threads are not killed one by one")
    process = engine._writers.children[0].process
    process.kill()
    process.wait()
    with pytest.raises(CaptureError, match=f"pid {process.pid}.* has ended by itself, with exit status -9"):
        engine.submit(torch.zeros(3), observation(), 1)
        engine.drain()
    engine.close()


def test_many_threads_are_of_two_processes_that_write_one_manifest(make_engine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    engine = make_engine()
    if not engine.stager.arena.is_shared:
        pytest.skip("threads are of one process")
    assert len(engine._writers.children) == 2
    tensors = {f"t{i}": torch.full((10 + i,), float(i)) for i in range(40)}
    for i, (name, tensor) in enumerate(tensors.items()):
        engine.submit(tensor, observation(name), i + 1)
    engine.drain()
    found = tensors_of(engine)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name]["tensor"], tensors[name]) for name in tensors)
    pids = [child.process.pid for child in engine._writers.children]
    engine.close()
    assert not any(map(psutil.pid_exists, pids))


def test_a_writing_process_ends_when_the_one_it_writes_for_is_killed(tmp_path):
    if not can_share():
        pytest.skip("no memory can be shared here")
    code = (
        "import os, signal, torch\n"
        "from pathlib import Path\n"
        "from qcollect.worker.engine import CaptureEngine, EngineSettings\n"
        "from qcollect.worker.saver import Saver\n"
        f"saver = Saver(Path({str(tmp_path / 'run')!r}), run_id='r')\n"
        "engine = CaptureEngine(saver, EngineSettings(), device=torch.device('cpu'), in_process=False)\n"
        "print(*(child.process.pid for child in engine._writers.children), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    deadline = time.monotonic() + 20
    for pid in map(int, started.stdout.split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_captures_nothing_and_waits_for_nothing(make_engine):
    engine = make_engine()
    engine.submit(torch.zeros(3), observation("parent"), 1)
    child = os.fork()
    if child == 0:
        try:
            engine.submit(torch.zeros(3), observation("child"), 2)
            engine.drain()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == (child, 0)
    engine.drain()
    assert list(tensors_of(engine)) == ["parent"]


def test_threads_and_processes_end_with_the_engine(make_engine):
    before = set(threading.enumerate())
    children = psutil.Process().children()
    engine = make_engine()
    engine.submit(torch.zeros(3), observation(), 1)
    engine.close()
    assert set(threading.enumerate()) <= before and psutil.Process().children() == children


def test_a_closed_engine_has_no_memory_whoever_still_knows_it(make_engine):
    before = set(Memory._local)
    engine = make_engine(host_memory_bytes=64 << 20)
    engine.submit(torch.randn(1 << 20), observation(), 1)
    assert len(set(Memory._local) - before) == 1
    engine.close()
    assert not set(Memory._local) - before


@pytest.mark.parametrize("durability", ["none", "file", "all"])
def test_what_is_synced_is_what_was_asked_for(tmp_path, monkeypatch, durability):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    Saver(tmp_path, run_id="r", durability=durability).save(torch.zeros(3), observation(), 1)
    assert len(synced) == {"none": 0, "file": 2, "all": 3}[durability]  # the file and its folder, the manifest


def test_other_checkpoints_of_the_process_keep_their_checksums(make_engine, tmp_path):
    from torch.serialization import get_crc32_options

    engine = make_engine()
    engine.submit(torch.zeros(3), observation(), 1)
    engine.drain()
    assert get_crc32_options()
    assert RunPaths(engine.saver.paths.run_dir).run_dir.is_dir()
