"""Run torchrun and end it whatever happens: no process, zombie or folder without an owner is left.

    launcher (this process)  --SIGTERM when it dies-->  agent (torchrun)  --SIGTERM when it dies-->  workers

torchrun gives every worker a session of its own, so no signal to a process group reaches them, and
an agent that is killed leaves them running. Hence: each process ends with its parent, orphans are
adopted by the launcher, and what remains is found by the run's token in its environment.

A run also ends by itself: at its target, or when the workers agree on an end (``plan.stop``), or when no
rank moves any more (``stall``); and a guard ends what is left if this process is killed (``guard``).

A stop has four steps: the stop file (workers end together after the iteration, the agent exits
with 0); after the grace time one SIGTERM to the agent; two seconds later, or once the agent is
gone, SIGKILL to all that is left; at last the ended orphans are reaped. The third signal to an
agent would make it leave its workers behind: it never gets more than one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from qcollect.errors import ExitCode, WorkerError
from qcollect.host.capture_signal import CaptureSignal
from qcollect.host.processes import (
    DETACHED_VARIABLE,
    PARENT_VARIABLE,
    adopting_orphans,
    find_descendants,
    find_run,
    identify,
    kill_all,
    launch_environment,
    reap_adopted,
)
from qcollect.launch.claim import Claim, ClaimMode, claim
from qcollect.launch.log_follower import LogFollower
from qcollect.launch.outcome import Outcome, Stop, cause_of, judge
from qcollect.launch.prepared import Guard, PreparedAgent
from qcollect.launch.signals import StopSignals
from qcollect.launch.stall import ProgressWatch, dump_stacks, explain_stall, find_workers
from qcollect.monitor.failures import has_failures, read_early_leavers, read_failures, read_log_tail
from qcollect.monitor.run_record import RunRecord, RunState, write_run_record
from qcollect.monitor.snapshot import RankSnapshot, RunSnapshot, read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.plan.stop import StopCause, read_stop, request_stop
from qcollect.plan.trigger import describe_wait, read_event, request_capture
from qcollect.recipe.selectors import expand_indices
from qcollect.store.files import count_lines
from qcollect.store.manifest import list_manifests
from qcollect.vocab import Trigger

OnTick = Callable[[RunSnapshot], None]
OnLine = Callable[[int, str], None]

POLL_S = 0.1
# after SIGTERM to the agent; torchrun itself passes it on to the workers at once
KILL_AFTER_S = 2.0
# torch tells when ranks ended in whole seconds: sooner, the survivors would seem to have failed first
_MIN_FAILURE_GRACE_S = 1.0
# Reading a snapshot of a large run takes longer than a poll: it gets at most this part of the time.
_SNAPSHOT_TIME_FRAC = 0.05
_AGENT_REAP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told of a run while it goes on. What one of these raises ends the run.

    ``on_claimed`` is called once the folder is ours; ``on_tick`` with the run's state about ten times a
    second, less often if it is slow to read, and once at the end; ``on_line`` with each whole line of
    the ranks that ``launch.show_ranks`` names.
    """

    on_tick: OnTick
    on_line: OnLine = lambda rank, line: None
    on_claimed: Callable[[RunPaths], None] = lambda paths: None


def execute(plan: Plan, *, mode: ClaimMode, watcher: Watcher, agent: PreparedAgent | None = None) -> Outcome:
    """Claim the plan's folder, run it to its end, and record how it ended. Call from the main thread.

    Args:
        plan: the launch.
        mode: what may be in the folder, and what becomes of it.
        watcher: who is told.
        agent: one that was started ahead; None: it is started now.

    Raises:
        OutputError: the folder cannot be had; nothing was changed.
    """
    with StopSignals() as signals, CaptureSignal(enabled=takes_signal(plan)) as capture_signal:
        owned = claim(plan, mode=mode, now=time.time())
        run = _Run(plan, owned, signals, capture_signal, watcher, agent)
        try:
            watcher.on_claimed(owned.paths)
            outcome = run.supervise()
        except BaseException as error:
            reason = f"the launcher failed: {type(error).__name__}: {error}"
            run.record_end(Outcome(state=RunState.FAILED, exit_code=ExitCode.INTERNAL, reason=reason))
            raise
        outcome = run.record_end(outcome)
        watcher.on_tick(read_snapshot(owned.paths, time.time()))
        return outcome


def takes_signal(plan: Plan) -> bool:
    """Whether SIGUSR1 to the launcher asks for captures."""
    return plan.recipe.capture.trigger is not None and Trigger.SIGNAL in plan.recipe.capture.trigger.on


class _Run:
    """One execution of a plan, from the agent's start until the last of its processes is reaped."""

    def __init__(
        self,
        plan: Plan,
        owned: Claim,
        signals: StopSignals,
        capture_signal: CaptureSignal,
        watcher: Watcher,
        prepared: PreparedAgent | None,
    ) -> None:
        self.plan = plan
        self.paths = owned.paths
        self.record: RunRecord = owned.record
        self.signals = signals
        self.capture_signal = capture_signal
        self.watcher = watcher
        self.prepared = prepared
        spec = plan.recipe.launch
        self.grace_s = spec.grace_s
        self.progress = ProgressWatch(spec.stall_timeout_s)
        shown = () if spec.show_ranks is None else expand_indices(spec.show_ranks, plan.world_size)
        self.logs = LogFollower(self.paths, shown)
        self.started_s = time.monotonic()
        self.agent: subprocess.Popen[bytes] | None = None
        self.stop: Stop | None = None
        self.stop_asked_s: float | None = None  # monotonic, as the two below
        self.failure_seen_s: float | None = None
        self.next_snapshot_s = 0.0
        self.survivors_killed = False

    def supervise(self) -> Outcome:
        with adopting_orphans(), Guard(self.plan.run_token, self.grace_s):
            started_at, children = time.time(), [child.pid for child in psutil.Process().children()]
            try:
                if not self.signals.received:
                    self.agent = self._start_agent()
                self._watch()
            finally:
                self._sweep()
                reap_adopted(since=started_at, known=children)
        self._show_lines(self.logs.finish())
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
            unset=(*self.plan.unset, DETACHED_VARIABLE),
            env={
                # how long torchrun waits for its workers when it is signalled, also if this launcher is gone by then
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(self.grace_s))),
                **self.plan.env,
                PARENT_VARIABLE: str(os.getpid()),
            },
        )
        command, log_path = self.plan.agent_argv, self.paths.agent_log_path
        agent = self.prepared.give(command, environment, log_path) if self.prepared is not None else None
        agent = agent or _start_agent(command, environment, log_path)
        self._record(state=RunState.RUNNING, agent=identify(agent.pid))
        return agent

    # -- watch ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return once the agent has ended, or must be ended by force."""
        while True:
            now_s = time.monotonic()
            has_ended = self.agent is None or self.agent.poll() is not None
            self._show_lines(self.logs.read())
            self._notice_stop(now_s)
            self._pass_on_signal()
            if has_ended or self._must_kill(now_s):
                return
            self._tick()
            time.sleep(POLL_S)

    def _notice_stop(self, now_s: float) -> None:
        max_time_s = self.plan.recipe.launch.max_time
        if self.stop is None:
            if self.signals.received:
                self._begin_stop(cause_of(self.signals.received[0]), now_s)
            elif (cause := read_stop(self.paths)) is not None:
                self._begin_stop(cause, now_s)
            elif max_time_s is not None and now_s - self.started_s >= max_time_s:
                self._begin_stop(StopCause.MAX_TIME, now_s)
        if self.failure_seen_s is None and has_failures(self.paths):
            self.failure_seen_s = now_s

    def _pass_on_signal(self) -> None:
        """Ask the ranks for captures; on a full disk again at the next look."""
        if self.capture_signal.was_received:
            with suppress(OSError):
                request_capture(self.paths)
                self.capture_signal.was_received = False

    def _begin_stop(self, cause: StopCause, now_s: float) -> None:
        self.stop, self.stop_asked_s = Stop(cause=cause), now_s
        try:
            request_stop(self.paths, cause)
        except OSError as error:  # workers cannot be asked: the next step at once
            self._escalate(f"{self.paths.stop_path} cannot be written: {error.strerror}")
            self._end_now(now_s)
        if not self._has_begun() and self.stop.escalated_at is None:
            self.stop = replace(self.stop, escalated_at=time.time())
            self._end_now(now_s)
        self._record(state=RunState.STOPPING, reason=f"stopping after this iteration ({cause})")

    def _has_begun(self) -> bool:
        """Whether a rank trains: before that there is no iteration to come to the end of."""
        return any(True for _ in self.paths.progress_dir.glob("rank*.json"))

    def _end_now(self, now_s: float) -> None:
        """As if the grace time were over."""
        self._terminate_agent()
        self.stop_asked_s = now_s - self.grace_s

    def _notice_stall(self, ranks: Sequence[RankSnapshot], now_s: float) -> None:
        """End a run that does not move: its stacks first, then as if the grace time were over."""
        if self.stop is not None or self.agent is None or not self.progress.has_stalled(ranks, now_s):
            return
        workers = find_workers(self.agent.pid)
        place = explain_stall(ranks, dump_stacks(self.paths, workers)) if workers else "no worker has started"
        detail = f"no rank moved for {self.progress.timeout_s:g} s; {place}; stacks: {self.paths.logs_dir}/rank*.stacks"
        self.stop = Stop(cause=StopCause.STALL, detail=detail, escalated_at=time.time())
        self._end_now(now_s)
        self._record(state=RunState.STOPPING, reason=detail)

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
        snapshot = read_snapshot(self.paths, time.time())
        if snapshot.trigger is not None and self.record.trigger is None:
            self._record(trigger=snapshot.trigger)
        self.watcher.on_tick(snapshot)
        self._notice_stall(snapshot.ranks, started_s)
        # killed, it told nobody; torchrun gives the others half a minute before it does
        if self.failure_seen_s is None and any(rank.state == "gone" for rank in snapshot.ranks):
            self.failure_seen_s = started_s
        taken_s = time.monotonic() - started_s
        self.next_snapshot_s = started_s + taken_s / _SNAPSHOT_TIME_FRAC

    def _show_lines(self, lines: Iterable[tuple[int, str]]) -> None:
        for rank, line in lines:
            self.watcher.on_line(rank, line)

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
        if self.stop is None and (cause := read_stop(self.paths)) is not None:
            self.stop = Stop(cause=cause)
        if self.stop is not None and self.stop.cause == StopCause.DATA_END and self.stop.forced_by:
            failures = failures or tuple(read_early_leavers(self.paths))
        outcome = judge(
            captured=sum(count_lines(path) for path in list_manifests(self.paths)),
            target=self.plan.schedule.target,
            agent_exit_code=None if self.agent is None else self.agent.returncode,
            stop=self.stop,
            failures=failures,
            agent_log_path=self.paths.agent_log_path,
            now=time.time(),
            trigger=self._describe_trigger(),
        )
        if self.signals.received:
            outcome = replace(outcome, signalled=cause_of(self.signals.received[0]))
        if not outcome.failures:
            return outcome
        tail = read_log_tail(outcome.failures[0].log_path) or read_log_tail(self.paths.agent_log_path)
        return replace(outcome, log_tail=tail)

    def _describe_trigger(self) -> str | None:
        spec, event = self.plan.recipe.capture.trigger, read_event(self.paths)
        if spec is None:
            return None
        if event is not None:
            self.record = replace(self.record, trigger=event)  # written with how the run ended
            return str(event)
        ranks = read_snapshot(self.paths, time.time()).ranks
        return describe_wait(spec, [rank.trigger for rank in ranks if rank.trigger])

    def _record(self, **changes: object) -> None:
        self.next_snapshot_s = 0.0  # told at once, however long the last one took to read
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        write_run_record(self.paths, self.record)


def _start_agent(command: Sequence[str], env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        try:
            # a session of its own: the terminal's Ctrl-C and hangup are the launcher's to pass on
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"{command[0]} cannot be started: {error}") from error
