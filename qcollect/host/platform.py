"""Where a run can run: the system."""

import sys

from qcollect.errors import PreflightError

_NAMES = {"darwin": "macOS", "win32": "Windows"}


def require_linux(command: str = "qcollect run") -> None:
    """Nothing, on Linux. Call it before the imports of ``launch``, which do not succeed everywhere.

    Raises:
        PreflightError: another system; it says what works there.
    """
    if not sys.platform.startswith("linux"):
        raise PreflightError(
            f"{command} needs Linux (it ends processes with prctl, locks and signals), and this is "
            f"{_NAMES.get(sys.platform, sys.platform)}; what works here: qcollect formats, recipes, data prepare, and "
            "status of a run's folder, and in Python fake_quantize and open_run. Start the run on a Linux machine, a "
            "container or WSL 2"
        )
