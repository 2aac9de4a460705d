import os
import shutil
import signal
import tempfile


def pytest_configure() -> None:
    # a shell ignores Ctrl-C for what it starts in the background, and children inherit that
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # what is remembered of models is the tests' own
    os.environ["QCOLLECT_CACHE_DIR"] = tempfile.mkdtemp(prefix="qcollect-cache-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.get("QCOLLECT_CACHE_DIR", ""), ignore_errors=True)
