"""A run that goes on where another ended: what is there stays, what is missing comes, two trainings never mix."""

import json
from dataclasses import replace

import pytest
import torch

import qcollect
from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, read_stop
from qcollect.store.capture import load_capture
from qcollect.store.manifest import read_manifest
from qcollect.vocab import CaptureKey

NUM_ITERATIONS = 3


@pytest.fixture
def spread(recipe):
    """Two captured iterations, so that the second depends on the first's optimizer step."""
    capture = replace(recipe.capture, target=60, iterations=(0, 2))
    return replace(recipe, capture=capture)


@pytest.fixture
def train(make_llama, tokens):
    """Plain SGD from the same weights on the same tokens, until ``step`` says so."""

    def train(*, seed=0, num_iterations=NUM_ITERATIONS):
        model = make_llama(num_hidden_layers=2, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = tokens(2, 6)
        with qcollect.collect(model) as run:
            for _ in range(num_iterations):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step():
                    break
        return run

    return train


def lines(paths):
    return {CaptureKey.from_metadata(r.metadata): r for r in read_manifest(paths.manifest_path(0))}


def cut(paths, num_kept, *, remove_files=True):
    """Leave the first lines of the manifest, as a killed worker does; gives the files that are gone with the rest."""
    records = read_manifest(paths.manifest_path(0))
    whole = paths.manifest_path(0).read_bytes().splitlines(keepends=True)
    paths.manifest_path(0).write_bytes(b"".join(whole[:num_kept]))
    if remove_files:
        for record in records[num_kept:]:
            (paths.run_dir / record.file).unlink()
    return records[num_kept:]


def tensors(paths):
    return {key: load_capture(paths.run_dir / record.file)["tensor"] for key, record in lines(paths).items()}


@pytest.mark.parametrize("num_kept", [0, 1, 17, 30, 45, 59])
def test_only_what_is_missing_is_saved_and_the_target_is_exact(plan, spread, train, num_kept):
    paths = RunPaths(plan(spread).run_dir)
    train()
    before, times = tensors(paths), {p: p.stat().st_mtime_ns for p in paths.run_dir.glob("*.pt")}
    assert len(before) == 60
    gone = cut(paths, num_kept)

    run = train()
    assert (run.num_captured, run.saver.num_saved) == (60, 60 - num_kept)
    assert len(list(paths.run_dir.glob("*.pt"))) == 60
    for path, changed_at in times.items():
        assert path.name in {record.file for record in gone} or path.stat().st_mtime_ns == changed_at
    after = tensors(paths)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_counters_of_what_is_saved_later_are_those_of_the_schedule(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    numbers = {key: record.file.split("_")[2] for key, record in lines(paths).items()}
    cut(paths, 20)
    train()
    assert {key: record.file.split("_")[2] for key, record in lines(paths).items()} == numbers


def test_a_whole_file_without_its_line_is_listed_not_saved_again(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    cut(paths, 40, remove_files=False)
    run = train()
    assert (run.num_captured, run.saver.num_saved) == (60, 0)
    assert len(lines(paths)) == len(list(paths.run_dir.glob("*.pt"))) == 60


def test_a_line_whose_file_is_gone_is_taken_again(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    (paths.run_dir / read_manifest(paths.manifest_path(0))[3].file).unlink()
    run = train()
    assert run.saver.num_saved == 1
    assert all((paths.run_dir / record.file).is_file() for record in lines(paths).values())
    assert len(lines(paths)) == 60


def test_another_training_is_noticed_before_anything_of_it_is_saved(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    cut(paths, 12)
    files = sorted(paths.run_dir.glob("*.pt"))
    last = read_manifest(paths.manifest_path(0))[-1]
    with pytest.raises(CaptureError) as refused:
        train(seed=1)
    message = str(refused.value)
    named = f"{last.metadata['module']} {last.metadata['tensor_name']}"
    assert message.startswith(f"rank 0, iteration 0: {named}, computed again to resume the run, is not what ")
    assert f"{paths.run_dir / last.file} holds (" in message and "elements differ)" in message
    assert "--overwrite" in message
    assert sorted(paths.run_dir.glob("*.pt")) == files


def test_drift_in_a_later_iteration_is_noticed_there(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    cut(paths, 40)
    last = read_manifest(paths.manifest_path(0))[-1]
    assert last.metadata["iteration"] == 2
    path = paths.run_dir / last.file
    stored, value = path.read_bytes(), load_capture(path)["tensor"]
    assert stored.count(value.numpy().tobytes()) == 1
    path.write_bytes(stored.replace(value.numpy().tobytes(), (value + 1).numpy().tobytes()))
    assert torch.equal(load_capture(path)["tensor"], value + 1)
    with pytest.raises(CaptureError, match="rank 0, iteration 2: "):
        train()


def test_nan_is_equal_to_itself_and_minus_zero_is_not_zero(plan, spread, train):
    from qcollect.store.compact import is_same as _is_same

    assert _is_same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not _is_same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not _is_same(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not _is_same(torch.zeros(2), torch.zeros(1, 2))
    assert _is_same(torch.zeros(0), torch.zeros(0))


def test_more_captures_than_the_share_are_refused(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    train()
    fewer = replace(spread, capture=replace(spread.capture, target=40))
    stored = json.loads(paths.plan_path.read_text())
    paths.state_dir.rename(paths.state_dir.with_name("aside"))
    plan(fewer)
    paths.state_dir.with_name("aside").joinpath("manifest").rename(paths.manifest_dir)
    assert stored["target"] == 60
    with pytest.raises(CaptureError, match=r"lists 60 captures, and the rank's share is 40; see 'qcollect verify"):
        train()


# -- ends before the target ---------------------------------------------------------------------------


def test_training_that_comes_to_its_end_says_so_in_the_stop_file(plan, spread, train):
    paths = RunPaths(plan(spread).run_dir)
    paths.control_dir.mkdir()
    run = train(num_iterations=1)
    assert run.num_captured == 30
    assert read_stop(paths) == StopCause.DATA_END


def test_max_bytes_ends_the_run_before_the_iteration_that_would_exceed_it(plan, spread, train):
    limits = replace(spread, launch=replace(spread.launch, max_bytes=1))
    paths = RunPaths(plan(limits).run_dir)
    paths.control_dir.mkdir()
    run = train()
    assert (run.iteration, run.num_captured) == (1, 30)
    assert read_stop(paths) == StopCause.MAX_BYTES


def test_max_bytes_that_holds_everything_ends_nothing(plan, spread, train):
    limits = replace(spread, launch=replace(spread.launch, max_bytes=1 << 30))
    paths = RunPaths(plan(limits).run_dir)
    assert train().num_captured == 60
    assert read_stop(paths) is None
