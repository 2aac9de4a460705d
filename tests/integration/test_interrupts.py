"""A command that is ended before any worker runs leaves nothing: no process, no folder, no temporary file."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_while_the_model_is_looked_at_ends_that_too(small_recipe, tmp_path, signum, exit_code):
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    command = [sys.executable, "-m", "qcollect", "run", "mxfp8", "--recipe", str(small_recipe), "--out", str(out)]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "small: checking the model, the data and the devices\n"
        launcher = psutil.Process(process.pid)
        while not (children := launcher.children(recursive=True)):
            assert process.poll() is None
        process.send_signal(signum)
        process.wait(30)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == exit_code
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert list(temporary.iterdir()) == []
    assert not out.exists()
