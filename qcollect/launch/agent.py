"""The torchrun agent under supervision: ``python -m qcollect.launch.agent <torchrun arguments>``.

With ``--wait`` instead, it imports torch and takes its arguments as one line of JSON on stdin (``Orders``):
the launcher starts it so while the model is looked at, which takes the import of torch out of a
run's way. No orders: it ends.

torchrun itself, with three additions: it ends with its launcher, instead of a long traceback it
leaves ``errors/agent.json`` with who failed and how, and on one node its rendezvous listens on
127.0.0.1 only. A program of its own, the only one of the control side that imports torch.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcollect.host.processes import PARENT_VARIABLE, die_with_parent
from qcollect.paths import RunPaths
from qcollect.store.files import write_json_atomic

EXIT_FAILED = 1
WAIT = "--wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a waiting agent is told: torchrun's arguments, its whole environment, the file its output goes to."""

    arguments: list[str]
    env: dict[str, str]
    log_path: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def main(arguments: list[str]) -> int:
    """Run torchrun with ``arguments``; 0 if every worker exits with 0."""
    launcher = os.environ.get(PARENT_VARIABLE)
    die_with_parent(signal.SIGTERM, int(launcher) if launcher else None)
    if arguments == [WAIT]:
        return _wait_for_orders()
    return _run(arguments)


def _wait_for_orders() -> int:
    from torch.distributed import run  # noqa: F401  # what the waiting is for

    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0
    orders = Orders(**json.loads(line))
    os.environ.clear()
    os.environ.update(orders.env)
    log = os.open(orders.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(log)
    os.close(nothing)
    return _run(orders.arguments)


def _run(arguments: list[str]) -> int:
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the workers' parent is this process

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "--standalone" in arguments:
        _listen_on_loopback()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        return _fail({"failures": [_entry(rank, failure) for rank, failure in error.failures.items()]})
    except SignalException as error:
        return _fail({"failures": [], "signal": int(error.sigval)})
    except Exception as error:  # a port, a rendezvous, an argument
        return _fail({"failures": [], "type": type(error).__name__, "message": str(error)})
    return 0


def _listen_on_loopback() -> None:
    """Have torchrun's stores listen on 127.0.0.1; by themselves they listen on every interface."""
    from torch import distributed as dist
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    class LoopbackStore(TCPStore):
        def __init__(self, host_name: str, port: int, *, is_master: bool = False, **kwargs: Any) -> None:
            if is_master:
                with socket.create_server(("127.0.0.1", port)) as listener:
                    port = listener.getsockname()[1]
                    kwargs["master_listen_fd"] = listener.detach()  # the store owns it now
            super().__init__("127.0.0.1", port, is_master=is_master, **kwargs)

    dist.TCPStore = LoopbackStore  # type: ignore[attr-defined,assignment]
    c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[attr-defined,assignment]


def _entry(rank: int, failure: Any) -> dict[str, Any]:
    """torch's ``ProcessFailure`` as plain values; its time is in whole seconds."""
    exit_code = int(failure.exitcode)
    return {
        "rank": int(rank),
        "local_rank": int(failure.local_rank),
        "pid": int(failure.pid),
        "exitcode": exit_code,
        "signal": -exit_code if exit_code < 0 else None,
        "time": int(failure.timestamp),
    }


def _fail(report: Mapping[str, Any]) -> int:
    report = {**report, "time": time.time()}
    plan = os.environ.get("QCOLLECT_PLAN")
    if plan:
        # plan.json is in the state folder, the state folder in the run folder
        with suppress(OSError):  # a full disk: the exit code still tells
            write_json_atomic(RunPaths(Path(plan).parents[1]).agent_error_path, report)
    ranks = ", ".join(f"rank {f['rank']} (exit {f['exitcode']})" for f in report["failures"])
    print(f"torchrun failed: {ranks or report.get('message') or 'ended by a signal'}", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
