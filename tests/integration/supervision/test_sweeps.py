"""Ctrl-C in a sweep: it ends with the run that is on, whatever that run is said to have ended by."""

import pytest
from fakes import WhenTraining, interrupt_self

from qcollect.launch.supervisor import Watcher
from qcollect.monitor.run_record import RunState
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, request_stop
from qcollect.sweep import Action, Member, run_sweep


@pytest.fixture
def sweep(make_plan):
    def sweep(behaviour, act, when_stopping=None, **settings):
        members = [
            Member(plan=make_plan(behaviour, name=name, folder=name, **settings), action=Action.RUN)
            for name in ("first", "second")
        ]
        started, told = [], []
        first = WhenTraining(lambda snapshot: act(RunPaths(snapshot.run_dir)))

        def on_tick(snapshot):
            first(snapshot)
            if when_stopping is not None and not told and snapshot.state == RunState.STOPPING:
                told.append(snapshot)
                when_stopping()

        result = run_sweep(
            members,
            on_start=lambda member: started.append(member.plan.run_dir.name),
            watcher=Watcher(on_tick=on_tick),
            on_end=lambda member, outcome: None,
        )
        return started, result

    return sweep


def test_interrupted_member_is_the_last(sweep):
    started, result = sweep("endless", lambda paths: interrupt_self())
    assert (started, result.exit_code) == (["first"], 130)


def test_member_that_reaches_its_target_while_it_is_interrupted_is_the_last(sweep):
    started, result = sweep("normal+deaf", lambda paths: interrupt_self(), share=30, grace_s=60.0)
    assert result.outcomes[0][1].state == RunState.COMPLETED
    assert (started, result.exit_code) == (["first"], 130)


def test_member_that_is_interrupted_while_it_stops_for_another_reason_is_the_last(sweep):
    started, result = sweep(
        "endless+deaf",
        lambda paths: request_stop(paths, StopCause.MAX_BYTES),
        when_stopping=interrupt_self,
        grace_s=1.5,
    )
    assert result.outcomes[0][1].cause == StopCause.MAX_BYTES
    assert (started, result.exit_code) == (["first"], 130)


def test_member_that_ends_at_its_own_limit_is_followed_by_the_next(sweep):
    started, result = sweep("endless", lambda paths: request_stop(paths, StopCause.MAX_BYTES), max_time=3.0)
    assert (started, result.exit_code) == (["first", "second"], 6)
