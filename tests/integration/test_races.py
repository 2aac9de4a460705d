"""Runs started at the same moment: one has a folder and goes on unharmed, the others change nothing."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from qcollect.paths import RunPaths
from qcollect.store.manifest import read_manifests

pytestmark = pytest.mark.integration

NUM_STARTERS = 10
STARTER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
from qcollect.cli.console import fail
from qcollect.errors import QcollectError
from qcollect.launch.claim import ClaimMode, claim
from qcollect.plan.record import Plan

plan_path, start_at, number = sys.argv[1:]
plan = replace(Plan.read(Path(plan_path)), run_id=f"starter-{number}", run_token=f"token-{number}")
time.sleep(max(0.0, float(start_at) - time.time()))
try:
    claim(plan, mode=ClaimMode.NEW, now=0.0)  # a clock that stands still
except QcollectError as error:
    sys.exit(fail(str(error), error.exit_code).exit_code)
print("mine", flush=True)
sys.stdin.read()
"""

# the command line, but what the model holds is read from a file: all arrive at the folder at the same moment
COMMAND = """
import json, sys
from pathlib import Path
import qcollect.launch.inspect as inspect
from qcollect.cli import main
from qcollect.plan.inspection import Inspection

inspection_path, *arguments = sys.argv[1:]
inspect.inspect_recipe = lambda recipe: Inspection.from_dict(json.loads(Path(inspection_path).read_text()))
main(arguments)
"""


def test_of_ten_starters_in_the_same_second_one_wins_and_nine_name_it(qcollect_here, small_recipe, tmp_path):
    out = tmp_path / "out"
    plan = qcollect_here("run", "mxfp8", "--recipe", str(small_recipe), "--out", str(out), "--dry-run", "--json").out
    (tmp_path / "plan.json").write_text(plan)
    start_at = time.time() + 3
    starters = [
        _popen([sys.executable, "-c", STARTER, str(tmp_path / "plan.json"), str(start_at), str(number)])
        for number in range(NUM_STARTERS)
    ]
    losers = [s for s in starters if s.stdout.readline() == ""]
    (winner,) = [s for s in starters if s not in losers]
    number, pid = starters.index(winner), winner.pid
    messages = [loser.communicate(timeout=60)[1] for loser in losers]
    winner.communicate(timeout=60)
    assert [loser.returncode for loser in losers] == [3] * (NUM_STARTERS - 1)
    assert winner.returncode == 0
    for message in messages:
        assert message.startswith(f"error: {out / 'mxfp8'} is in use by run starter-{number} (starting, pid {pid} on ")
        assert "choose another folder with --out" in message
    record = json.loads(RunPaths(out / "mxfp8").run_path.read_text())
    assert (record["run_id"], record["launcher"]["pid"]) == (f"starter-{number}", pid)
    assert [p.name for p in (out / "mxfp8").iterdir()] == [".qcollect"]


def test_runs_at_once_on_one_machine_finish_and_only_one_has_a_folder(small_recipe, tmp_path):
    """Also while torch's customary port is taken."""
    from qcollect.recipe.load import load_recipe
    from qcollect.worker.inspection import inspect_recipe

    inspection_path = tmp_path / "inspection.json"
    inspection_path.write_text(json.dumps(inspect_recipe(load_recipe(small_recipe)).to_dict()))
    process = [sys.executable, "-c", COMMAND, str(inspection_path)]
    command = [*process, "run", "mxfp8", "--recipe", str(small_recipe), "--json", "--out"]
    with _holding_port(29500):
        on_one = [_popen([*command, str(tmp_path / "one")]) for _ in range(3)]
        on_other = _popen([*command, str(tmp_path / "other")])
        results = [(p, *p.communicate(timeout=300)) for p in (*on_one, on_other)]
    assert sorted(p.returncode for p in on_one) == [0, 3, 3]
    assert on_other.returncode == 0, results[-1][2]
    (winner,) = [json.loads(out) for p, out, _ in results[:3] if p.returncode == 0]
    run_id = winner["status"]["run_id"]
    for process, _, err in results[:3]:
        if process.returncode == 3:
            last = err.splitlines()[-1]
            assert last.startswith(f"error: {tmp_path / 'one' / 'mxfp8'} is in use by run {run_id} (")
    for name in ("one", "other"):
        run_dir = tmp_path / name / "mxfp8"
        records = read_manifests(RunPaths(run_dir))
        assert sorted(r.file for r in records) == sorted(p.name for p in run_dir.glob("*.pt"))
        assert len(records) == 8
        assert {r.metadata["run_id"] for r in records} == {json.loads(RunPaths(run_dir).run_path.read_text())["run_id"]}


def _popen(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"LC_ALL": "C"})


@contextlib.contextmanager
def _holding_port(port: int):
    with socket.socket() as holder:
        with contextlib.suppress(OSError):  # somebody else holds it: as good
            holder.bind(("0.0.0.0", port))
            holder.listen()
        yield
