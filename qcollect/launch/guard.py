"""What ends a run whose launcher was killed: ``python -m qcollect.launch.guard TOKEN GRACE_S``.

The kernel ends agent and workers with their parents, but not what workers have started (data
loaders, helpers of a script). The guard reads from a pipe whose other end only the launcher holds:
when that closes without a word the launcher is gone, and after the grace time everything that
carries the run's token is killed. It has no token itself, and a session of its own.
"""

import sys
import time

from qcollect.host.processes import find_run, kill_all

ALL_IS_WELL = b"."
_POLL_S = 0.1


def main(token: str, grace_s: float) -> int:
    if sys.stdin.buffer.read(1) == ALL_IS_WELL:
        return 0
    deadline = time.monotonic() + grace_s
    while find_run(token) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    kill_all(lambda: find_run(token))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
