"""A worker for the real torchrun, without torch: ``fake_torchrun_worker.py end|endless|die``."""

import os
import signal
import sys
import time
from pathlib import Path

from qcollect.host.processes import die_with_parent
from qcollect.paths import RunPaths

behaviour, rank = sys.argv[1], int(os.environ["RANK"])
die_with_parent(signal.SIGTERM, int(os.environ["QCOLLECT_PARENT"]))
paths = RunPaths(Path(os.environ["QCOLLECT_PLAN"]).parents[1])
paths.progress_path(rank).write_text(f'{{"state": "training", "pid": {os.getpid()}, "updated_at": {time.time()}}}')
if rank == 1 and behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
while behaviour != "end":
    time.sleep(0.05)
