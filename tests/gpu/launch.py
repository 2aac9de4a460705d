"""Launching on real accelerators, two of them: devices, stops, stalls in NCCL, kills, resume. About seven minutes.

    python tests/gpu/launch.py [--only "stall in a collective"]

Needs torch with CUDA, two devices and the package's dependencies; runs from a checkout, installed or not.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import torch

import qcollect
from qcollect.host.processes import find_by_token
from qcollect.paths import RunPaths
from qcollect.store.files import read_json

DEADLINE_S = 180.0
# 3,000 captures a rank, spread evenly over 20 iterations: 150 each
LONG = ("--nproc", "2", "--target", "6000", "--set", "capture.iterations=0-19")
HANGING = """
import os, sys, time
sys.path.insert(0, {recipes!r})
import train, qcollect
from pathlib import Path
from qcollect.plan.record import Plan
from qcollect.worker.dataset import make_batches
from qcollect.worker.model import build_model

recipe = Plan.read(Path(os.environ["QCOLLECT_PLAN"])).recipe
rank, world_size, device = train.init_ranks("cuda", recipe.launch.stall_timeout_s)
batches = make_batches(recipe, rank=rank, world_size=world_size, vocab_size=320)

class Late:
    def batch(self, iteration, micro_batch=0):
        if rank == 1 and iteration == 3:
            time.sleep(1000)
        return batches.batch(iteration, micro_batch)

train.train(recipe, build_model(recipe.model, device=device), Late(), world_size=world_size, attach=qcollect.collect)
"""


def start(out: Path, *arguments: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "qcollect", "run", "mxfp8", "--recipe", "tiny", "--out", str(out), *arguments]
    environment = os.environ | (env or {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def run(out: Path, *arguments: str, env: dict[str, str] | None = None, expected: int = 0) -> RunPaths:
    process = start(out, *arguments, env=env)
    output, _ = process.communicate(timeout=DEADLINE_S)
    paths = RunPaths(out / "mxfp8")
    logs = "".join(f"\n--- {p}\n{p.read_text()[-1500:]}" for p in sorted(paths.logs_dir.glob("*.log")))
    assert process.returncode == expected, f"exit {process.returncode}: {output[-2000:]}{logs}"
    return paths


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return result


def record_of(paths: RunPaths) -> dict[str, Any]:
    return read_json(paths.run_path) or {}


def check_nothing_left(paths: RunPaths) -> None:
    token = record_of(paths)["run_token"]
    until(lambda: not find_by_token(token), "processes are left")


def tensors(paths: RunPaths) -> dict[Any, torch.Tensor]:
    return {capture.key: capture.load() for capture in qcollect.open_run(paths.run_dir)}


def check_devices(folder: Path) -> str:
    """--gpu-ids 1 and CUDA_VISIBLE_DEVICES by UUID both end up on the second GPU, and every file says so."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(2)]
    cases: Sequence[tuple[str, tuple[str, ...], dict[str, str], str]] = (
        ("ids", ("--gpu-ids", "1"), {}, "1"),
        ("uuid", (), {"CUDA_VISIBLE_DEVICES": uuids[1]}, uuids[1]),
        ("within", ("--gpu-ids", "1"), {"CUDA_VISIBLE_DEVICES": f"{uuids[0]},{uuids[1]}"}, uuids[1]),
    )
    for name, arguments, env, visible in cases:
        paths = run(folder / name, *arguments, env=env)
        (device,) = read_json(paths.plan_path)["devices"]  # type: ignore[index]
        assert (device["device"], device["visible_device"]) == ("cuda:0", visible), device
        for capture in qcollect.open_run(paths.run_dir):
            assert capture.metadata["gpu_uuid"] == uuids[1], (name, capture.metadata["gpu_uuid"], uuids)
            assert capture.metadata["visible_device"] == visible
    return f"{len(cases)} ways to the second GPU ({uuids[1]})"


def check_stall(folder: Path) -> str:
    """A rank that never comes to a collective: exit 5, its name, whole files."""
    script = folder / "hanging.py"
    script.write_text(HANGING.format(recipes=str(ROOT / "recipes")))
    settings = ("--set", f"script={script}", "--set", "launch.stall_timeout_s=5")
    started = time.monotonic()
    paths = run(folder / "stall", *LONG, *settings, expected=5)
    seconds = time.monotonic() - started
    check_nothing_left(paths)
    reason = record_of(paths)["reason"]
    assert "rank 1 differs from the others" in reason, reason
    assert "hanging.py" in reason, reason
    count, num_files = len(tensors(paths)), len(list(paths.run_dir.glob("*.pt")))
    # three iterations of both ranks, the fourth of rank 0 alone
    assert count == num_files == 7 * 150, f"{count} captures, {num_files} files: {reason}"
    return f"{count} captures whole, {seconds:.1f} s in all: {reason}"


def check_kill(folder: Path, name: str, kill: Callable[["subprocess.Popen[str]", RunPaths], None]) -> str:
    """Killed while it captures: nothing is left, every file loads, and it resumes to what it would have been."""
    out = folder / f"kill-{name}"
    process, paths = start(out, *LONG), RunPaths(out / "mxfp8")
    until(lambda: len(list(paths.run_dir.glob("*.pt"))) > 1000, "captures")
    kill(process, paths)
    killed = time.monotonic()
    process.wait(DEADLINE_S)
    check_nothing_left(paths)
    seconds, state = time.monotonic() - killed, record_of(paths)["state"]
    for path in paths.run_dir.glob("*.pt"):
        torch.load(path, weights_only=True)
    before = len(list(paths.run_dir.glob("*.pt")))
    run(out, *LONG, "--resume")
    resumed, whole = tensors(paths), tensors(RunPaths(folder / "whole" / "mxfp8"))
    assert resumed.keys() == whole.keys() and len(resumed) == 6000
    different = [k for k, t in resumed.items() if not torch.equal(t.view(torch.uint8), whole[k].view(torch.uint8))]
    assert not different, f"{len(different)} differ, first {different[0]}"
    return f"gone in {seconds:.1f} s ({state}), {before} files whole, resumed to 6,000 identical ones"


def kill_launcher(process: "subprocess.Popen[str]", paths: RunPaths) -> None:
    process.kill()


def kill_worker(process: "subprocess.Popen[str]", paths: RunPaths) -> None:
    os.kill(json.loads(paths.progress_path(1).read_text())["pid"], signal.SIGKILL)


def interrupt(process: "subprocess.Popen[str]", paths: RunPaths) -> None:
    process.send_signal(signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="the name of a check, as it is printed; may be repeated")
    only = parser.parse_args().only
    if torch.cuda.device_count() < 2:
        print("SKIP: needs two CUDA devices")
        return 77
    name = torch.cuda.get_device_name(0)
    print(f"{torch.cuda.device_count()} x {name}; torch {torch.__version__}; python {sys.version.split()[0]}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="qcollect-gpu-") as temporary:
        folder = Path(temporary)
        checks: list[tuple[str, Callable[[], str]]] = [
            ("devices", lambda: check_devices(folder)),
            ("stall in a collective", lambda: check_stall(folder)),
            ("whole run", lambda: f"{len(tensors(run(folder / 'whole', *LONG)))} captures"),
            ("kill -9 of the launcher", lambda: check_kill(folder, "launcher", kill_launcher)),
            ("kill -9 of a worker", lambda: check_kill(folder, "worker", kill_worker)),
            ("Ctrl-C", lambda: check_kill(folder, "interrupt", interrupt)),
        ]
        checks = [(title, check) for title, check in checks if not only or title in only]
        for title, check in checks:
            try:
                print(f"ok    {title}: {check()}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {title}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
