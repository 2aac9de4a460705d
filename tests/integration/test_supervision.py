"""Runs end cleanly whatever ends them: no process, no zombie, the right code and reason.

A stand-in for torchrun and its workers, without torch, starts in a tenth of a second. It behaves as
torchrun does where it matters: workers in sessions of their own, SIGTERM passed on once, the
survivors of a failed rank signalled and given 30 s, ``errors/agent.json`` at the end.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import qcollect.paths
from qcollect.errors import ExitCode, OutputError
from qcollect.host.processes import find_by_token, kill_all, process_is
from qcollect.launch.supervisor import execute, request_stop
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.monitor.snapshot import read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut, PlannedCapture, Schedule
from qcollect.recipe.records import recipe_from_dict
from qcollect.store.files import write_json_atomic
from qcollect.vocab import LayerType, Operation, Values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="supervision is complete on Linux only"),
]
REPOSITORY = Path(qcollect.paths.__file__).parents[1]
DEADLINE_S = 60.0
GRACE_S = 0.5

FAKE_AGENT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from qcollect.host.processes import die_with_parent
from qcollect.paths import RunPaths
from qcollect.store.files import write_json_atomic

die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
os.environ["QCOLLECT_PARENT"] = str(os.getpid())
paths = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1])
timeout_s = int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])

class Signalled(Exception): ...
def note(signum, frame): raise Signalled
signal.signal(signal.SIGTERM, note)

workers = []
def close(timeout_s):
    for worker in workers:
        if worker.poll() is None: os.killpg(worker.pid, signal.SIGTERM)
    end = time.monotonic() + timeout_s
    while any(w.poll() is None for w in workers) and time.monotonic() < end: time.sleep(0.02)
    for worker in workers:
        if worker.poll() is None: os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

try:
    for rank in range(int(os.environ["FAKE_WORLD_SIZE"])):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        workers.append(subprocess.Popen([sys.executable, sys.argv[1]], env=env, start_new_session=True))
    while any(w.poll() is None for w in workers) and not any(w.poll() for w in workers): time.sleep(0.02)
    failures, seen = [], set()
    def look():
        for rank, worker in enumerate(workers):
            if worker.poll() and rank not in seen:
                seen.add(rank)
                code = worker.returncode
                failures.append({"rank": rank, "local_rank": rank, "pid": worker.pid, "exitcode": code,
                                 "signal": -code if code < 0 else None, "time": int(time.time())})
    look()
    if failures:
        close(30)
        look()
        write_json_atomic(paths.agent_error_path, {"failures": failures})
        sys.exit(1)
except Signalled:
    close(timeout_s)
    write_json_atomic(paths.agent_error_path, {"failures": [], "signal": 15, "time": time.time()})
    sys.exit(1)
"""

FAKE_WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from qcollect.host.processes import die_with_parent, identify
from qcollect.paths import RunPaths
from qcollect.store.files import append_line, write_json_atomic

die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
paths = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1])
rank, behaviour = int(os.environ["RANK"]), os.environ["FAKE_BEHAVIOUR"].split("+")
share = json.loads(paths.plan_path.read_text())["shares"][rank]
log = os.open(paths.log_path(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.dup2(log, 1); os.dup2(log, 2)
print(f"rank {rank} starts", flush=True)

if "stubborn" in behaviour: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "grandchild" in behaviour: subprocess.Popen(["sleep", "300"], start_new_session=True)
if "nameless" in behaviour:  # a program that clears its environment
    nameless = subprocess.Popen(["sleep", "300"], env={}, start_new_session=True)
    (paths.logs_dir / f"nameless{rank}").write_text(str(nameless.pid))

def progress(state, iteration):
    who = identify(os.getpid())
    write_json_atomic(paths.progress_path(rank), {
        "rank": rank, "local_rank": rank, **who.to_dict(), "state": state, "iteration": iteration,
        "captured": 0, "share": share, "bytes": 0, "loss": 1.0, "device": "cpu", "updated_at": time.time()})

def capture(i):
    name = f"20241201_143022_{i + 1:04d}_iter000_attention_L0_forward_pre_FA_mxfp8_rank{rank}_sample0_query.pt"
    (paths.run_dir / name).write_bytes(b"tensor")
    fields = {"file": name, "bytes": 6, "xxh3_128": "0", "metadata": {}, "tensor_info": {}}
    append_line(paths.manifest_path(rank), fields)

capture(0)
progress("training", 0)
if "raise" in behaviour and rank == 1:
    while not (paths.progress_path(0)).exists(): time.sleep(0.01)
    print("Traceback (most recent call last): ...", flush=True)
    write_json_atomic(paths.error_path(rank), {"rank": rank, "local_rank": rank, "type": "ValueError",
        "message": "bad tokenizer path", "traceback": "...", "time": time.time()})
    sys.exit(1)
if "die" in behaviour and rank == 1:
    sys.stdout.write("one\\ntwo\\nthree\\nno end"); sys.stdout.flush()
    os.kill(os.getpid(), 9)
i = 1
while True:
    if "endless" not in behaviour and i == share - ("short" in behaviour): break
    if "endless" not in behaviour:
        capture(i)
    if paths.stop_path.exists() and "deaf" not in behaviour: break
    progress("training", i)
    i += 1
    time.sleep(0.02)
progress("done", i)
"""


@pytest.fixture
def make_plan(tmp_path, request):
    """A plan whose torchrun and workers are the stand-ins; what it leaves running is killed at the end."""
    tokens = []

    def make(behaviour: str, *, share: int = 3, name: str = "run") -> Plan:
        token = f"test-{os.getpid()}-{request.node.name}-{name}"
        tokens.append(token)
        agent, worker = tmp_path / "fake_agent.py", tmp_path / "fake_worker.py"
        agent.write_text(FAKE_AGENT)
        worker.write_text(FAKE_WORKER)
        return build_plan(
            tmp_path / "out" / "mxfp8",
            token=token,
            share=share,
            agent_argv=(sys.executable, str(agent), str(worker)),
            env={"FAKE_BEHAVIOUR": behaviour, "FAKE_WORLD_SIZE": "2"},
        )

    yield make
    for token in tokens:
        kill_all(lambda token=token: find_by_token(token))


def build_plan(run_dir: Path, *, token: str, share: int, agent_argv: tuple[str, ...], env: dict[str, str]) -> Plan:
    recipe = recipe_from_dict(
        {
            "name": "fake",
            "path": "fake.yaml",
            "script": "train.py",
            "model": {},
            "data": {"path": ["text"], "sequence_length": 8},
            "train": {},
            "quant": {},
            "capture": {"target": 2 * share},
            "launch": {"grace_s": GRACE_S},
        }
    )
    capture = PlannedCapture(
        module="layers.0.self_attn",
        layer_type=LayerType.ATTENTION,
        layer_idx=0,
        operation=Operation.FORWARD,
        phase="pre",
        tensor_name="query",
        gemm=None,
        values=Values.ORIGINAL,
        num_bytes=8,
    )
    cut = Cut(iteration=0, micro_batch=0, count=share, start=0)
    return Plan(
        run_id="run-fake",
        run_token=token,
        run_dir=run_dir,
        quant_type="mxfp8",
        recipe=recipe,
        world_size=2,
        device="cpu",
        torchrun_argv=("torchrun",),
        agent_argv=agent_argv,
        env={
            "QCOLLECT_PLAN": str(RunPaths(run_dir).plan_path),
            "QCOLLECT_RUN_TOKEN": token,
            "PYTHONPATH": str(REPOSITORY),
            **env,
        },
        unset=("RANK", "LOCAL_RANK"),
        script_args=(),
        schedule=Schedule(captures=(capture,) * share, cuts=((cut,), (cut,))),
        excluded=(),
    )


class WhenTraining:
    """An ``on_tick`` that acts once, when both ranks train, and gives up after a deadline."""

    def __init__(self, act):
        self.act, self.deadline, self.snapshots, self.acted_at = act, time.monotonic() + DEADLINE_S, [], None

    def __call__(self, snapshot):
        self.snapshots.append(snapshot)
        assert time.monotonic() < self.deadline
        if self.acted_at is None and [r.state for r in snapshot.ranks] == ["training"] * 2:
            self.acted_at = time.monotonic()
            self.act(snapshot)

    @property
    def seconds_since(self):
        return time.monotonic() - self.acted_at


def until(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return result


def agent_pid(paths):
    return read_run_record(paths).agent.pid


def assert_nothing_left(plan):
    assert find_by_token(plan.run_token) == []
    assert [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE] == []


def ignore(snapshot):
    pass


def interrupt_self(snapshot=None):
    os.kill(os.getpid(), signal.SIGINT)


# ---------------------------------------------------------------------------------------------
# Ends by itself
# ---------------------------------------------------------------------------------------------


def test_run_that_reaches_its_target_is_completed(make_plan):
    plan, snapshots = make_plan("normal", share=20), []
    outcome = execute(plan, overwrite=False, on_tick=snapshots.append)
    assert (outcome.state, outcome.exit_code) == (RunState.COMPLETED, ExitCode.OK)
    assert outcome.reason == "all 40 captures were taken"
    assert_nothing_left(plan)

    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code, record.reason) == (RunState.COMPLETED, 0, outcome.reason)
    assert record.ended_at >= record.started_at
    assert record.agent.pid != record.launcher.pid == os.getpid()
    counts = [s.captured for s in snapshots]
    assert counts == sorted(counts) and counts[-1] == 40
    assert snapshots[-1].state == RunState.COMPLETED
    assert [snapshots[0].phase, snapshots[-1].phase] == ["starting", "completed"]


def test_run_that_ends_short_of_its_target_has_failed(make_plan):
    plan = make_plan("short")
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    logs = RunPaths(plan.run_dir).logs_dir
    assert outcome.reason == f"the run ended with 4 of 6 captures; the workers' logs: {logs}"
    assert_nothing_left(plan)


def test_grandchildren_do_not_outlive_a_run_that_ends_well(make_plan):
    plan = make_plan("grandchild")
    assert execute(plan, overwrite=False, on_tick=ignore).exit_code == ExitCode.OK
    assert_nothing_left(plan)


def test_handlers_and_other_children_are_left_alone(make_plan):
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    ended = subprocess.Popen(["false"], start_new_session=True)
    try:
        execute(make_plan("normal"), overwrite=False, on_tick=ignore)
        assert {s: signal.getsignal(s) for s in before} == before
        assert other.poll() is None
        assert ended.wait() == 1  # its exit code was not taken from us
    finally:
        other.kill()
        other.wait()


# ---------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------


def test_rank_that_raises_is_the_headline(make_plan):
    plan = make_plan("raise+endless")
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    log = RunPaths(plan.run_dir).log_path(1)
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    assert outcome.reason == f"rank 1 failed: ValueError: bad tokenizer path; its log: {log}"
    assert outcome.log_tail == ("rank 1 starts", "Traceback (most recent call last): ...")
    assert [(f.rank, f.was_ended) for f in outcome.failures] == [(1, False), (0, True)]
    assert_nothing_left(plan)


def test_rank_killed_by_signal_9_is_explained_and_its_last_words_are_kept(make_plan):
    plan = make_plan("die+endless")
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    log = RunPaths(plan.run_dir).log_path(1)
    assert outcome.exit_code == ExitCode.WORKER
    assert outcome.reason == f"rank 1 was killed (signal 9), often out of memory; its log: {log}"
    assert outcome.log_tail == ("rank 1 starts", "one", "two", "three", "no end")
    assert_nothing_left(plan)


def test_survivors_that_ignore_sigterm_get_the_grace_time_not_torchruns_half_minute(make_plan):
    plan = make_plan("raise+endless+stubborn+deaf+grandchild")
    started_s = time.monotonic()
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    assert time.monotonic() - started_s < 25
    assert outcome.reason.startswith("rank 1 failed: ValueError: bad tokenizer path; its log: ")
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, 1), (0, -9)]
    assert_nothing_left(plan)


def test_agent_killed_while_workers_ignore_sigterm(make_plan):
    plan = make_plan("endless+stubborn+deaf+grandchild")
    paths = RunPaths(plan.run_dir)
    kill = WhenTraining(lambda snapshot: os.kill(agent_pid(paths), signal.SIGKILL))
    outcome = execute(plan, overwrite=False, on_tick=kill)
    assert kill.seconds_since < 10
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, ExitCode.WORKER)
    assert outcome.reason == (
        f"torchrun's agent was killed (signal 9), often out of memory; its log: {paths.agent_log_path}"
    )
    assert_nothing_left(plan)


def test_children_without_the_token_end_with_their_workers(make_plan):
    plan = make_plan("endless+stubborn+deaf+nameless")
    paths = RunPaths(plan.run_dir)
    pids = []

    def kill_agent(snapshot):
        pids.extend(int((paths.logs_dir / f"nameless{rank}").read_text()) for rank in range(2))
        os.kill(agent_pid(paths), signal.SIGKILL)

    execute(plan, overwrite=False, on_tick=WhenTraining(kill_agent))
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert_nothing_left(plan)


def test_worker_killed_from_outside(make_plan):
    plan = make_plan("endless+grandchild")
    kill = WhenTraining(lambda snapshot: os.kill(snapshot.ranks[0].pid, signal.SIGKILL))
    outcome = execute(plan, overwrite=False, on_tick=kill)
    assert outcome.reason.startswith("rank 0 was killed (signal 9), often out of memory; its log: ")
    assert_nothing_left(plan)


def test_program_that_cannot_be_started_is_recorded(make_plan):
    plan = replace(make_plan("normal"), agent_argv=("/no/such/python",))
    with pytest.raises(Exception, match="/no/such/python cannot be started"):
        execute(plan, overwrite=False, on_tick=ignore)
    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code) == (RunState.FAILED, ExitCode.INTERNAL)


def test_error_in_the_launcher_ends_the_run(make_plan):
    plan = make_plan("endless+stubborn")

    def fail(snapshot):
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        execute(plan, overwrite=False, on_tick=WhenTraining(fail))
    record = read_run_record(RunPaths(plan.run_dir))
    assert (record.state, record.exit_code) == (RunState.FAILED, ExitCode.INTERNAL)
    assert record.reason == "the launcher failed: RuntimeError: no terminal"
    assert_nothing_left(plan)


# ---------------------------------------------------------------------------------------------
# Stops
# ---------------------------------------------------------------------------------------------


def test_stop_request_ends_the_run_after_the_iteration(make_plan):
    plan = make_plan("endless")
    stop = WhenTraining(lambda snapshot: request_stop(RunPaths(plan.run_dir)))
    outcome = execute(plan, overwrite=False, on_tick=stop)
    assert (outcome.state, outcome.exit_code) == (RunState.STOPPED, ExitCode.STOPPED)
    assert outcome.reason == "stopped on request with 2 of 6 captures"
    assert_nothing_left(plan)


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_one_signal_is_a_graceful_stop(make_plan, signum, exit_code):
    plan = make_plan("endless")
    stop = WhenTraining(lambda snapshot: os.kill(os.getpid(), signum))
    outcome = execute(plan, overwrite=False, on_tick=stop)
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, exit_code)
    assert outcome.reason == f"interrupted ({signum.name}) with 2 of 6 captures"
    assert [r.state for r in stop.snapshots[-1].ranks] == ["done", "done"]
    assert_nothing_left(plan)


def test_deaf_workers_are_signalled_after_the_grace_time(make_plan):
    plan = make_plan("endless+deaf")
    stop = WhenTraining(interrupt_self)
    outcome = execute(plan, overwrite=False, on_tick=stop)
    assert GRACE_S <= stop.seconds_since < 10
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert outcome.reason == (
        "interrupted (SIGINT) with 2 of 6 captures, by force: the workers did not end within 0.5 s"
    )
    stopping = [s for s in stop.snapshots if s.state == RunState.STOPPING]
    assert stopping[0].reason == "stopping after this iteration (SIGINT)"
    assert_nothing_left(plan)


def test_stubborn_workers_are_killed_two_seconds_after_that(make_plan):
    plan = make_plan("endless+deaf+stubborn+grandchild")
    stop = WhenTraining(lambda snapshot: os.kill(os.getpid(), signal.SIGTERM))
    outcome = execute(plan, overwrite=False, on_tick=stop)
    assert stop.seconds_since < 10
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.TERMINATED)
    assert_nothing_left(plan)


def test_second_interrupt_forces_the_end_at_once(make_plan):
    plan = make_plan("endless+deaf+stubborn+grandchild")
    plan = replace(plan, recipe=replace(plan.recipe, launch=replace(plan.recipe.launch, grace_s=300.0)))
    pressed = []

    def press(snapshot):
        if [r.state for r in snapshot.ranks] == ["training"] * 2 and len(pressed) < 2:
            pressed.append(time.monotonic())
            interrupt_self()

    outcome = execute(plan, overwrite=False, on_tick=press)
    assert time.monotonic() - pressed[1] < 5
    assert (outcome.state, outcome.exit_code) == (RunState.INTERRUPTED, ExitCode.INTERRUPTED)
    assert outcome.reason == "interrupted (SIGINT) with 2 of 6 captures, by force: Ctrl-C was pressed again"
    assert_nothing_left(plan)


# ---------------------------------------------------------------------------------------------
# The launcher as a process of its own
# ---------------------------------------------------------------------------------------------

LAUNCHER = """
import signal, sys
from pathlib import Path
from qcollect.errors import OutputError
from qcollect.launch.supervisor import execute
from qcollect.plan.record import Plan

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    outcome = execute(Plan.read(Path(sys.argv[1])), overwrite="--overwrite" in sys.argv, on_tick=lambda snapshot: None)
except OutputError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
print(outcome.reason)
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts ``execute`` in a process of its own."""
    started = []

    def launch(plan, *options, **popen):
        path = tmp_path / f"{plan.run_token}{len(started)}.json"
        write_json_atomic(path, plan.to_dict())
        command = [sys.executable, "-c", LAUNCHER, str(path), *options]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def until_training(plan):
    paths = RunPaths(plan.run_dir)

    def is_training():
        return [r.state for r in read_snapshot(paths, time.time()).ranks] == ["training"] * 2

    until(is_training, "both ranks train")
    return paths


@pytest.mark.parametrize("behaviour", ["endless", "endless+stubborn+deaf+grandchild"])
def test_launcher_killed_takes_everything_with_it(make_plan, launch, behaviour):
    plan = make_plan(behaviour.replace("+grandchild", ""))
    launcher = launch(plan)
    paths = until_training(plan)
    record = read_run_record(paths)
    launcher.kill()
    launcher.wait()
    until(lambda: find_by_token(plan.run_token) == [], "all processes of the run have ended")
    until(lambda: not process_is(record.agent.pid, record.agent.create_time), "the agent has ended")
    assert read_snapshot(paths, time.time()).state == RunState.LOST


def test_run_whose_launcher_was_killed_can_be_taken_over(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan)
    paths = until_training(plan)
    launcher.kill()
    launcher.wait()
    until(lambda: find_by_token(plan.run_token) == [], "all processes of the run have ended")
    outcome = execute(make_plan("normal", name="next"), overwrite=True, on_tick=ignore)
    assert outcome.state == RunState.COMPLETED
    assert read_snapshot(paths, time.time()).num_files == 6


def test_second_run_in_a_folder_is_refused_and_changes_nothing(make_plan, launch):
    plan = make_plan("endless")
    first = launch(plan)
    until_training(plan)
    with pytest.raises(OutputError, match=f"in use by run run-fake .running, pid {first.pid} on "):
        execute(make_plan("normal", name="second"), overwrite=True, on_tick=ignore)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, out) == (130, "interrupted (SIGINT) with 2 of 6 captures\n")
    assert find_by_token(plan.run_token) == []


def test_ctrl_c_in_a_terminal_reaches_the_launcher_only(make_plan, launch):
    plan = make_plan("endless")
    launcher = launch(plan, start_new_session=True)
    until_training(plan)
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert (launcher.returncode, out) == (130, "interrupted (SIGINT) with 2 of 6 captures\n")


def test_hangup_is_ignored_under_nohup(make_plan, launch, tmp_path):
    plan = make_plan("endless")
    launcher = launch(plan, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    paths = until_training(plan)
    launcher.send_signal(signal.SIGHUP)
    seen = read_snapshot(paths, time.time()).iteration
    until(lambda: read_snapshot(paths, time.time()).iteration > seen + 5, "the run goes on")
    request_stop(paths)
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert (launcher.returncode, out) == (7, "stopped on request with 2 of 6 captures\n")


# ---------------------------------------------------------------------------------------------
# The real torchrun
# ---------------------------------------------------------------------------------------------

TORCHRUN_WORKER = """
import os, signal, sys, time
from pathlib import Path
from qcollect.host.processes import die_with_parent
from qcollect.paths import RunPaths
die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
paths, rank = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1]), int(os.environ["RANK"])
paths.progress_path(rank).write_text(f'{{"state": "training", "pid": {os.getpid()}, "updated_at": {time.time()}}}')
if rank == 1 and sys.argv[1] == "die":
    os.kill(os.getpid(), 9)
while sys.argv[1] != "end": time.sleep(0.05)
"""


@pytest.fixture
def torchrun_plan(tmp_path, make_plan):
    def build(behaviour, *options):
        script = tmp_path / "worker.py"
        script.write_text(TORCHRUN_WORKER)
        base = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
        argv = (sys.executable, "-m", "qcollect.launch.agent", *(options or base), str(script), behaviour)
        env = {"OMP_NUM_THREADS": "1"}
        plan = make_plan("unused", share=0)
        return replace(plan, agent_argv=argv, env=plan.env | env)

    return build


def test_torchrun_whose_workers_end_well(torchrun_plan):
    plan = torchrun_plan("end")
    assert execute(plan, overwrite=False, on_tick=ignore).exit_code == ExitCode.OK
    assert_nothing_left(plan)


def test_torchrun_says_which_rank_was_killed(torchrun_plan):
    plan = torchrun_plan("die")
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    paths = RunPaths(plan.run_dir)
    assert outcome.reason == f"rank 1 was killed (signal 9), often out of memory; its log: {paths.log_path(1)}"
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, -9), (0, -15)]
    agent_log = paths.agent_log_path.read_text()
    assert agent_log.splitlines()[-1] == "torchrun failed: rank 1 (exit -9), rank 0 (exit -15)"
    assert "Traceback" not in agent_log
    assert_nothing_left(plan)


def test_torchrun_is_signalled_once_when_workers_do_not_stop(torchrun_plan):
    plan = torchrun_plan("endless")
    stop = WhenRunning()
    outcome = execute(plan, overwrite=False, on_tick=stop)
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert outcome.reason.endswith("by force: the workers did not end within 0.5 s")
    assert_nothing_left(plan)


class WhenRunning:
    """Presses Ctrl-C once both workers have written their progress."""

    def __init__(self):
        self.pressed = False

    def __call__(self, snapshot):
        if not self.pressed and all(rank.pid for rank in snapshot.ranks):
            self.pressed = True
            interrupt_self()


def test_torchrun_that_cannot_start_says_why(torchrun_plan):
    plan = torchrun_plan(
        "end", "--nproc-per-node", "2", "--rdzv-backend", "no_such_backend", "--rdzv-endpoint", "localhost:0"
    )
    outcome = execute(plan, overwrite=False, on_tick=ignore)
    paths = RunPaths(plan.run_dir)
    assert outcome.exit_code == ExitCode.WORKER
    assert outcome.reason.startswith("torchrun's agent failed: ValueError: ")
    assert "no_such_backend" in outcome.reason
    assert outcome.reason.endswith(f"; its log: {paths.agent_log_path}")
    assert "Traceback" not in paths.agent_log_path.read_text()
    assert_nothing_left(plan)
