"""From a metric's history to whether its next value is a trigger; no model, no files."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.recipe.records import TriggerSpec
from qcollect.vocab import Trigger
from qcollect.worker.watch import JumpDetector, Watch, find_reference, is_jump

NAN, INF = math.nan, math.inf
quick = settings(max_examples=100, deadline=None, derandomize=True)
finite = st.floats(min_value=0.01, max_value=1e6)


def watch(*on, signalled=lambda: False, **fields):
    return Watch(TriggerSpec(on=on, **({"warmup": 3} | fields)), rank=5, was_signalled=signalled)


def first_event(watch, losses, name="loss"):
    events = (watch.observe(iteration, {name: loss}) for iteration, loss in enumerate(losses))
    return next((event for event in events if event is not None), None)


@pytest.mark.parametrize(
    ("history", "window", "warmup", "reference"),
    [
        ([], 5, 1, None),
        ([2.0], 5, 2, None),
        ([2.0, 4.0], 5, 2, 3.0),
        ([9.0, 9.0, 1.0, 2.0, 3.0], 3, 3, 2.0),
        ([1.0, 1.0, 100.0], 3, 3, 1.0),  # a mean would be 34
        ([0.0, 0.0], 5, 1, None),
        ([-3.0, -3.0], 5, 1, None),
    ],
)
def test_a_value_is_compared_with_the_median_of_the_last(history, window, warmup, reference):
    assert find_reference(history, window=window, warmup=warmup) == reference


@pytest.mark.parametrize(
    ("value", "reference", "jumps"),
    [(4.0, 2.0, False), (4.01, 2.0, True), (INF, 2.0, True), (NAN, 2.0, False), (4.0, None, False), (INF, None, False)],
)
def test_a_jump_is_above_the_factor_times_the_reference(value, reference, jumps):
    assert is_jump(value, reference, 2.0) is jumps


@quick
@given(st.lists(finite, min_size=1, max_size=30), finite, st.floats(min_value=1.01, max_value=10))
def test_scaling_history_and_value_changes_nothing(history, value, factor):
    scaled = [4.0 * h for h in history]  # a power of two: exact
    before = is_jump(value, find_reference(history, window=8, warmup=1), factor)
    assert is_jump(4.0 * value, find_reference(scaled, window=8, warmup=1), factor) == before


@quick
@given(finite, st.integers(min_value=1, max_value=40))
def test_a_constant_never_jumps(value, num):
    assert first_event(watch(*Trigger), [value] * num) is None


def test_a_detector_forgets_what_is_outside_its_window():
    detector = JumpDetector(TriggerSpec(on=(), window=3, warmup=2), 2.0)
    assert [detector.observe(v, i) for i, v in enumerate([9.0, 9.0, 9.0, 1.0, 1.0, 3.0])] == [None] * 5 + [1.0]


def test_what_is_not_finite_is_no_part_of_the_history():
    detector = JumpDetector(TriggerSpec(on=(), window=3, warmup=3), 2.0)
    values = [1.0, NAN, 1.0, INF, 2.5, 2.5]
    assert [detector.observe(v, i) for i, v in enumerate(values)] == [None] * 5 + [1.0]


def test_a_loss_spike_is_told_with_what_it_was_compared_with():
    event = first_event(watch(Trigger.LOSS_SPIKE), [4.0, 3.0, 2.0, 5.0, 7.5])
    assert event.to_dict() == {
        "on": "loss_spike", "iteration": 4, "rank": 5, "metric": "loss", "value": 7.5, "reference": 3.5,
    }  # fmt: skip


def test_nothing_fires_in_the_warmup():
    assert first_event(watch(Trigger.LOSS_SPIKE, warmup=5), [1.0, 1.0, 1.0, 1.0, 50.0, 1.0]) is None
    assert first_event(watch(Trigger.LOSS_SPIKE, warmup=4), [1.0, 1.0, 1.0, 1.0, 50.0]).iteration == 4


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_what_is_not_finite_fires_at_once_and_goes_into_json(name, value):
    event = first_event(watch(Trigger.NAN), [1.0, value], name)
    assert (event.on, event.iteration, event.metric, event.reference) == (Trigger.NAN, 1, name, None)
    assert json.loads(json.dumps(event.to_dict(), allow_nan=False))["value"] == str(value)


def test_an_infinite_loss_is_a_nan_before_it_is_a_spike():
    losses = [1.0, 1.0, 1.0, INF]
    assert first_event(watch(Trigger.LOSS_SPIKE, Trigger.NAN), losses).on == Trigger.NAN
    assert first_event(watch(Trigger.LOSS_SPIKE), losses).on == Trigger.LOSS_SPIKE


def test_the_gradient_norm_has_a_factor_of_its_own():
    norms = [1.0, 1.0, 1.0, 3.0, 4.5]
    assert first_event(watch(Trigger.GRAD_NORM_JUMP), norms, "grad_norm").iteration == 4
    assert first_event(watch(Trigger.GRAD_NORM_JUMP, grad_norm_factor=2.5), norms, "grad_norm").iteration == 3
    assert first_event(watch(Trigger.GRAD_NORM_JUMP), norms, "loss") is None


def test_what_is_not_watched_does_not_fire():
    assert first_event(watch(Trigger.SIGNAL), [1.0, 1.0, 1.0, NAN, 99.0]) is None
    assert first_event(watch(Trigger.NAN), [1.0, 1.0, 1.0, 99.0]) is None


def test_a_signal_comes_last():
    assert first_event(watch(*Trigger, signalled=lambda: True), [NAN]).on == Trigger.NAN
    event = first_event(watch(*Trigger, signalled=lambda: True), [1.0])
    assert (event.on, event.metric, event.value) == (Trigger.SIGNAL, None, None)


def test_an_iteration_without_metrics_gives_nothing():
    everything = watch(*Trigger)
    assert everything.observe(0, {}) is everything.observe(1, {"loss": None, "num_tokens": NAN}) is None


def test_the_report_names_what_came_nearest():
    watching = watch(Trigger.LOSS_SPIKE, Trigger.NAN)
    assert watching.report() == {"waiting_for": ["loss_spike", "nan"], "metrics": [], "nearest": {"loss": None}}
    assert first_event(watching, [2.0, 2.0, 2.0, 3.0, 2.0, 2.5]) is None
    assert watching.report()["nearest"] == {"loss": {"ratio": 1.5, "iteration": 3}}
    assert watching.report()["metrics"] == ["loss"]


def test_a_ratio_beyond_all_numbers_is_not_reported():
    detector = JumpDetector(TriggerSpec(on=(), warmup=1), 2.0)
    detector.observe(5e-324, 0)
    assert detector.observe(1e308, 1) == 5e-324
    assert detector.nearest is None
