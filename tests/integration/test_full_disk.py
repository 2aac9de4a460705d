"""A disk that is too small is told before the launch; one that fills up meanwhile ends the run, and whole files stay.

Needs a file system of its own (tmpfs), which only root can mount.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from qcollect.host.processes import RUN_TOKEN_VARIABLE
from qcollect.paths import RunPaths

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parents[2] / "recipes" / "train.py"
# takes all but so much of the disk as soon as a worker begins, then trains as usual
HOG = """
import os, runpy, sys
from pathlib import Path

def leave(folder, kind, amount):
    stat = os.statvfs(folder)
    if kind == "bytes":
        Path(folder, "hog").write_bytes(bytes(stat.f_bavail * stat.f_frsize - amount))
    else:
        for number in range(stat.f_favail - amount):
            Path(folder, f"hog{number}").touch()

if os.environ["RANK"] == "0":
    leave(sys.argv[1], sys.argv[2], int(sys.argv[3]))
sys.path.insert(0, os.path.dirname(sys.argv[4]))
runpy.run_path(sys.argv[4], run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A small file system: how to make it, how much of it to leave, what runs out."""

    options: str
    kind: str
    amount: int


@pytest.fixture
def mount(tmp_path: Path) -> Iterator:
    """Mounts a tmpfs with these options and gives its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def run(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield run
    finally:
        for path in mounted:
            subprocess.run(["umount", str(path)], check=True)


def processes_of(token: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_TOKEN_VARIABLE) == token:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


# ---------------------------------------------------------------------------------------------
# Before the launch
# ---------------------------------------------------------------------------------------------


# wandb/wandb issue 1383, intel/BigDL issue 1397: inodes gone with space left
def test_too_few_inodes_are_told_before_a_run_with_both_numbers(mount, qcollect_here, small_recipe):
    disk = mount("size=64m,nr_inodes=200")
    free = os.statvfs(disk).f_favail
    arguments = ("--recipe", str(small_recipe), "--target", "200", "--out", str(disk / "out"))
    message = f"{disk / 'out'}: the run makes 232 files and {free} inodes are free; lower --target, or choose"
    refused = qcollect_here("run", "mxfp8", *arguments)
    assert refused.exit_code == 3
    assert message in refused.err
    told = qcollect_here("doctor", *arguments)
    assert told.exit_code == 3
    assert message in told.out
    assert list(disk.iterdir()) == []


# pytorch/pytorch issue 10577
def test_too_few_bytes_are_told_before_a_run_with_both_numbers(mount, qcollect_here, small_recipe):
    disk = mount("size=1m")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    arguments = ("--recipe", str(small_recipe), "--target", "200", "--out", str(disk))
    refused = qcollect_here("run", "mxfp8", *arguments)
    assert refused.exit_code == 3
    assert f"{disk}: the captures need about " in refused.err
    assert f" bytes and {free:,} are free; lower --target, or choose another --out" in refused.err
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_disk_without_any_room_is_told_with_what_is_free(mount, qcollect_here, small_recipe, command):
    disk = mount("size=1m,nr_inodes=3")
    for name in ("a", "b"):
        (disk / name).touch()
    words = ("run", "mxfp8") if command == "run" else ("doctor",)
    refused = qcollect_here(*words, "--recipe", str(small_recipe), "--out", str(disk / "out"))
    assert refused.exit_code == 3
    assert f"{disk} cannot be written to: No space left on device (1,048,576 bytes and 0 inodes free)" in (
        refused.err + refused.out
    )


# ---------------------------------------------------------------------------------------------
# Meanwhile
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param(Disk(options="size=4m", kind="bytes", amount=200_000), id="bytes"),
        pytest.param(Disk(options="size=64m,nr_inodes=400", kind="inodes", amount=40), id="inodes"),
    ],
)
def test_a_disk_that_fills_up_ends_the_run_and_leaves_whole_files(
    mount, qcollect_process, small_recipe, tmp_path, disk
):
    folder = mount(disk.options)
    script = tmp_path / "hog.py"
    script.write_text(HOG)
    settings = ("--set", f"script={script}", "--set", "launch.grace_s=5", "--target", "100", "--out", str(folder))
    hog = (str(folder), disk.kind, str(disk.amount), str(TRAIN))
    result = qcollect_process("run", "mxfp8", "--recipe", str(small_recipe), *settings, "--", *hog)

    run_dir = folder / "mxfp8"
    assert (result.exit_code, result.out) == (4, ""), result.err
    headline = next(line for line in result.err.splitlines() if line.startswith("error: "))
    assert f"{run_dir}/" in headline
    assert "No space left on device" in headline
    assert " bytes and " in headline and " inodes free in " in headline
    if disk.kind == "inodes":
        assert " bytes and 0 inodes free in " in headline
    record = json.loads(RunPaths(run_dir).run_path.read_text())
    assert (record["state"], record["exit_code"]) == ("failed", 4)
    captures = sorted(run_dir.glob("*.pt"))
    assert 0 < len(captures) < 100
    for path in captures:
        assert torch.load(path, weights_only=True)["metadata"]["quant_type"] == "mxfp8"
    listed = [json.loads(line)["file"] for p in RunPaths(run_dir).manifest_dir.glob("*") for line in p.open()]
    assert sorted(listed) == [path.name for path in captures]
    assert [p for p in run_dir.iterdir() if p.name.endswith(".tmp")] == []
    assert processes_of(json.loads(RunPaths(run_dir).plan_path.read_text())["run_token"]) == []
