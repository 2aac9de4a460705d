import json
from dataclasses import replace

import pytest

from qcollect import sweep
from qcollect.errors import ExitCode, OutputError
from qcollect.launch.outcome import Outcome
from qcollect.monitor.run_record import RunState
from qcollect.paths import RunPaths
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
def test_a_run_that_did_not_complete_is_redone(plan, leave, state):
    leave(state)
    assert decide(plan, overwrite=False).action == Action.REDO


@pytest.mark.parametrize(("num_files", "num_lines"), [(6, 5), (5, 6)])
def test_a_run_that_says_it_is_complete_and_is_not_is_redone(plan, leave, num_files, num_lines):
    leave(num_files=num_files, num_lines=num_lines)
    assert decide(plan, overwrite=False).action == Action.REDO


def test_a_file_more_than_the_run_made_does_not_make_it_incomplete(plan, leave):
    leave(num_files=7)
    assert decide(plan, overwrite=False).action == Action.SKIP


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.INTERRUPTED])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: recipe_with(p, "train", seed=1), "train.seed"),
        (lambda p: recipe_with(p, "capture", layers=(0,)), "capture.layers"),
        (lambda p: replace(p, recipe=replace(p.recipe, script="other.py")), "script"),
        (lambda p: replace(p, script_args=("--fast",)), "script_args"),
        (lambda p: replace(p, device="cuda"), "device"),
    ],
)
def test_another_run_is_neither_skipped_nor_replaced(plan, leave, state, change, named):
    leave(state, stored=change(plan))
    with pytest.raises(OutputError) as refused:
        decide(plan, overwrite=False)
    assert str(refused.value) == (
        f"{plan.run_dir} holds a run whose {named} differs from this sweep's; choose another --out, "
        "or replace it with --overwrite"
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


def test_a_run_without_a_record_is_redone_if_its_plan_is_this_one(plan, leave):
    leave().run_path.unlink()
    assert decide(plan, overwrite=False).action == Action.REDO


# -- the members one after the other ------------------------------------------------------------------


@pytest.fixture
def run_all(monkeypatch, make_plan):
    """A sweep of three members that end as given; which were executed, and the result."""

    def run(*endings):
        executed = []

        def execute(plan, *, overwrite, on_tick):
            executed.append((plan.quant_type, overwrite))
            ending = endings[len(executed) - 1]
            if isinstance(ending, Exception):
                raise ending
            return ending

        monkeypatch.setattr(sweep, "execute", execute)
        members = [
            Member(plan=replace(make_plan(), quant_type=name), action=action)
            for name, action in (("a", Action.RUN), ("b", Action.SKIP), ("c", Action.REDO))
        ]
        result = run_sweep(members, on_start=lambda m: None, on_tick=lambda s: None, on_end=lambda m, o: None)
        return executed, result

    return run


DONE = Outcome(state=RunState.COMPLETED, exit_code=ExitCode.OK, reason="done")
FAILED = Outcome(state=RunState.FAILED, exit_code=ExitCode.WORKER, reason="failed")


def test_members_run_in_order_and_only_a_redone_one_replaces(run_all):
    executed, result = run_all(DONE, DONE)
    assert executed == [("a", False), ("c", True)]
    assert result.exit_code == ExitCode.OK
    assert result.outcomes[1][1].reason == "complete already: 6 captures"


@pytest.mark.parametrize("ending", [FAILED, OutputError("in use")])
def test_a_member_that_fails_is_passed_over(run_all, ending):
    executed, result = run_all(ending, DONE)
    assert [name for name, _ in executed] == ["a", "c"]
    assert result.exit_code == ExitCode.SWEEP_PARTLY_FAILED
    assert [outcome.state for _, outcome in result.outcomes] == ["failed", "completed", "completed"]


@pytest.mark.parametrize(
    ("state", "exit_code"),
    [
        (RunState.INTERRUPTED, ExitCode.INTERRUPTED),
        (RunState.INTERRUPTED, ExitCode.TERMINATED),
        (RunState.STOPPED, ExitCode.STOPPED),
    ],
)
def test_a_stop_ends_the_sweep_with_its_code(run_all, state, exit_code):
    executed, result = run_all(Outcome(state=state, exit_code=exit_code, reason="stop"))
    assert executed == [("a", False)]
    assert result.exit_code == exit_code
