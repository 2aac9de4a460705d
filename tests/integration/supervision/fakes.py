"""Plans whose torchrun and workers are stand-ins without torch, and what the tests here look at them with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import qcollect.paths
from qcollect.host.processes import find_by_token
from qcollect.launch.claim import ClaimMode
from qcollect.launch.outcome import Outcome
from qcollect.launch.supervisor import Watcher, execute
from qcollect.monitor.run_record import read_run_record
from qcollect.monitor.snapshot import RunSnapshot, read_snapshot
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut, PlannedCapture, Schedule
from qcollect.recipe.records import recipe_from_dict
from qcollect.vocab import LayerType, Operation, Values

HERE = Path(__file__).parent
REPOSITORY = Path(qcollect.paths.__file__).parents[1]
DEADLINE_S = 60.0
GRACE_S = 0.5
NUM_RANKS = 2


def build_plan(
    run_dir: Path, *, token: str, behaviour: str, share: int = 3, launch: dict[str, Any] | None = None
) -> Plan:
    """A plan of two fake ranks that behave as ``fake_worker.BEHAVIOURS`` says."""
    recipe = recipe_from_dict(
        {
            "name": "fake",
            "path": "fake.yaml",
            "script": "train.py",
            "model": {},
            "data": {"path": ["text"], "sequence_length": 8},
            "train": {},
            "quant": {},
            "capture": {"target": NUM_RANKS * share},
            "launch": {"grace_s": GRACE_S, **(launch or {})},
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
        world_size=NUM_RANKS,
        device="cpu",
        torchrun_argv=("torchrun",),
        agent_argv=(sys.executable, str(HERE / "fake_agent.py"), str(HERE / "fake_worker.py")),
        env={
            "QCOLLECT_PLAN": str(RunPaths(run_dir).plan_path),
            "QCOLLECT_RUN_TOKEN": token,
            "PYTHONPATH": str(REPOSITORY),
            "FAKE_BEHAVIOUR": behaviour,
            "FAKE_WORLD_SIZE": str(NUM_RANKS),
        },
        unset=("RANK", "LOCAL_RANK"),
        script_args=(),
        schedule=Schedule(captures=(capture,) * share, cuts=((cut,),) * NUM_RANKS),
        excluded=(),
    )


def with_launch(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, recipe=replace(plan.recipe, launch=replace(plan.recipe.launch, **changes)))


def run(
    plan: Plan,
    on_tick: Callable[[RunSnapshot], None] = lambda snapshot: None,
    *,
    mode: ClaimMode = ClaimMode.NEW,
    **watcher: Any,
) -> Outcome:
    return execute(plan, mode=mode, watcher=Watcher(on_tick=on_tick, **watcher))


def both_train(snapshot: RunSnapshot) -> bool:
    return [rank.state for rank in snapshot.ranks] == ["training"] * NUM_RANKS


class WhenTraining:
    """An ``on_tick`` that acts once, when both ranks train, and gives up after a deadline."""

    def __init__(self, act: Callable[[RunSnapshot], object]) -> None:
        self.act, self.deadline = act, time.monotonic() + DEADLINE_S
        self.snapshots: list[RunSnapshot] = []
        self.acted_at: float | None = None

    def __call__(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)
        assert time.monotonic() < self.deadline
        if self.acted_at is None and both_train(snapshot):
            self.acted_at = time.monotonic()
            self.act(snapshot)

    @property
    def seconds_since(self) -> float:
        assert self.acted_at is not None
        return time.monotonic() - self.acted_at


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return result


def until_training(plan: Plan) -> RunPaths:
    paths = RunPaths(plan.run_dir)
    until(lambda: both_train(read_snapshot(paths, time.time())), "both ranks train")
    return paths


def until_gone(plan: Plan) -> None:
    until(lambda: find_by_token(plan.run_token) == [], "all processes of the run have ended")


def agent_pid(paths: RunPaths) -> int:
    return read_run_record(paths).agent.pid


def guards(plan: Plan) -> list[psutil.Process]:
    """The guard processes of a run; they carry no token, their command names it."""
    found = []
    for process in psutil.process_iter():
        try:
            if "qcollect.launch.guard" in process.cmdline() and plan.run_token in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def zombies() -> list[psutil.Process]:
    """Ended processes below this one that nobody has waited for."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() == psutil.STATUS_ZOMBIE]


def assert_nothing_left(plan: Plan) -> None:
    assert find_by_token(plan.run_token) == []
    assert guards(plan) == []
    until(lambda: zombies() == [], "every process is waited for")


def interrupt_self(snapshot: RunSnapshot | None = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def start_launcher(plan_path: Path, *options: str, **popen: Any) -> subprocess.Popen[str]:
    """``execute`` of a plan in a process of its own; it prints the reason and ends with the outcome's code."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
    command = launcher_command(plan_path, *options)
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, **settings)


def launcher_command(plan_path: Path, *options: str) -> list[str]:
    return [sys.executable, str(HERE / "fake_launcher.py"), str(plan_path), *options]
