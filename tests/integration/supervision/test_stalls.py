"""A run that no longer moves: every rank's stacks, the rank that differs, exit 5, nothing left."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
from fakes import WhenTraining, assert_nothing_left, interrupt_self, run, until

from qcollect.errors import ExitCode
from qcollect.launch import stall
from qcollect.launch.stall import dump_stacks, find_workers
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.paths import RunPaths
from qcollect.store.manifest import list_manifests, read_manifest

STALL_S = 1.0


@pytest.fixture
def stalled(make_plan):
    def start(behaviour, **launch):
        plan = make_plan(behaviour, share=20, **{"stall_timeout_s": STALL_S, **launch})
        return plan, RunPaths(plan.run_dir), run(plan)

    return start


@pytest.mark.parametrize("obstinacy", ["", "+stubborn+deaf+grandchild"])
def test_run_in_which_no_rank_moves_is_ended_with_the_stacks_of_every_rank(stalled, obstinacy):
    plan, paths, outcome = stalled("registered+stuck" + obstinacy)
    assert (outcome.state, outcome.exit_code) == (RunState.STALLED, ExitCode.STALLED)
    assert outcome.reason.startswith("stalled with 6 of 40 captures: no rank moved for 1 s; ranks 0, 1 at ")
    assert outcome.reason.endswith(f"; stacks: {paths.logs_dir}/rank*.stacks")
    assert "differ" not in outcome.reason
    record = read_run_record(paths)
    assert (record.state, record.exit_code, record.reason) == (RunState.STALLED, 5, outcome.reason)
    for rank in range(2):
        stacks = paths.stacks_path(rank).read_text()
        assert stacks.startswith(f"rank {rank}, pid ")
        assert "in wait_for_the_others\n" in stacks
    assert_nothing_left(plan)


def test_rank_that_is_an_iteration_behind_is_named_with_where_it_is(stalled):
    plan, paths, outcome = stalled("registered+behind")
    assert outcome.exit_code == ExitCode.STALLED
    assert "; rank 1 differs from the others; rank 1 at " in outcome.reason
    assert "in load_a_batch\n" in paths.stacks_path(1).read_text()
    assert_nothing_left(plan)


def test_captures_taken_before_a_stall_stay_listed_and_whole(stalled):
    _, paths, outcome = stalled("registered+stuck")
    listed = [record for manifest in list_manifests(paths) for record in read_manifest(manifest)]
    assert len(listed) == 6 and "6 of 40 captures" in outcome.reason
    assert {(paths.run_dir / record.file).read_bytes() for record in listed} == {b"tensor"}
    assert len(list(paths.run_dir.glob("*.pt"))) == 6
    assert list(paths.run_dir.rglob("*.tmp")) == []


def test_worker_that_does_not_write_stacks_is_not_killed_by_being_asked(make_plan):
    plan = make_plan("endless")
    paths = RunPaths(plan.run_dir)
    alive = []

    def ask(snapshot):
        workers = find_workers(read_run_record(paths).agent.pid)
        assert sorted(workers) == [0, 1]
        assert dump_stacks(paths, workers) == {}
        alive.extend(process.is_running() for process in workers.values())
        interrupt_self()

    outcome = run(plan, WhenTraining(ask))
    assert alive == [True, True]
    assert outcome.reason == "interrupted (SIGINT) with 2 of 6 captures"  # both ended by themselves


def test_stall_of_workers_without_stacks_is_still_told(stalled):
    plan, _, outcome = stalled("stuck")
    assert outcome.exit_code == ExitCode.STALLED
    assert "no rank moved for 1 s; ranks 0, 1 gave no stack; " in outcome.reason
    assert_nothing_left(plan)


def test_worker_that_is_stopped_gives_no_stack_and_is_named(make_plan, monkeypatch):
    monkeypatch.setattr(stall, "_DUMP_WAIT_S", 0.5)
    plan = make_plan("registered+stuck", share=20, stall_timeout_s=STALL_S)

    def freeze(snapshot):
        # the other rank may be there first
        if snapshot.iteration == 2 and snapshot.ranks[1].pid is not None and not frozen:
            frozen.append(snapshot.ranks[1].pid)
            os.kill(snapshot.ranks[1].pid, signal.SIGSTOP)

    frozen: list[int] = []
    outcome = run(plan, freeze)
    assert len(frozen) == 1
    assert outcome.exit_code == ExitCode.STALLED
    assert "rank 1 gave no stack" in outcome.reason
    assert_nothing_left(plan)


def test_stall_before_a_worker_has_started_is_told(make_plan, monkeypatch):
    monkeypatch.setattr("qcollect.launch.stall._LOADING_TIMEOUT_S", STALL_S)
    plan = make_plan("normal", stall_timeout_s=STALL_S)
    plan = replace(plan, agent_argv=("sleep", "300"))
    outcome = run(plan)
    assert outcome.exit_code == ExitCode.STALLED
    assert "no rank moved for 1 s; no worker has started; " in outcome.reason
    assert_nothing_left(plan)


def test_ranks_that_load_for_longer_than_the_timeout_are_not_a_stall(make_plan):
    plan = replace(make_plan("normal", stall_timeout_s=0.2, max_time=2.0), agent_argv=("sleep", "300"))
    assert run(plan).reason.startswith("launch.max_time is over: stopped with 0 of 6 captures")


def test_run_that_moves_slowly_is_not_a_stall(stalled):
    _, _, outcome = stalled("registered+slow", max_time=3.0)
    assert outcome.reason.startswith("launch.max_time is over: stopped with ")


def test_run_that_does_not_move_while_it_is_stopping_is_not_a_stall(make_plan):
    plan = make_plan("registered+stuck", share=20, stall_timeout_s=STALL_S, grace_s=2.5)

    def interrupt_when_stuck(snapshot):
        if snapshot.captured == 6 and not interrupted:
            interrupted.append(time.monotonic())
            interrupt_self()

    interrupted: list[float] = []
    outcome = run(plan, interrupt_when_stuck)
    assert time.monotonic() - interrupted[0] > 2.0  # longer than the stall timeout
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert outcome.reason.endswith("by force: the workers did not end within 2.5 s")
    assert "wait_for_the_others" not in RunPaths(plan.run_dir).stacks_path(0).read_text()


def test_without_a_timeout_nothing_is_a_stall(make_plan):
    plan = make_plan("registered+stuck", share=20, stall_timeout_s=None, max_time=2.0)
    assert run(plan).reason.startswith("launch.max_time is over")


def test_workers_are_found_by_rank_and_their_children_are_not_workers(make_plan):
    plan = make_plan("endless+grandchild")
    paths = RunPaths(plan.run_dir)
    found = []

    def look(snapshot):
        workers = find_workers(read_run_record(paths).agent.pid)
        found.append({rank: process.pid for rank, process in workers.items()})
        assert found[0] == {rank.rank: rank.pid for rank in snapshot.ranks}
        until(lambda: all(psutil.Process(pid).children() for pid in found[0].values()), "each has a child")
        interrupt_self()

    run(plan, WhenTraining(look))
    assert len(found) == 1
    assert find_workers(found[0][0]) == {}  # gone
