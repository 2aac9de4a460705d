import json
import math

import pytest

from qcollect.paths import RunPaths
from qcollect.plan.trigger import TriggerEvent, describe_wait, parse_event, read_event, record_event, request_capture
from qcollect.recipe.records import TriggerSpec
from qcollect.vocab import Trigger

SPIKE = TriggerEvent(on=Trigger.LOSS_SPIKE, iteration=120, rank=0, metric="loss", value=9.1, reference=3.2)
NAN = TriggerEvent(on=Trigger.NAN, iteration=7, rank=1, metric="grad_norm", value=math.nan)
SIGNAL = TriggerEvent(on=Trigger.SIGNAL, iteration=3, rank=0)


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


@pytest.mark.parametrize("event", [SPIKE, SIGNAL])
def test_event_is_read_back(paths, event):
    record_event(paths, event)
    assert read_event(paths) == event


def test_nan_is_its_name_in_the_file(paths):
    record_event(paths, NAN)
    assert json.loads(paths.trigger_path.read_text())["value"] == "nan"
    assert math.isnan(read_event(paths).value)


def test_the_first_to_record_an_event_is_believed(paths):
    record_event(paths, SPIKE)
    record_event(paths, SIGNAL)
    assert read_event(paths) == SPIKE
    assert list(paths.state_dir.iterdir()) == [paths.trigger_path]  # no temporary file of the second


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"on": "moon", "iteration": 1, "rank": 0}'])
def test_a_damaged_file_is_none(paths, content):
    paths.state_dir.mkdir(parents=True)
    paths.trigger_path.write_text(content)
    assert read_event(paths) is None


def test_no_event_is_none(paths):
    assert read_event(paths) is None
    assert parse_event(None) is None


def test_a_request_may_be_made_twice(paths):
    paths.control_dir.mkdir(parents=True)
    request_capture(paths)
    request_capture(paths)
    assert paths.signal_path.exists()


def test_captures_begin_after_the_iteration_that_is_told():
    assert SPIKE.start == 121


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (SPIKE, "triggered by loss_spike at iteration 120 (rank 0: loss 9.1, 2.84 times the median 3.2)"),
        (NAN, "triggered by nan at iteration 7 (rank 1: grad_norm nan)"),
        (SIGNAL, "triggered by signal at iteration 3 (rank 0)"),
    ],
)
def test_event_in_words(event, text):
    assert str(event) == text


def test_a_wait_is_told_with_what_came_nearest_on_any_rank():
    spec = TriggerSpec(on=("loss_spike", "nan", "grad_norm_jump", "signal"))
    reports = [
        {"metrics": ["loss"], "nearest": {"loss": {"ratio": 1.2, "iteration": 12}, "grad_norm": None}},
        {"metrics": ["grad_norm"], "nearest": {"loss": {"ratio": 1.3111, "iteration": 40}, "grad_norm": None}},
        {},
    ]
    assert describe_wait(spec, reports) == (
        "capture.trigger waited for loss_spike, nan, grad_norm_jump, signal, and none came: the largest loss was 1.31 "
        "times its median, in iteration 40 (2 are needed); no grad_norm was compared (10 before it are needed); "
        "no loss or grad_norm was NaN or infinite; no signal came"
    )


def test_metrics_that_were_never_given_are_named():
    spec = TriggerSpec(on=("loss_spike", "nan"))
    told = describe_wait(spec, [{"metrics": [], "nearest": {"loss": None}}])
    assert told.endswith("none came: step was given no loss; step was given no loss or grad_norm")
    assert describe_wait(spec, [{"metrics": ["grad_norm"]}]).endswith(
        "none came: step was given no loss; no grad_norm was NaN or infinite"
    )
