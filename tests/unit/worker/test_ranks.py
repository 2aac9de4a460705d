"""Two processes, as on two nodes: global ranks 0 and 1, both with local rank 0."""

import json
import os
import subprocess
import sys

import pytest
import torch

import qcollect
from qcollect.vocab import CaptureName

PROGRAM = """
import json, os, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import qcollect
from qcollect.errors import QcollectError
from qcollect.tensor_saver import save_linear_tensors
from qcollect.worker.script import finish

warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
report = {}

# by hand, before there is a process group
for _ in range(3):
    save_linear_tensors(torch.full((2,), float(rank)), torch.zeros(2), "mxfp8", "forward", layer_idx=0)

try:
    qcollect.collect(nn.Linear(2, 2), "none", folder / "early", 6)
except QcollectError as error:
    report["early"] = [type(error).__name__, str(error)]

dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def train(name, target, num_iterations=8, **settings):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)))
    # the first linear of rank 0 has one gradient more: it can capture 12 tensors a step, rank 1 only 11
    x = torch.full((3, 4), 1.0 + rank, requires_grad=rank == 0)
    with qcollect.collect(model, "none", folder / name, target, **settings) as run:
        for _ in range(num_iterations):
            model(x).square().sum().backward()
            grad = model.module[2].weight.grad.tolist()
            model.zero_grad()
            if run.step(loss=1.0):
                break
    report[name] = {"iterations": run.iteration, "captured": run.num_captured, "share": run.share, "grad": grad}


train("even", 10)
train("uneven", 24)
train("odd", 7)
train("second_only", 5, ranks=[1])
try:
    train("even", 10)
except QcollectError as error:
    report["again"] = [type(error).__name__, str(error)]
stop = folder / "stopped" / ".qcollect" / "control" / "stop"


class StopAtTwo(nn.ReLU):
    def forward(self, x):
        if rank == 1 and run.iteration == 1:
            stop.parent.mkdir(exist_ok=True)
            stop.touch()
        return super().forward(x)


model = nn.Sequential(nn.Linear(4, 4), StopAtTwo())
with qcollect.collect(model, "none", folder / "stopped", 24, iterations="0-9") as run:
    while True:
        model(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        if run.step():
            break
report["stopped"] = run.iteration
print(json.dumps(report))
finish()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(the folder, what rank 0 and rank 1 say)"""
    folder = tmp_path_factory.mktemp("ranks")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TENSOR_SAVE", "QCOLLECT", "CUSTOM_QUANT"))}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "TENSOR_SAVE_DIR": str(folder / "by_hand"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    processes = [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_saves_by_hand_into_one_folder_are_all_there_with_their_global_rank(two_ranks):
    """Writers told apart by LOCAL_RANK overwrite each other: NVIDIA/apex issue 886."""
    folder, _ = two_ranks
    names = [path.name for path in (folder / "by_hand").glob("*.pt")]
    assert len(names) == 2 * 6
    assert sorted(CaptureName.parse(name).rank for name in names) == [0] * 6 + [1] * 6
    run = qcollect.open_run(folder / "by_hand")
    assert len(run) == 12
    for rank in range(2):
        captures = run.select(rank=rank, tensor_name="input")
        assert [c.load().tolist() for c in captures] == [[float(rank)] * 2] * 3
        assert {(c.metadata["local_rank"], c.metadata["world_size"]) for c in captures} == {(0, 2)}


def test_collected_files_carry_the_global_rank_and_share_the_target(two_ranks):
    folder, reports = two_ranks
    assert [r["even"] for r in reports] == [
        {"iterations": 1, "captured": 5, "share": 5, "grad": reports[0]["even"]["grad"]} for _ in range(2)
    ]
    run = qcollect.open_run(folder / "even")
    assert len(list((folder / "even").glob("*.pt"))) == len(run) == 10
    assert [c.metadata["rank"] for c in run] == [0] * 5 + [1] * 5
    assert {c.metadata["local_rank"] for c in run} == {0}
    assert [c.metadata["sample_idx"] for c in run] == [0] * 5 + [3] * 5
    assert {c.metadata["module"] for c in run} == {"2"}  # the name without the wrapper


def test_ranks_stop_together_and_none_below_its_share(two_ranks):
    """A rank that leaves early lets the others hang in a collective: pytorch/pytorch issue 75097."""
    folder, reports = two_ranks
    assert [(r["uneven"]["iterations"], r["uneven"]["captured"]) for r in reports] == [(2, 12), (2, 12)]
    assert len(list((folder / "uneven").glob("*.pt"))) == 24
    assert [(r["odd"]["iterations"], r["odd"]["captured"]) for r in reports] == [(1, 4), (1, 3)]
    assert [(r["second_only"]["iterations"], r["second_only"]["captured"]) for r in reports] == [(1, 0), (1, 5)]


def test_weight_gradient_is_the_ranks_own_before_reduction(two_ranks):
    folder, reports = two_ranks
    run = qcollect.open_run(folder / "uneven").select(module="2", tensor_name="grad_weight", iteration=0)
    first, second = (capture.load() for capture in run)
    assert not first.equal(second)
    torch.testing.assert_close((first + second) / 2, torch.tensor(reports[0]["uneven"]["grad"]))
    assert reports[0]["uneven"]["grad"] == reports[1]["uneven"]["grad"]


def test_taken_folder_is_refused_on_every_rank(two_ranks):
    folder, reports = two_ranks
    assert reports[0]["again"] == [
        "OutputError", f"{folder}/even holds a run already; give another out_dir, or remove that run",
    ]  # fmt: skip
    assert reports[1]["again"] == ["OutputError", f"{folder}/even could not be taken; rank 0 says why"]


def test_ranks_without_a_process_group_are_told_to_make_one(two_ranks):
    folder, reports = two_ranks
    assert [r["early"] for r in reports] == [
        [
            "UsageError",
            "WORLD_SIZE is 2, and the ranks share the target and the folder: call "
            "torch.distributed.init_process_group before collect",
        ]
    ] * 2
    assert not (folder / "early").exists()


def test_stop_seen_by_one_rank_stops_all_after_the_same_iteration(two_ranks):
    _, reports = two_ranks
    assert [r["stopped"] for r in reports] == [2, 2]
