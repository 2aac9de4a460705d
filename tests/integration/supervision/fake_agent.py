"""A stand-in for torchrun, without torch: it behaves as torchrun does where it matters to a supervisor.

Workers have sessions of their own, SIGTERM is passed on once, the survivors of a failed rank are signalled
and given 30 s, ``errors/agent.json`` says how the ranks ended. ``fake_agent.py WORKER``
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qcollect.host.processes import die_with_parent
from qcollect.paths import RunPaths
from qcollect.store.files import write_json_atomic

SURVIVORS_GET_S = 30


class Signalled(Exception):
    pass


def note(signum, frame):
    raise Signalled


def start(rank: int) -> subprocess.Popen:
    env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen([sys.executable, sys.argv[1]], env=env, start_new_session=True)


def close(workers: list[subprocess.Popen], timeout_s: float) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def note_failures(workers: list[subprocess.Popen], failures: dict[int, dict]) -> None:
    for rank, worker in enumerate(workers):
        code = worker.poll()
        if code and rank not in failures:
            failures[rank] = {
                "rank": rank,
                "local_rank": rank,
                "pid": worker.pid,
                "exitcode": code,
                "signal": -code if code < 0 else None,
                "time": int(time.time()),
            }


def main() -> int:
    die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
    os.environ["QCOLLECT_PARENT"] = str(os.getpid())
    signal.signal(signal.SIGTERM, note)
    paths = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1])
    workers: list[subprocess.Popen] = []
    failures: dict[int, dict] = {}
    try:
        for rank in range(int(os.environ["FAKE_WORLD_SIZE"])):
            workers.append(start(rank))
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            time.sleep(0.02)
        note_failures(workers, failures)
        if not failures:
            return 0
        close(workers, SURVIVORS_GET_S)
        note_failures(workers, failures)
        write_json_atomic(paths.agent_error_path, {"failures": list(failures.values())})
    except Signalled:
        close(workers, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
        write_json_atomic(paths.agent_error_path, {"failures": [], "signal": 15, "time": time.time()})
    return 1


if __name__ == "__main__":
    sys.exit(main())
