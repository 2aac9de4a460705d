"""A stand-in for a worker, without torch: captures, iterations and files as a worker's, and ways to misbehave.

``FAKE_BEHAVIOUR`` names what it does, joined by ``+``; see ``BEHAVIOURS``.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qcollect.host.processes import die_with_parent, identify
from qcollect.paths import RunPaths
from qcollect.plan.stop import StopCause, request_stop
from qcollect.store.files import append_line, count_lines, write_json_atomic
from qcollect.worker.process import _dump_stacks_when_asked, _leave, _redirect_output

BEHAVIOURS = {
    "normal": "one capture an iteration until its share is there",
    "endless": "one capture, then iterations without end",
    "short": "ends one capture short of its share, as a training does whose data is over",
    "slow": "an iteration takes 0.4 s",
    "deaf": "does not look at the stop file",
    "stubborn": "ignores SIGTERM",
    "grandchild": "has a child in a session of its own",
    "nameless": "has a child with an empty environment",
    "raise": "rank 1 raises",
    "die": "rank 1 is killed in the middle of a line",
    "talk": "lines, an unfinished line and a progress bar in the log",
    "registered": "writes its stacks on SIGUSR2",
    "stuck": "no rank moves from iteration 3 on",
    "behind": "as stuck, and rank 1 does not come to the end of iteration 2",
    "leave": "rank 0 leaves after iteration 2, then rank 1 fails",
    "leave_after": "rank 1 fails in iteration 2, and rank 0 leaves after that",
}

rank = int(os.environ["RANK"])
behaviour = set(os.environ["FAKE_BEHAVIOUR"].split("+"))
paths = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1])
share = json.loads(paths.plan_path.read_text())["shares"][rank]
num_kept = count_lines(paths.manifest_path(rank))  # of the run that is resumed


def report(state: str, iteration: int) -> None:
    fields = {
        "rank": rank,
        "local_rank": rank,
        **identify(os.getpid()).to_dict(),
        "state": state,
        "iteration": iteration,
        "captured": 0,
        "share": share,
        "bytes": 0,
        "loss": 1.0,
        "device": "cpu",
        "updated_at": time.time(),
    }
    write_json_atomic(paths.progress_path(rank), fields)


def capture(number: int) -> None:
    if number < num_kept:
        return
    name = f"20241201_143022_{number + 1:04d}_iter000_attention_L0_forward_pre_FA_mxfp8_rank{rank}_sample0_query.pt"
    (paths.run_dir / name).write_bytes(b"tensor")
    fields = {"file": name, "bytes": 6, "xxh3_128": "0", "metadata": {}, "tensor_info": {}}
    append_line(paths.manifest_path(rank), fields)


def fail(kind: str, message: str) -> None:
    print("Traceback (most recent call last): ...", flush=True)
    fields = {
        "rank": rank,
        "local_rank": rank,
        "type": kind,
        "message": message,
        "traceback": "...",
        "time": time.time(),
    }
    write_json_atomic(paths.error_path(rank), fields)
    sys.exit(1)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


def wait_for_the_others() -> None:
    wait_for(lambda: False)


def load_a_batch() -> None:
    wait_for(lambda: False)


def talk() -> None:
    for number in range(200):
        os.write(1, f"rank {rank} line {number} ".encode() + b"x" * 200 + b"\n")
    os.write(1, b"".join(b"\r%3d%%" % percent for percent in range(101)) + b"\n")
    os.write(1, f"rank {rank} ends without a newline".encode())


def prepare() -> None:
    die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
    _redirect_output(paths.log_path(rank))
    print(f"rank {rank} starts", flush=True)
    if "registered" in behaviour:
        _dump_stacks_when_asked(paths, rank)
    if "stubborn" in behaviour:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in behaviour:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if "nameless" in behaviour:
        nameless = subprocess.Popen(["sleep", "300"], env={}, start_new_session=True)
        (paths.logs_dir / f"nameless{rank}").write_text(str(nameless.pid))


def misbehave(iteration: int) -> None:
    if iteration == 1 and rank == 1 and "raise" in behaviour:
        wait_for(paths.progress_path(0).exists)
        fail("ValueError", "bad tokenizer path")
    if iteration == 1 and rank == 1 and "die" in behaviour:
        os.write(1, b"one\ntwo\nthree\nno end")
        os.kill(os.getpid(), signal.SIGKILL)
    if iteration == 2 and "leave" in behaviour:
        if rank == 0:
            leave_early(iteration)
        wait_for(paths.leave_path(0).exists)
        fail("RuntimeError", "Connection closed by peer")
    if iteration == 2 and "leave_after" in behaviour:
        if rank == 1:
            fail("RuntimeError", "Connection closed by peer")
        wait_for(paths.error_path(1).exists)
        leave_early(iteration)
    if iteration == 2 and rank == 1 and "behind" in behaviour:
        load_a_batch()
    if iteration == 3 and behaviour & {"stuck", "behind"}:
        wait_for_the_others()


def leave_early(iteration: int) -> None:
    request_stop(paths, StopCause.DATA_END)
    report("left", iteration)
    _leave(paths, rank)
    sys.exit(0)


def train() -> int:
    capture(0)
    report("training", 0)
    if "talk" in behaviour:
        talk()
    iteration = 1
    while True:
        misbehave(iteration)
        if "endless" not in behaviour:
            if iteration >= share - ("short" in behaviour):
                return iteration
            capture(iteration)
        if paths.stop_path.exists() and "deaf" not in behaviour:
            return iteration
        report("training", iteration)
        iteration += 1
        time.sleep(0.4 if "slow" in behaviour else 0.02)


def main() -> None:
    unknown = behaviour - set(BEHAVIOURS)
    assert not unknown, unknown
    prepare()
    report("done", train())
    _leave(paths, rank)


if __name__ == "__main__":
    main()
