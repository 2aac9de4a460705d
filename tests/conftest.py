import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without their folder: for what they share


def pytest_configure() -> None:
    # a shell ignores Ctrl-C for what it starts in the background, and children inherit that
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # and nohup that a terminal closes
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # what is remembered of models is the tests' own
    os.environ["QCOLLECT_CACHE_DIR"] = tempfile.mkdtemp(prefix="qcollect-cache-")


def pytest_collection_finish() -> None:
    # all modules are there: a collector that finds them frozen does not go through them again
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or the interpreter's end frees none of them, which extensions complain of
    shutil.rmtree(os.environ.get("QCOLLECT_CACHE_DIR", ""), ignore_errors=True)


@pytest.fixture(scope="session")
def cache_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled formats, kept from run to run: to compile one variant takes about ten seconds."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("compiled")) if cache is not None else tmp_path_factory.mktemp("compiled")
