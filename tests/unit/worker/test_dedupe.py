"""``capture.dedupe``: what several captures of an iteration have in common is stored once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import qcollect
from qcollect.cli import app
from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.capture import StoredFile, load, load_any_capture
from qcollect.store.compact import is_same
from qcollect.store.examine import examine_run
from qcollect.store.files import read_json
from qcollect.store.manifest import read_manifest
from qcollect.store.verify import Problem, after_repair, judge, repair_run
from qcollect.vocab import RankInfo
from qcollect.worker import saver as saver_module
from qcollect.worker.dedupe import MIN_BYTES, Claim, Payloads
from qcollect.worker.packing import Packing
from qcollect.worker.saver import Observation, Saver

TENSOR = torch.arange(1024.0)


def observation(**fields):
    known = {
        "layer_type": "linear",
        "layer_idx": 3,
        "operation": "forward",
        "phase": "pre",
        "component": "linear",
        "quant_type": "mxfp8",
        "tensor_name": "input",
        "tensor": "input",
        "module": "model.layers.3.mlp.up_proj",
        "rank": RankInfo(rank=0, local_rank=0, world_size=1),
        "iteration": 0,
        "micro_batch": 0,
        "sample_idx": 0,
        "num_samples": 1,
    }
    return Observation(**(known | fields))


@pytest.fixture
def make_saver(tmp_path):
    def make(**settings):
        packing = Packing(**({"dedupe": True} | settings.pop("packing", {})))
        return Saver(tmp_path / "run", run_id="one", packing=packing, **settings)

    return make


@pytest.fixture
def saver(make_saver):
    return make_saver()


def storage(path):
    metadata = load_any_capture(path, follow=False)["metadata"]
    return metadata["storage"], metadata["stored_in"]


# ---- one saver ------------------------------------------------------------------------------------


def test_what_was_stored_before_is_referred_to(saver):
    first, second, other, third = (
        saver.save(tensor, observation(tensor=name, tensor_name=name))
        for name, tensor in (("a", TENSOR), ("b", TENSOR.clone()), ("c", TENSOR + 1), ("d", TENSOR.clone()))
    )
    assert [storage(path) for path in (first, other)] == [("values", None)] * 2
    assert [storage(path) for path in (second, third)] == [("reference", first.name)] * 2
    assert all(is_same(load(path), TENSOR) for path in (first, second, third)) and is_same(load(other), TENSOR + 1)
    assert load_any_capture(second)["metadata"]["tensor_name"] == "b"
    sizes = [path.stat().st_size for path in (first, second, third)]
    assert (saver.num_saved, saver.num_deduped) == (4, 2)
    assert saver.deduped_bytes == 2 * sizes[0] - sizes[1] - sizes[2] > 2 * TENSOR.nbytes - 1000
    records = read_manifest(saver.paths.manifest_path(0))
    assert [(r.metadata["storage"], r.metadata["stored_in"]) for r in records] == [
        ("values", None), ("reference", first.name), ("values", None), ("reference", first.name)
    ]  # fmt: skip
    assert [record.bytes for record in records] == [path.stat().st_size for path in (first, second, other, third)]


def test_nothing_is_referred_to_unless_asked_for(make_saver):
    saver = make_saver(packing={"dedupe": False})
    assert [storage(saver.save(TENSOR, observation())) for _ in range(2)] == [("values", None)] * 2
    assert (saver.num_deduped, saver.deduped_bytes, len(saver._payloads)) == (0, 0, 0)


@pytest.mark.parametrize("fields", [{"iteration": 1}, {"rank": RankInfo(rank=1, local_rank=1, world_size=2)}], ids=str)
def test_other_iterations_and_ranks_have_their_own(saver, fields):
    saver.save(TENSOR, observation())
    assert storage(saver.save(TENSOR, observation(**fields))) == ("values", None)


def test_other_micro_batches_share(saver):
    first = saver.save(TENSOR, observation(tensor_name="weight"))
    second = saver.save(TENSOR, observation(tensor_name="weight", micro_batch=1, sample_idx=1))
    assert storage(second) == ("reference", first.name)


@pytest.mark.parametrize("other", [TENSOR.reshape(32, 32), TENSOR.view(torch.int32)], ids=["shape", "dtype"])
def test_the_same_bytes_of_another_shape_or_dtype_are_stored(saver, other):
    saver.save(TENSOR, observation())
    assert storage(saver.save(other, observation())) == ("values", None)


def test_what_is_hardly_larger_than_a_reference_is_stored(saver):
    small, large = torch.zeros(MIN_BYTES // 4 - 1), torch.zeros(MIN_BYTES // 4)
    assert [storage(saver.save(small, observation()))[0] for _ in range(2)] == ["values"] * 2
    assert [storage(saver.save(large, observation()))[0] for _ in range(2)] == ["values", "reference"]
    assert saver.deduped_bytes > 0
    assert storage(saver.save(torch.zeros(0), observation())) == ("values", None)


def test_files_lie_together_by_iteration(make_saver):
    saver = make_saver(by_iteration=True)
    paths = [saver.save(TENSOR, observation(iteration=i, micro_batch=m)) for i in (0, 1) for m in (0, 1)]
    assert [path.parent.name for path in paths] == ["iter00000"] * 2 + ["iter00001"] * 2
    assert [storage(path)[1] for path in paths] == [None, paths[0].name, None, paths[2].name]
    assert all(is_same(load(path), TENSOR) for path in paths)
    assert judge(examine_run(saver.paths), None) == []


@pytest.mark.parametrize("packing", [{"compress": "zstd"}, {"compress": "zstd", "scales": True}], ids=str)
def test_compressed_files_share(make_saver, packing):
    pytest.importorskip("zstandard")
    saver = make_saver(packing=packing)
    noise = torch.randn(4096)
    first, second = (saver.save(noise, observation()) for _ in range(2))
    assert storage(first)[0] == "zstd" and storage(second) == ("reference", first.name)
    assert is_same(load(second), noise)


def test_tables_of_past_iterations_are_dropped(saver):
    for iteration in range(50):
        for i in range(4):
            saver.save(TENSOR + i, observation(iteration=iteration))
    assert len(saver._payloads) == 8
    # too late for its iteration: stored, and not remembered
    late = [storage(saver.save(TENSOR, observation(iteration=3))) for _ in range(2)]
    assert late == [("values", None)] * 2 and len(saver._payloads) == 8


# ---- several writers ------------------------------------------------------------------------------


def test_writers_at_the_same_time_store_a_payload_once(saver):
    start = threading.Barrier(8)

    def write(i):
        start.wait()
        return [saver.save(TENSOR + k, observation(sample_idx=20 * i + k), 1 + 20 * i + k) for k in range(20)]

    with ThreadPoolExecutor(8) as pool:
        paths = [path for written in pool.map(write, range(8)) for path in written]
    found = [storage(path) for path in paths]
    assert [form for form, _ in found].count("values") == 20 == 160 - saver.num_deduped
    stored = {path.name for path, (form, _) in zip(paths, found, strict=True) if form == "values"}
    assert {target for form, target in found if form == "reference"} == stored
    for i, path in enumerate(paths):
        assert is_same(load(path), TENSOR + i % 20)
    # a line is there before any line that refers to its file
    listed = set()
    for record in read_manifest(saver.paths.manifest_path(0)):
        assert record.metadata["stored_in"] is None or record.metadata["stored_in"] in listed
        listed.add(record.file)
    assert judge(examine_run(saver.paths), None) == []


@pytest.mark.parametrize("fails", ["save_capture", "_list"])
def test_a_reference_waits_for_its_target_and_takes_its_place_if_that_fails(saver, monkeypatch, fails):
    """Whether the file cannot be written, or its line cannot and it is taken back."""
    is_written, may_fail = threading.Event(), threading.Event()
    owner, real = (saver_module, saver_module.save_capture) if fails == "save_capture" else (saver, saver._list)
    calls = []

    def slow(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            return real(*args, **kwargs)
        is_written.set()
        assert may_fail.wait(20)
        if fails == "_list":
            args[0].path.unlink()
        raise CaptureError("no space")

    monkeypatch.setattr(owner, fails, slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(saver.save, TENSOR, observation(tensor="first"), 1)
        assert is_written.wait(20)
        others = [pool.submit(saver.save, TENSOR, observation(tensor=f"other{i}"), 2 + i) for i in range(2)]
        time.sleep(0.2)
        assert not any(other.done() for other in others)
        assert [p for p in saver.paths.run_dir.glob("*.pt") if "first" not in p.name] == []
        may_fail.set()
        with pytest.raises(CaptureError, match="no space"):
            first.result(20)
        paths = [other.result(20) for other in others]
    assert sorted(storage(path)[0] for path in paths) == ["reference", "values"]
    assert all(is_same(load(path), TENSOR) for path in paths)
    assert set(saver.paths.run_dir.glob("*.pt")) == set(paths)
    assert (saver.num_saved, saver.num_deduped) == (2, 1)


def test_a_payload_whose_writer_failed_is_the_next_ones(saver):
    with pytest.raises(CaptureError, match="exists already"):
        for _ in range(2):
            saver.save(TENSOR, observation(tensor="x"), 1)
    saver.save(TENSOR + 1, observation(tensor="y"), 2)
    with pytest.raises(CaptureError, match="exists already"):
        saver.save(TENSOR + 2, observation(tensor="y"), 2)
    path = saver.save(TENSOR + 2, observation(tensor="z"), 3)
    assert storage(path) == ("values", None) and is_same(load(path), TENSOR + 2)


def test_a_claim_that_fails_is_handed_on_to_one(tmp_path):
    payloads = Payloads()
    first = payloads.find_or_claim(0, 0, "x")
    assert isinstance(first, Claim)
    stored = StoredFile(path=tmp_path / "a.pt", num_bytes=1, xxh3_128="0")

    def wait():
        found = payloads.find_or_claim(0, 0, "x")
        if isinstance(found, Claim):
            found.settle(stored)
            return "claim"
        return found

    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(wait) for _ in range(6)]
        time.sleep(0.05)
        first.settle(None)
        found = [w.result(20) for w in waiting]
    assert found.count("claim") == 1 and found.count(stored) == 5


# ---- runs -----------------------------------------------------------------------------------------


def with_capture(recipe, **settings):
    return replace(recipe, capture=replace(recipe.capture, **settings))


def loaded(run_dir):
    return {c.key: c.load() for c in qcollect.open_run(run_dir)}


@pytest.fixture
def train(make_llama, tokens):
    def train(*, seed=0, micro_batches=1):
        model = make_llama(num_hidden_layers=2, seed=seed)
        ids = [tokens(2, 6, seed=i) for i in range(micro_batches)]
        with qcollect.collect(model) as run:
            for _ in range(3):
                for batch in ids:
                    model(input_ids=batch, labels=batch).loss.backward()
                model.zero_grad()
                if run.step():
                    break
        return run

    return train


@pytest.mark.parametrize(
    "settings",
    [{}, {"layout": "by_iteration"}, {"storage": "codes", "scales": True}, {"compress": "zstd"}, {"tokens": "0-2"}],
    ids=str,
)
def test_a_run_with_dedupe_holds_the_same_tensors_in_fewer_bytes(plan, recipe, train, tmp_path, settings):
    if "compress" in settings:
        pytest.importorskip("zstandard")
    recipe = replace(recipe, train=replace(recipe.train, micro_batches=2))
    recipe = with_capture(recipe, values="both", target=356, **settings)
    plain_dir = plan(recipe).run_dir
    train(micro_batches=2)
    plain = loaded(plain_dir)
    plain_dir = plain_dir.rename(tmp_path / "plain")
    planned = plan(with_capture(recipe, dedupe=True))
    run = train(micro_batches=2)
    tensors = loaded(planned.run_dir)
    assert tensors.keys() == plain.keys() and len(tensors) == 356
    assert all(is_same(tensors[key], plain[key]) for key in plain)
    found = qcollect.open_run(planned.run_dir)
    references = found.select(storage="reference")
    assert len(references) == run.saver.num_deduped >= (72 if not settings or "layout" in settings else 36)
    # a weight is the same in every micro-batch
    key = {"tensor_name": "weight", "module": "model.layers.1.mlp.down_proj", "values": "original"}
    weights = found.select(**key)
    assert sorted(w.metadata["storage"] for w in weights) == ["reference", settings.get("compress", "values")]
    before, after = (
        sum(path.stat().st_size for path in folder.rglob("*.pt")) for folder in (plain_dir, planned.run_dir)
    )
    # a reference's own words are the difference
    assert after + run.saver.deduped_bytes == pytest.approx(before, abs=100 * 356)
    assert after < before - run.saver.deduped_bytes * 0.95 and after <= planned.schedule.num_bytes()
    assert judge(examine_run(RunPaths(planned.run_dir)), None) == []
    progress = read_json(RunPaths(planned.run_dir).progress_path(0))
    assert (progress["num_deduped"], progress["deduped_bytes"]) == (len(references), run.saver.deduped_bytes)
    assert progress["bytes"] == after


def test_collect_takes_the_setting(make_llama, tokens, train_llama, tmp_path):
    run = train_llama(make_llama(), tokens(2, 8), "mxfp8", tmp_path / "run", 30, dedupe=True)
    assert run.saver.num_deduped > 0
    assert all(isinstance(capture.load(), torch.Tensor) for capture in qcollect.open_run(tmp_path / "run"))
    with pytest.raises(qcollect.errors.UsageError, match=r"dedupe"):
        train_llama(make_llama(), tokens(2, 8), "mxfp8", tmp_path / "other", 30, dedupe="maybe")


@pytest.fixture
def deduped(plan, recipe, train):
    planned = plan(with_capture(recipe, dedupe=True))
    run = train()
    assert run.saver.num_deduped > 0
    return RunPaths(planned.run_dir)


def a_reference(paths):
    """A file that refers to another, that one, and all that refer to it."""
    references = [r for r in read_manifest(paths.manifest_path(0)) if r.metadata["storage"] == "reference"]
    target = references[0].metadata["stored_in"]
    return (
        paths.run_dir / references[0].file,
        paths.run_dir / target,
        [paths.run_dir / r.file for r in references if r.metadata["stored_in"] == target],
    )


@pytest.mark.parametrize("kept", [10, 50, 75, 99, 100])
def test_a_run_that_was_killed_is_gone_on_with(deduped, train, kept):
    before = loaded(deduped.run_dir)
    records = read_manifest(deduped.manifest_path(0))
    lines = deduped.manifest_path(0).read_bytes().splitlines(keepends=True)
    for record in records[kept:]:
        (deduped.run_dir / record.file).unlink()
    deduped.manifest_path(0).write_bytes(b"".join(lines[:kept]))
    run = train()
    assert (run.num_captured, run.saver.num_saved) == (100, 100 - kept)
    after = loaded(deduped.run_dir)
    assert after.keys() == before.keys() and all(is_same(after[key], before[key]) for key in before)
    assert judge(examine_run(deduped), None) == []
    # what was there counts, too
    records = read_manifest(deduped.manifest_path(0))
    size_of = {r.file: r.bytes for r in records}
    saved = [size_of[r.metadata["stored_in"]] - r.bytes for r in records if r.metadata["stored_in"]]
    progress = read_json(deduped.progress_path(0))
    assert (progress["num_deduped"], progress["deduped_bytes"]) == (len(saved), sum(saved))


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_resumed_run_takes_again_what_a_lost_file_held(deduped, train, is_torn):
    before = loaded(deduped.run_dir)
    _, target, references = a_reference(deduped)
    if is_torn:
        target.write_bytes(b"torn")
    else:
        target.unlink()
    run = train()
    assert (run.num_captured, run.saver.num_saved) == (100, 1 + len(references))
    after = loaded(deduped.run_dir)
    assert after.keys() == before.keys() and all(is_same(after[key], before[key]) for key in before)
    assert judge(examine_run(deduped), None) == []


def test_another_training_is_noticed_by_a_reference(deduped, train):
    """The capture that is compared before a run goes on may be one without a tensor of its own."""
    path, _, _ = a_reference(deduped)
    lines = deduped.manifest_path(0).read_bytes().splitlines(keepends=True)
    last = next(line for line in lines if f'"file": "{path.name}"'.encode() in line)
    others = [line for line in lines if line != last][:-1]
    deduped.manifest_path(0).write_bytes(b"".join([*others, last]))
    (deduped.run_dir / read_manifest(deduped.manifest_path(0))[0].file).stat()
    with pytest.raises(CaptureError, match=r"computed again to resume the run, is not what"):
        train(seed=1)


# ---- verify ---------------------------------------------------------------------------------------


def dangling(paths):
    return [f for f in judge(examine_run(paths), None) if f.problem == Problem.DANGLING]


def store_something_else(path):
    content = load_any_capture(path)
    path.unlink()
    torch.save({**content, "tensor": content["tensor"] + 1}, path)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.unlink(), "is gone"),
        (lambda path: path.write_bytes(b"torn"), "is torn"),
        (store_something_else, "is not the file that was written"),
    ],
    ids=["gone", "torn", "changed"],
)
def test_references_to_a_file_that_is_lost_are_found_and_set_aside(deduped, harm, why):
    _, target, references = a_reference(deduped)
    harm(target)
    found = dangling(deduped)
    assert sorted(f.path for f in found) == sorted(references)
    for finding in found:
        assert str(finding).startswith(f"{finding.path}: refers to {target.name}, which {why}; 'qcollect verify ")
        assert str(finding).endswith(f"moves it to {deduped.torn_dir}; then 'qcollect run --resume' takes it again")
    examined = examine_run(deduped)
    actions = [str(action) for action in repair_run(examined)]
    assert judge(after_repair(examined), None) == judge(examine_run(deduped), None) == []
    for path in references:
        moved = deduped.torn_dir / path.name
        assert f"{path}: moved to {moved}: it refers to {target.name}, which {why}" in actions and moved.exists()
        assert any(action.endswith(f"dropped: {path.name} was moved away") for action in actions)
    listed = {record.file for record in read_manifest(deduped.manifest_path(0))}
    assert len(listed) == 100 - 1 - len(references) and not {path.name for path in references} & listed
    assert repair_run(examine_run(deduped)) == []


def test_what_a_target_stores_is_compared_even_where_no_line_knows_it(deduped):
    _, target, references = a_reference(deduped)
    store_something_else(target)
    lines = deduped.manifest_path(0).read_bytes().splitlines(keepends=True)
    deduped.manifest_path(0).write_bytes(b"".join(x for x in lines if f'"file": "{target.name}"'.encode() not in x))
    found = dangling(deduped)
    assert sorted(f.path for f in found) == sorted(references)
    assert all(f"refers to {target.name}, which stores something else (xxh3-128 " in f.what for f in found)


def test_a_reference_to_a_reference_is_found(deduped):
    path, target, references = a_reference(deduped)
    reference = load_any_capture(path, follow=False)
    target.unlink()
    torch.save(
        {**reference, "metadata": load_any_capture(target.with_name(references[-1].name), follow=False)["metadata"]},
        target,
    )
    deduped.manifest_path(0).unlink()
    whats = [f.what for f in dangling(deduped)]
    assert f"refers to {target.name}, which is a reference itself" in whats


@pytest.mark.parametrize("file", ["x" * 5000, "..", "", "../a.pt", "a\0.pt"], ids=repr)
def test_names_that_no_file_can_have_end_nothing(deduped, train, file):
    path, _, _ = a_reference(deduped)
    content = load_any_capture(path, follow=False)
    for section, name in (("storage", "file"), ("metadata", "stored_in")):
        content[section][name] = file
    path.unlink()
    torch.save(content, path)
    assert {f.path for f in judge(examine_run(deduped), None)} == {path}
    deduped.manifest_path(0).unlink()
    harmed = {f.path: f.problem for f in judge(examine_run(deduped), None)}
    assert harmed[path] in (Problem.DANGLING, Problem.TORN)
    train()
    assert judge(examine_run(deduped), None) == []


def test_references_go_with_a_file_that_is_set_aside_for_another_reason(deduped):
    """A second file of the same capture, listed before it."""
    _, target, references = a_reference(deduped)
    copy = target.with_name(target.name.replace("_0", "_9", 1))
    copy.write_bytes(target.read_bytes())
    lines = deduped.manifest_path(0).read_bytes().splitlines(keepends=True)
    own = next(line for line in lines if f'"file": "{target.name}"'.encode() in line)
    deduped.manifest_path(0).write_bytes(b"".join([own.replace(target.name.encode(), copy.name.encode(), 1), *lines]))
    examined = examine_run(deduped)
    assert [f.problem for f in judge(examined, None)].count(Problem.REPEATED) == 1
    actions = [str(action) for action in repair_run(examined)]
    for path in references:
        moved = deduped.torn_dir / path.name
        assert f"{path}: moved to {moved}: it refers to {target.name}, which is moved away" in actions
    assert judge(after_repair(examined), None) == judge(examine_run(deduped), None)
    assert dangling(deduped) == []


def test_whole_references_are_listed_anew_from_their_files(deduped):
    lines = deduped.manifest_path(0).read_bytes()
    deduped.manifest_path(0).write_bytes(b"")
    run = CliRunner()
    assert run.invoke(app, ["verify", str(deduped.run_dir), "--repair"]).exit_code == 0
    assert sorted(deduped.manifest_path(0).read_bytes().splitlines()) == sorted(lines.splitlines())


def test_commands_know_references(deduped):
    path, target, _ = a_reference(deduped)
    run = CliRunner()
    arguments = ["--where", "storage=reference", "--columns", "storage,stored_in,file"]
    listed = run.invoke(app, ["ls", str(deduped.run_dir), *arguments])
    assert listed.exit_code == 0
    assert ["reference", target.name, path.name] in [line.split() for line in listed.stdout.splitlines()]
    shown = run.invoke(app, ["show", str(path)])
    assert shown.exit_code == 0
    assert f"first values: {' '.join(repr(v) for v in load(path).flatten()[:8].tolist())}" in shown.stdout
    assert f"stored_in: {target.name}" in shown.stdout and "manifest: agrees" in shown.stdout
