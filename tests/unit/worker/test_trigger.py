"""Captures that wait: from a sequence of losses to the iterations that are captured, and what is kept of it."""

import json
import math
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import qcollect
from qcollect.errors import CaptureError, UsageError
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, read_stop
from qcollect.plan.trigger import TriggerEvent, read_event, record_event, request_capture
from qcollect.recipe.records import CaptureSpec, TriggerSpec
from qcollect.store.manifest import read_manifest
from qcollect.vocab import CaptureName, Trigger
from qcollect.worker.auto import refuse_metrics

CALM = [1.0, 1.0, 1.0]
SPIKE = {"on": "loss_spike", "iteration": 3, "rank": 0, "metric": "loss", "value": 9.0, "reference": 1.0}


def train(out_dir, losses, *, target=10, after_step=lambda iteration: None, **settings):
    """A linear that sees the given losses; gives the collector and the iterations it trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with qcollect.collect(model, "none", out_dir, target, **settings) as run:
        for iteration, loss in enumerate(losses):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            if run.step(loss=loss):
                return run, iteration + 1
            after_step(iteration)
    return run, len(losses)


def iterations_of(run):
    return [record.metadata["iteration"] for record in read_manifest(run.paths.manifest_path(0))]


def spike(**fields):
    return {"on": "loss_spike", "warmup": 3} | fields


def test_captures_begin_in_the_iteration_after_the_spike(tmp_path):
    run, num = train(tmp_path, [*CALM, 9.0, 1.0, 1.0, 1.0], trigger=spike(iterations=2))
    assert (num, run.num_captured) == (6, 10)  # both iterations, and none more
    assert sorted(iterations_of(run)) == [4] * 5 + [5] * 5
    assert read_event(run.paths).to_dict() == SPIKE
    assert {json.dumps(c.metadata["trigger"]) for c in qcollect.open_run(tmp_path)} == {json.dumps(SPIKE)}
    assert {c.load().isfinite().all().item() for c in qcollect.open_run(tmp_path)} == {True}


def test_names_and_counters_are_those_of_a_run_that_did_not_wait(tmp_path):
    train(tmp_path / "at_once", CALM, iterations="0-1")
    run, _ = train(tmp_path / "waited", [*CALM, 9.0, 1.0, 1.0], trigger=spike(iterations=2))
    names = {
        folder: sorted(
            (name.counter, name.iteration - start, name.layer_idx, name.tensor)
            for name in (CaptureName.parse(path.name) for path in (tmp_path / folder).glob("*.pt"))
        )
        for folder, start in (("at_once", 0), ("waited", 4))
    }
    assert names["at_once"] == names["waited"]
    assert run.num_captured == len(names["waited"]) == 10


def test_without_a_trigger_the_metadata_say_null(tmp_path):
    train(tmp_path, CALM)
    assert {c.metadata["trigger"] for c in qcollect.open_run(tmp_path)} == {None}


def test_waiting_makes_no_frame_and_no_file(tmp_path):
    frames = []
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with (
        pytest.warns(UserWarning, match="training ended before it was captured"),
        qcollect.collect(model, "none", tmp_path, 4, trigger="nan") as run,
    ):
        model.register_forward_hook(lambda *_: frames.append(run.frame))
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            assert not run.step(loss=1.0)
            assert json.loads(run.paths.progress_path(0).read_text())["trigger"]["waiting_for"] == ["nan"]
    assert frames == [None] * 4
    assert list(tmp_path.glob("*.pt")) == []
    assert not run.paths.trigger_path.exists()


def test_a_trigger_counts_once(tmp_path):
    run, _ = train(tmp_path, [*CALM, 9.0, 99.0, 1.0, 1.0], trigger=spike(iterations=2))
    assert sorted(set(iterations_of(run))) == [4, 5]


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan)])
def test_nan_begins_captures_and_training_goes_on(tmp_path, loss):
    run, num = train(tmp_path, [1.0, loss, loss, loss, loss], trigger={"on": "nan", "iterations": 2})
    assert (num, sorted(set(iterations_of(run)))) == (4, [2, 3])
    stored = {c.metadata["trigger"]["value"] for c in qcollect.open_run(tmp_path)}
    assert stored == {str(float(loss))}


def test_training_that_ends_before_says_what_came_nearest(tmp_path):
    with pytest.warns(UserWarning) as warned:
        train(tmp_path, [*CALM, 1.9, 1.0], trigger=spike(on=["loss_spike", "nan"]))
    assert [str(w.message) for w in warned] == [
        "qcollect: rank 0: training ended before it was captured: capture.trigger waited for loss_spike, nan, and none "
        "came: the largest loss was 1.9 times its median, in iteration 3 (2 are needed); no loss was NaN or infinite"
    ]


def test_training_that_ends_with_the_trigger_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"before it was captured: triggered by loss_spike at iteration 3 \(rank 0: "):
        train(tmp_path, [*CALM, 9.0], trigger=spike())


def test_training_that_ends_in_the_middle_has_too_few(tmp_path):
    with pytest.warns(UserWarning, match="5 of 10 captures"):
        train(tmp_path, [*CALM, 9.0, 1.0], trigger=spike(iterations=2))


# ---- signals -----------------------------------------------------------------------------------


def send(at):
    return lambda iteration: os.kill(os.getpid(), signal.SIGUSR1) if iteration == at else None


def test_a_signal_to_the_process_begins_captures(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    run, _ = train(tmp_path, [1.0] * 9, after_step=send(2), trigger="signal")
    assert set(iterations_of(run)) == {4}  # seen at the end of iteration 3
    assert read_event(run.paths) == TriggerEvent(on=Trigger.SIGNAL, iteration=3, rank=0)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_second_signal_harms_nothing(tmp_path):
    run, _ = train(
        tmp_path,
        [1.0] * 9,
        after_step=lambda iteration: send(iteration)(iteration),
        trigger={"on": "signal", "iterations": 3},
    )
    assert sorted(set(iterations_of(run))) == [2, 3, 4]


def test_the_handler_is_left_alone_where_no_signal_is_waited_for(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with qcollect.collect(nn.Linear(2, 2), "none", tmp_path, 4, trigger="nan"):
        assert signal.getsignal(signal.SIGUSR1) == before


def test_the_handler_comes_back_after_an_error(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError), qcollect.collect(nn.Linear(2, 2), "none", tmp_path, 4, trigger="signal"):
        assert signal.getsignal(signal.SIGUSR1) != before
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGUSR1) == before


def test_other_threads_cannot_wait_for_signals(tmp_path):
    errors = []

    def enter():
        try:
            qcollect.collect(nn.Linear(2, 2), "none", tmp_path, 4, trigger="signal").__enter__()
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and errors[0].startswith("trigger 'signal' waits for SIGUSR1")


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"trigger": "loss_spik"}, "capture.trigger.on is 'loss_spik'; 'loss_spik' is not one; known: loss_spike, nan"),
        ({"trigger": {"on": "nan", "number": 2}}, "unknown key 'capture.trigger.number'; known: on, iterations"),
        ({"trigger": "nan", "iterations": [0]}, "capture.iterations counts from the start of the training"),
        ({"trigger": "nan", "target": 99}, "target 99 is more than .*--set capture.trigger.iterations=K"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, text):
    target = settings.pop("target", 4)
    with pytest.raises(qcollect.errors.QcollectError, match=text):
        qcollect.collect(nn.Linear(2, 2), "none", tmp_path, target, **settings)


def test_a_script_that_gives_no_metrics_can_wait_for_signals_only(tmp_path):
    refuse_metrics(qcollect.collect(nn.Linear(2, 2), "none", tmp_path / "a", 4, trigger="signal"))
    refuse_metrics(qcollect.collect(nn.Linear(2, 2), "none", tmp_path / "b", 4))
    with pytest.raises(UsageError, match="what only the script can tell"):
        refuse_metrics(qcollect.collect(nn.Linear(2, 2), "none", tmp_path / "c", 4, trigger=["signal", "nan"]))


# ---- under the launcher ------------------------------------------------------------------------


@pytest.fixture
def waiting(recipe):
    """Two iterations after a spike or a signal, of a training of twelve."""
    trigger = TriggerSpec(on=("loss_spike", "signal"), iterations=2, warmup=2)
    return replace(recipe, capture=CaptureSpec(target=60, trigger=trigger), train=replace(recipe.train, iterations=12))


@pytest.fixture
def train_planned(make_llama, tokens):
    def train(losses, *, after_step=lambda iteration: None):
        model = make_llama(num_hidden_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = tokens(2, 6)
        with qcollect.collect(model) as run:
            for iteration, loss in enumerate(losses):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step(loss=loss):
                    break
                after_step(iteration)
        return run

    return train


@pytest.fixture
def paths(plan, waiting):
    paths = RunPaths(plan(waiting).run_dir)
    paths.control_dir.mkdir()
    return paths


LOSSES = [1.0, 1.0, 1.0, 5.0, *[1.0] * 6]


def test_a_planned_run_follows_its_plan_from_the_trigger_on(paths, train_planned):
    run = train_planned(LOSSES)
    assert sorted(set(iterations_of(run))) == [4, 5]
    assert run.num_captured == 60


def test_the_request_of_a_signal_is_found(paths, train_planned):
    run = train_planned([1.0] * 12, after_step=lambda i: request_capture(paths) if i == 5 else None)
    assert sorted(set(iterations_of(run))) == [7, 8]
    assert read_event(paths).on == Trigger.SIGNAL


def test_training_that_ends_before_the_trigger_is_an_end_of_data(paths, train_planned):
    run = train_planned([1.0] * 5)
    assert run.num_captured == 0
    assert read_stop(paths) == StopCause.DATA_END
    report = json.loads(paths.progress_path(0).read_text())["trigger"]
    assert report == {
        "waiting_for": ["loss_spike", "signal"],
        "metrics": ["loss"],
        "nearest": {"loss": {"ratio": 1.0, "iteration": 2}},
    }


@pytest.mark.parametrize("num_kept", [0, 7, 30, 59])
def test_a_run_that_ended_after_its_trigger_goes_on_with_the_same_iterations(paths, train_planned, num_kept):
    """As a signal's, the trigger does not come again."""
    run = train_planned([1.0] * 12, after_step=lambda i: request_capture(paths) if i == 5 else None)
    before = {
        (r.metadata["iteration"], r.file.split("_")[2]): r.xxh3_128 for r in read_manifest(paths.manifest_path(0))
    }
    lines = paths.manifest_path(0).read_bytes().splitlines(keepends=True)
    for record in read_manifest(paths.manifest_path(0))[num_kept:]:
        (paths.run_dir / record.file).unlink()
    paths.manifest_path(0).write_bytes(b"".join(lines[:num_kept]))
    paths.signal_path.unlink()

    run = train_planned([1.0] * 12)
    assert (run.num_captured, run.saver.num_saved) == (60, 60 - num_kept)
    after = {(r.metadata["iteration"], r.file.split("_")[2]) for r in read_manifest(paths.manifest_path(0))}
    assert after == set(before)


def test_a_run_that_ended_before_its_trigger_waits_again(paths, train_planned):
    train_planned([1.0] * 5)
    paths.stop_path.unlink()
    run = train_planned(LOSSES)
    assert sorted(set(iterations_of(run))) == [4, 5]


def test_captures_whose_beginning_is_not_known_are_refused(paths, train_planned):
    train_planned(LOSSES)
    paths.trigger_path.unlink()
    with pytest.raises(
        CaptureError, match=r"holds captures, and .*trigger\.json, which says what they began with, is "
    ):
        train_planned(LOSSES)


def test_max_bytes_holds_for_the_captures_to_come(plan, waiting, train_planned):
    limited = replace(waiting, launch=replace(waiting.launch, max_bytes=1))
    paths = RunPaths(plan(limited).run_dir)
    paths.control_dir.mkdir()
    assert train_planned(LOSSES).iteration == 1
    assert read_stop(paths) == StopCause.MAX_BYTES


def test_without_saving_nothing_is_waited_for(paths, train_planned, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    run = train_planned(LOSSES)
    assert (run.start.iteration, run.start.report(), run.num_captured) == (0, None, 0)


def test_the_recorded_event_is_that_of_the_run(paths, train_planned):
    record_event(paths, TriggerEvent(on=Trigger.SIGNAL, iteration=1, rank=0))
    assert sorted(set(iterations_of(train_planned(LOSSES)))) == [2, 3]
