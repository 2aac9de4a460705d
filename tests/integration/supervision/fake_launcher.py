"""The command line's ``run`` without its look at the model: a plan goes in, the outcome's reason and code come out.

``fake_launcher.py PLAN [new|overwrite|resume]``
"""

import signal
import sys
from pathlib import Path

from qcollect.cli.run import _display, _watcher
from qcollect.errors import OutputError
from qcollect.launch.claim import ClaimMode
from qcollect.launch.supervisor import execute
from qcollect.plan.record import Plan


def main() -> int:
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        mode = ClaimMode(sys.argv[2]) if len(sys.argv) > 2 else ClaimMode.NEW
        with _display() as display:
            outcome = execute(Plan.read(Path(sys.argv[1])), mode=mode, watcher=_watcher(display))
    except OutputError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(outcome.reason)
    return int(outcome.exit_code)


if __name__ == "__main__":
    sys.exit(main())
