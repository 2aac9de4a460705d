"""Ranks that do not do the same: one hangs, one captures less, one never captures at all. Real torch and gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import qcollect
from qcollect.host.processes import find_by_token
from qcollect.paths import RunPaths

pytestmark = pytest.mark.integration
RECIPES = Path(qcollect.__file__).parents[1] / "recipes"

PRELUDE = f"""
import os, sys, time
sys.path.insert(0, {str(RECIPES)!r})
import torch
import torch.distributed as dist
import train
import qcollect
RANK = int(os.environ["RANK"])
"""
# rank 1 does not come to the reduction of the third iteration, whose captures are taken by then
HANGS = (
    PRELUDE
    + """
reduce, calls = train.MasterWeights.reduce, []

def never_join():
    while True:
        time.sleep(0.1)

def reduce_two_iterations(self, divisor):
    calls.append(divisor)
    if RANK == 1 and len(calls) == 3:
        never_join()
    reduce(self, divisor)

train.MasterWeights.reduce = reduce_two_iterations
train.main()
"""
)
COMPILED = (
    PRELUDE
    + """
collect = qcollect.collect

def collect_too_late(model):
    return collect(torch.compile(model, backend="eager"))

qcollect.collect = collect_too_late
train.main()
"""
)
# what is trained is not what is looked at
TRAINS_A_COPY = (
    PRELUDE
    + """
import copy
from contextlib import contextmanager

collect = qcollect.collect

@contextmanager
def collect_from_a_copy(model):
    with collect(copy.deepcopy(model)) as run:
        run.step = lambda **metrics: False
        yield run

qcollect.collect = collect_from_a_copy
train.main()
"""
)


@pytest.fixture
def launch(qcollect_process, small_recipe, tmp_path):
    """``qcollect run`` of a script: (its result as JSON, its files, its run token)."""

    def launch(script, *options):
        path = tmp_path / "script.py"
        path.write_text(script)
        out = tmp_path / "out"
        result = qcollect_process(
            "run",
            "mxfp8",
            "--recipe",
            str(small_recipe),
            "--out",
            str(out),
            "--set",
            f"script={path}",
            "--json",
            *options,
        )
        paths = RunPaths(out / "mxfp8")
        assert paths.run_path.is_file(), result.err
        return result, json.loads(result.out), paths

    yield launch


def assert_nothing_left(paths):
    assert find_by_token(json.loads(paths.run_path.read_text())["run_token"]) == []


def test_rank_that_never_joins_a_collective_is_named_and_what_was_captured_is_whole(launch):
    result, outcome, paths = launch(
        HANGS, "--set=launch.stall_timeout_s=3", "--set=capture.iterations=0-9", "--target=1000"
    )
    assert (result.exit_code, outcome["state"]) == (5, "stalled")
    reason = outcome["reason"]
    assert "no rank moved for 3 s; rank 1 differs from the others; rank 1 at " in reason
    assert "in never_join; rank 0 at " in reason
    for rank in range(2):
        assert f"rank {rank}, pid " in paths.stacks_path(rank).read_text()
    captures = qcollect.open_run(paths.run_dir)
    assert len(captures) == len(list(paths.run_dir.glob("*.pt"))) == outcome["status"]["captured"] > 0
    assert {capture.metadata["iteration"] for capture in captures} == {0, 1, 2}
    assert all(capture.load().numel() for capture in captures)
    assert list(paths.run_dir.glob(".*.tmp")) == []
    assert f"stalled with {len(captures)} of 1000 captures" in reason
    assert_nothing_left(paths)


def test_model_that_was_compiled_before_collect_is_an_error_before_training(launch):
    """Hooks added after torch.compile never fire: pytorch/pytorch issue 117758."""
    result, outcome, paths = launch(COMPILED, "--nproc=1")
    assert result.exit_code == 4
    assert outcome["reason"].startswith(
        "rank 0 failed: UsageError: the model is compiled already (OptimizedModule) and its hooks would never fire; "
        "collect before torch.compile; its log: "
    )
    assert "iteration 0" not in paths.log_path(0).read_text()
    assert_nothing_left(paths)


def test_run_that_captures_nothing_does_not_end_well(launch):
    result, outcome, paths = launch(TRAINS_A_COPY, "--nproc=1", "--set=train.iterations=2")
    assert result.exit_code not in (0, None)
    assert outcome["state"] != "completed"
    assert " 0 of 8 captures" in outcome["reason"]
    assert_nothing_left(paths)


UNEVEN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import qcollect
from qcollect.worker.script import finish

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x, is_used):
        return self.layer(x) if is_used else self.factor * x


model = nn.parallel.DistributedDataParallel(Sometimes(), find_unused_parameters=True)
with qcollect.collect(model, "none", sys.argv[1], 10, tensor_names=["output"], iterations="0-11") as run:
    per_step = []
    for step in range(12):
        before = run.num_captured
        model(torch.ones(3, 4), rank == 0 or step >= 2).square().sum().backward()
        model.zero_grad()
        stop = run.step(loss=1.0)
        per_step.append(run.num_captured - before)
        if stop:
            break
report = {"iterations": run.iteration, "captured": run.num_captured, "per_step": per_step}
open(f"{sys.argv[1]}/report{rank}.json", "w").write(json.dumps(report))
finish()
"""


def test_ranks_that_capture_at_different_rates_leave_together_with_0(tmp_path):
    """pytorch/pytorch issue 75097: the first to have its share leaves, the others hang in a collective."""
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    out = tmp_path / "out"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QCOLLECT_", "TENSOR_", "CUSTOM_"))}
    done = subprocess.run(
        [*torchrun, str(script), str(out)],
        env=kept | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((out / f"report{rank}.json").read_text()) for rank in range(2))
    assert first["per_step"][:5] == [1] * 5
    assert second["per_step"][:2] == [0, 0]
    assert first["iterations"] == second["iterations"] > 5
    assert (first["captured"], second["captured"]) == (5, 5)
    assert len(qcollect.open_run(out)) == 10
