"""Run torchrun and end it whatever happens: no process, zombie or folder without an owner is left.

    launcher (this process)  --SIGTERM when it dies-->  agent (torchrun)  --SIGTERM when it dies-->  workers

torchrun gives every worker a session of its own, so no signal to a process group reaches them, and
an agent that is killed leaves them running. Hence: each process ends with its parent, orphans are
adopted by the launcher, and what remains is found by the run's token in its environment.

A stop has four steps: the stop file (workers end together after the iteration, the agent exits
with 0); after the grace time one SIGTERM to the agent; two seconds later, or once the agent is
gone, SIGKILL to all that is left; at last the ended orphans are reaped. The third signal to an
agent would make it leave its workers behind: it never gets more than one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import psutil

from qcollect.errors import ExitCode, WorkerError
from qcollect.host.processes import (
    PARENT_VARIABLE,
    adopting_orphans,
    find_descendants,
    find_run,
    identify,
    kill_all,
    launch_environment,
    reap_adopted,
)
from qcollect.launch.claim import Claim, claim
from qcollect.launch.outcome import Outcome, Stop, StopCause, cause_of, judge
from qcollect.launch.signals import StopSignals
from qcollect.monitor.failures import has_failures, read_failures, read_log_tail
from qcollect.monitor.run_record import RunRecord, RunState, write_run_record
from qcollect.monitor.snapshot import RunSnapshot, read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.store.files import count_lines
from qcollect.store.manifest import list_manifests

OnTick = Callable[[RunSnapshot], None]

POLL_S = 0.1
# after SIGTERM to the agent; torchrun itself passes it on to the workers at once
KILL_AFTER_S = 2.0
# torch tells when ranks ended in whole seconds: sooner, the survivors would seem to have failed first
_MIN_FAILURE_GRACE_S = 1.0
# Reading a snapshot of a large run takes longer than a poll: it gets at most this part of the time.
_SNAPSHOT_TIME_FRAC = 0.05
_AGENT_REAP_S = 5.0


def execute(plan: Plan, *, overwrite: bool, on_tick: OnTick) -> Outcome:
    """Claim the plan's folder, run it to its end, and record how it ended. Call from the main thread.

    Args:
        plan: the launch.
        overwrite: replace a run that is there.
        on_tick: called with the run's state about ten times a second, less often if it is slow to
            read, and once at the end. What it raises ends the run.

    Raises:
        OutputError: the folder cannot be had; nothing was changed.
    """
    with StopSignals() as signals:
        owned = claim(plan, overwrite=overwrite, now=time.time())
        run = _Run(plan, owned, signals, on_tick)
        try:
            outcome = run.supervise()
        except BaseException as error:
            reason = f"the launcher failed: {type(error).__name__}: {error}"
            run.record_end(Outcome(state=RunState.FAILED, exit_code=ExitCode.INTERNAL, reason=reason))
            raise
        outcome = run.record_end(outcome)
        on_tick(read_snapshot(owned.paths, time.time()))
        return outcome


def request_stop(paths: RunPaths) -> None:
    """Ask the run to end after the iteration it is in; its workers and its launcher look for this file.

    Raises:
        FileNotFoundError: there is no run.
    """
    paths.stop_path.touch()


class _Run:
    """One execution of a plan, from the agent's start until the last of its processes is reaped."""

    def __init__(self, plan: Plan, owned: Claim, signals: StopSignals, on_tick: OnTick) -> None:
        self.plan = plan
        self.paths = owned.paths
        self.record: RunRecord = owned.record
        self.signals = signals
        self.on_tick = on_tick
        self.grace_s = plan.recipe.launch.grace_s
        self.agent: subprocess.Popen[bytes] | None = None
        self.stop: Stop | None = None
        self.stop_asked_s: float | None = None  # monotonic, as the two below
        self.failure_seen_s: float | None = None
        self.next_snapshot_s = 0.0
        self.survivors_killed = False

    def supervise(self) -> Outcome:
        started_at, children = time.time(), [child.pid for child in psutil.Process().children()]
        with adopting_orphans():
            try:
                if not self.signals.received:
                    self.agent = self._start_agent()
                self._watch()
            finally:
                self._sweep()
                reap_adopted(since=started_at, known=children)
        return self._judge()

    def record_end(self, outcome: Outcome) -> Outcome:
        """Record how the run ended; an outcome that cannot be recorded says so itself."""
        ended_at, exit_code = time.time(), int(outcome.exit_code)
        try:
            self._record(state=outcome.state, exit_code=exit_code, reason=outcome.reason, ended_at=ended_at)
        except OSError as error:
            return replace(outcome, reason=f"{outcome.reason} (and {self.paths.run_path} cannot be written: {error})")
        return outcome

    # -- start ----------------------------------------------------------------------------------

    def _start_agent(self) -> subprocess.Popen[bytes]:
        environment = launch_environment(
            unset=self.plan.unset,
            env={
                # how long torchrun waits for its workers when it is signalled, also if this launcher is gone by then
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(self.grace_s))),
                **self.plan.env,
                PARENT_VARIABLE: str(os.getpid()),
            },
        )
        with self.paths.agent_log_path.open("ab") as log:
            try:
                # a session of its own: the terminal's Ctrl-C and hangup are the launcher's to pass on
                agent = subprocess.Popen(
                    self.plan.agent_argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise WorkerError(f"{self.plan.agent_argv[0]} cannot be started: {error}") from error
        self._record(state=RunState.RUNNING, agent=identify(agent.pid))
        return agent

    # -- watch ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return once the agent has ended, or must be ended by force."""
        while True:
            now_s = time.monotonic()
            has_ended = self.agent is None or self.agent.poll() is not None
            self._notice_stop(now_s)
            if has_ended or self._must_kill(now_s):
                return
            self._tick()
            time.sleep(POLL_S)

    def _notice_stop(self, now_s: float) -> None:
        if self.stop is None:
            if self.signals.received:
                self._begin_stop(cause_of(self.signals.received[0]), now_s)
            elif self.paths.stop_path.exists():
                self._begin_stop(StopCause.REQUEST, now_s)
        if self.failure_seen_s is None and has_failures(self.paths):
            self.failure_seen_s = now_s

    def _begin_stop(self, cause: StopCause, now_s: float) -> None:
        self.stop, self.stop_asked_s = Stop(cause=cause), now_s
        try:
            if cause != StopCause.REQUEST:
                request_stop(self.paths)
        except OSError as error:  # workers cannot be asked: the next step at once
            self._escalate(f"{self.paths.stop_path} cannot be written: {error.strerror}")
            self._terminate_agent()
            self.stop_asked_s = now_s - self.grace_s
        self._record(state=RunState.STOPPING, reason=f"stopping after this iteration ({cause})")

    def _must_kill(self, now_s: float) -> bool:
        """Take the step of the stop protocol that is due; True if that is the last one."""
        if self.stop is not None and self.stop_asked_s is not None:
            if self.signals.count(signal.SIGINT) > 1:
                self._escalate("Ctrl-C was pressed again")
                return True
            waited_s = now_s - self.stop_asked_s
            if waited_s >= self.grace_s and self.stop.escalated_at is None:
                self._escalate(f"the workers did not end within {self.grace_s:g} s")
                self._terminate_agent()
            if waited_s >= self.grace_s + KILL_AFTER_S:
                return True
        return self.failure_seen_s is not None and self._must_kill_survivors(now_s - self.failure_seen_s)

    def _must_kill_survivors(self, waited_s: float) -> bool:
        """After one rank's failure: the others first, so that the agent can still say how each ended."""
        grace_s = max(self.grace_s, _MIN_FAILURE_GRACE_S)
        if waited_s >= grace_s and not self.survivors_killed and self.agent is not None:
            self.survivors_killed = True
            agent_pid = self.agent.pid
            kill_all(lambda: find_descendants(agent_pid), rounds=1)
        return waited_s >= grace_s + KILL_AFTER_S

    def _escalate(self, reason: str) -> None:
        assert self.stop is not None
        self.stop = replace(self.stop, forced_by=reason, escalated_at=self.stop.escalated_at or time.time())

    def _terminate_agent(self) -> None:
        if self.agent is not None:
            self.agent.terminate()

    def _tick(self) -> None:
        started_s = time.monotonic()
        if started_s < self.next_snapshot_s:
            return
        self.on_tick(read_snapshot(self.paths, time.time()))
        taken_s = time.monotonic() - started_s
        self.next_snapshot_s = started_s + taken_s / _SNAPSHOT_TIME_FRAC

    # -- end ------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Kill whatever of the run is left, the agent first so that it starts nothing more."""
        below: list[psutil.Process] = []
        if self.agent is not None and self.agent.poll() is None:
            below = find_descendants(self.agent.pid)
            self.agent.kill()
        if self.agent is not None:
            with suppress(subprocess.TimeoutExpired):  # in uninterruptible sleep
                self.agent.wait(_AGENT_REAP_S)
        kill_all(lambda: list({*below, *find_run(self.plan.run_token)}))

    def _judge(self) -> Outcome:
        failures = read_failures(self.paths)
        outcome = judge(
            captured=sum(count_lines(path) for path in list_manifests(self.paths)),
            target=self.plan.schedule.target,
            agent_exit_code=None if self.agent is None else self.agent.returncode,
            stop=self.stop,
            failures=failures,
            agent_log_path=self.paths.agent_log_path,
            now=time.time(),
        )
        if not outcome.failures:
            return outcome
        tail = read_log_tail(outcome.failures[0].log_path) or read_log_tail(self.paths.agent_log_path)
        return replace(outcome, log_tail=tail)

    def _record(self, **changes: object) -> None:
        self.next_snapshot_s = 0.0  # told at once, however long the last one took to read
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        write_run_record(self.paths, self.record)
