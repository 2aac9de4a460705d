import json
import os
import signal
from dataclasses import replace

import pytest

from qcollect import sweep
from qcollect.errors import ExitCode, OutputError
from qcollect.launch.claim import ClaimMode
from qcollect.launch.outcome import Outcome
from qcollect.launch.supervisor import Watcher
from qcollect.monitor.run_record import RunState
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause
from qcollect.recipe.records import TriggerSpec
from qcollect.sweep import Action, Member, decide, run_sweep


@pytest.fixture
def plan(make_plan):
    return make_plan()


@pytest.fixture
def leave(plan):
    """What a run of the plan leaves: its plan, its record, its captures."""

    def make(state=RunState.COMPLETED, *, num_files=6, num_lines=6, stored=None):
        paths = RunPaths(plan.run_dir)
        for folder in paths.state_dirs():
            folder.mkdir(parents=True, exist_ok=True)
        paths.plan_path.write_text(json.dumps((stored or plan).to_dict()))
        record = {"run_id": "r", "run_token": "t", "quant_type": "mxfp8", "state": state, "host": "h", "target": 6}
        record |= {"world_size": 2, "recipe_name": "tiny", "launcher": None}
        paths.run_path.write_text(json.dumps(record))
        for i in range(num_files):
            (plan.run_dir / f"{i}.pt").write_bytes(b"x")
        paths.manifest_path(0).write_text("{}\n" * num_lines)
        return paths

    return make


def recipe_with(plan, section, **changes):
    return replace(plan, recipe=replace(plan.recipe, **{section: replace(getattr(plan.recipe, section), **changes)}))


def test_a_folder_without_a_run_is_run(plan):
    assert decide(plan, overwrite=False).action == Action.RUN


def test_a_complete_run_is_skipped_and_redone_on_request(plan, leave):
    leave()
    assert decide(plan, overwrite=False).action == Action.SKIP
    assert decide(plan, overwrite=True).action == Action.REDO


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.INTERRUPTED, RunState.STOPPED])
def test_a_run_that_did_not_complete_is_resumed(plan, leave, state):
    leave(state, num_files=4, num_lines=4)
    assert decide(plan, overwrite=False).action == Action.RESUME
    assert decide(plan, overwrite=True).action == Action.REDO


def test_a_run_whose_manifests_have_everything_is_skipped_however_it_ended(plan, leave):
    leave(RunState.INTERRUPTED)
    assert decide(plan, overwrite=False).action == Action.SKIP


@pytest.mark.parametrize(("num_files", "num_lines"), [(6, 5), (5, 6)])
def test_a_run_that_says_it_is_complete_and_is_not_is_resumed(plan, leave, num_files, num_lines):
    leave(num_files=num_files, num_lines=num_lines)
    assert decide(plan, overwrite=False).action == Action.RESUME


def test_a_file_more_than_the_run_made_does_not_make_it_incomplete(plan, leave):
    leave(num_files=7)
    assert decide(plan, overwrite=False).action == Action.SKIP


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.INTERRUPTED])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: recipe_with(p, "train", seed=1), "train.seed is 1 there and 0 now"),
        (lambda p: recipe_with(p, "capture", layers=(0,)), "capture.layers is [0] there and None now"),
        (
            lambda p: replace(p, recipe=replace(p.recipe, script="other.py")),
            "script is 'other.py' there and {script!r} now",
        ),
        (lambda p: replace(p, script_args=("--fast",)), "script_args is ['--fast'] there and [] now"),
        (lambda p: replace(p, device="cuda"), "device is 'cuda' there and 'cpu' now"),
        (lambda p: replace(p, schedule=replace(p.schedule, captures=p.schedule.captures[:1])), "schedule differs"),
    ],
)
def test_another_run_is_neither_skipped_nor_resumed(plan, leave, state, change, named):
    leave(state, stored=change(plan))
    with pytest.raises(OutputError) as refused:
        decide(plan, overwrite=False)
    assert str(refused.value) == (
        f"{plan.run_dir} holds a run of other settings: {named.format(script=plan.recipe.script)}; "
        "choose another --out, or replace it with --overwrite"
    )
    assert decide(plan, overwrite=True).action == Action.REDO


@pytest.mark.parametrize(
    "change",
    [
        lambda p: recipe_with(p, "launch", grace_s=99.0),
        lambda p: recipe_with(p, "quant", types=("mxfp4",)),
        lambda p: replace(p, recipe=replace(p.recipe, name="copy", path="/elsewhere/copy.yaml")),
        lambda p: replace(p, run_id="another", run_token="another"),
    ],
)
def test_what_changes_no_captured_value_makes_no_other_run(plan, leave, change):
    leave(stored=change(plan))
    assert decide(plan, overwrite=False).action == Action.SKIP


def test_a_run_without_a_plan_is_not_replaced(plan, leave):
    leave().plan_path.write_text("{")
    with pytest.raises(OutputError, match=r"holds a run without a readable plan\.json; choose another --out"):
        decide(plan, overwrite=False)


def test_a_run_without_a_record_is_resumed_if_its_plan_is_this_one(plan, leave):
    leave(num_files=5, num_lines=5).run_path.unlink()
    assert decide(plan, overwrite=False).action == Action.RESUME


# -- the members one after the other ------------------------------------------------------------------


@pytest.fixture
def run_all(monkeypatch, make_plan):
    """A sweep of three members that end as given; which were executed, and the result."""

    def run(*endings):
        executed = []

        def execute(plan, *, mode, watcher):
            executed.append((plan.quant_type, mode))
            ending = endings[len(executed) - 1]
            if isinstance(ending, Exception):
                raise ending
            return ending

        monkeypatch.setattr(sweep, "execute", execute)
        members = [
            Member(plan=replace(make_plan(), quant_type=name), action=action)
            for name, action in (("a", Action.RUN), ("b", Action.SKIP), ("c", Action.REDO), ("d", Action.RESUME))
        ]
        watcher = Watcher(on_tick=lambda snapshot: None)
        result = run_sweep(members, on_start=lambda m: None, watcher=watcher, on_end=lambda m, o: None)
        return executed, result

    return run


DONE = Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason="done")
FAILED = Outcome(state=RunState.FAILED, exit_code=ExitCode.WORKER, reason="failed")


def test_members_run_in_order_each_in_its_way(run_all):
    executed, result = run_all(DONE, DONE, DONE)
    assert executed == [("a", ClaimMode.NEW), ("c", ClaimMode.OVERWRITE), ("d", ClaimMode.RESUME)]
    assert result.exit_code == ExitCode.OK
    assert result.outcomes[1][1].reason == "complete already: 6 captures"


@pytest.mark.parametrize("ending", [FAILED, OutputError("in use")])
def test_a_member_that_fails_is_passed_over(run_all, ending):
    executed, result = run_all(ending, DONE, DONE)
    assert [name for name, _ in executed] == ["a", "c", "d"]
    assert result.exit_code == ExitCode.SWEEP_PARTLY_FAILED
    assert [outcome.state for _, outcome in result.outcomes] == ["failed", "completed", "completed", "completed"]


@pytest.mark.parametrize(
    ("state", "exit_code", "cause"),
    [
        (RunState.INTERRUPTED, ExitCode.INTERRUPTED, StopCause.SIGINT),
        (RunState.INTERRUPTED, ExitCode.TERMINATED, StopCause.SIGTERM),
        (RunState.STOPPED, ExitCode.STOPPED, StopCause.REQUEST),
    ],
)
def test_a_stop_ends_the_sweep_with_its_code(run_all, state, exit_code, cause):
    executed, result = run_all(Outcome(state=state, exit_code=exit_code, reason="stop", cause=cause))
    assert executed == [("a", ClaimMode.NEW)]
    assert result.exit_code == exit_code


@pytest.mark.parametrize("cause", [StopCause.MAX_TIME, StopCause.MAX_BYTES, StopCause.DATA_END])
def test_a_member_that_ends_at_a_limit_of_its_own_does_not_end_the_sweep(run_all, cause):
    short = Outcome(state=RunState.STOPPED, exit_code=ExitCode.STOPPED, reason="stop", cause=cause)
    executed, result = run_all(short, DONE, DONE)
    assert len(executed) == 3
    assert result.exit_code == ExitCode.SWEEP_PARTLY_FAILED


def test_a_signal_between_two_members_does_not_end_a_sweep_that_waits_for_signals(plan, monkeypatch):
    monkeypatch.setattr(sweep, "execute", lambda plan, *, mode, watcher: DONE)
    waiting = recipe_with(plan, "capture", trigger=TriggerSpec(on=("signal",)))
    before = signal.getsignal(signal.SIGUSR1)
    result = run_sweep(
        [Member(plan=waiting, action=Action.RUN)] * 2,
        on_start=lambda m: None,
        watcher=Watcher(on_tick=lambda snapshot: None),
        on_end=lambda m, o: os.kill(os.getpid(), signal.SIGUSR1),
    )
    assert (len(result.outcomes), result.exit_code) == (2, ExitCode.OK)
    assert signal.getsignal(signal.SIGUSR1) == before
