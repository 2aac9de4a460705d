"""Two ranks of which one alone sees a trigger: both capture from the next iteration on."""

import json
import os
import subprocess
import sys

import pytest

import qcollect

PROGRAM = """
import json, math, os, signal, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import qcollect
from qcollect.worker.script import finish

warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
report = {}


def train(name, metrics, **trigger):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with qcollect.collect(model, "none", folder / name, 20, trigger={"iterations": 2, "warmup": 2} | trigger) as run:
        for iteration in range(8):
            model(torch.ones(3, 4)).sum().backward()
            if run.step(**metrics(iteration)):
                break
    event = run.start.event
    report[name] = {"iterations": run.iteration, "captured": run.num_captured, "event": event and event.to_dict()}


def signalled(iteration):
    if rank == 1 and iteration == 3:
        os.kill(os.getpid(), signal.SIGUSR1)
    return {}


train("nan", lambda i: {"loss": math.nan if (rank, i) == (1, 2) else 1.0}, on="nan")
train("spike", lambda i: {"loss": 1.0 + 8 * (rank == 0 and i == 3)}, on="loss_spike")
train("norm", lambda i: {"grad_norm": 1.0 + 8 * (i == 3) * (1 + rank)} if rank else {}, on="grad_norm_jump")
train("both", lambda i: {"loss": 1.0 + (i == 4) * (1 + rank) * 5}, on=["loss_spike", "nan"])
train("signal", signalled, on="signal")
train("nothing", lambda i: {"loss": 1.0}, on=["loss_spike", "nan", "grad_norm_jump", "signal"])
print(json.dumps(report))
finish()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(the folder, what rank 0 and rank 1 say)"""
    folder = tmp_path_factory.mktemp("ranks")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TENSOR_SAVE", "QCOLLECT", "CUSTOM_QUANT"))}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
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


def event(on, iteration, rank, metric=None, value=None, reference=None):
    return {"on": on, "iteration": iteration, "rank": rank, "metric": metric, "value": value, "reference": reference}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nan", event("nan", 2, 1, "loss", "nan")),
        ("spike", event("loss_spike", 3, 0, "loss", 9.0, 1.0)),
        ("norm", event("grad_norm_jump", 3, 1, "grad_norm", 17.0, 1.0)),
        ("both", event("loss_spike", 4, 0, "loss", 6.0, 1.0)),
        ("signal", event("signal", 3, 1)),
    ],
)
def test_what_one_rank_sees_begins_captures_on_all(two_ranks, name, expected):
    folder, reports = two_ranks
    start = expected["iteration"] + 1
    assert [r[name] for r in reports] == [{"iterations": start + 2, "captured": 10, "event": expected}] * 2
    found = {(c.metadata["rank"], c.metadata["iteration"]) for c in qcollect.open_run(folder / name)}
    assert found == {(rank, iteration) for rank in range(2) for iteration in (start, start + 1)}
    assert all(c.metadata["trigger"] == expected for c in qcollect.open_run(folder / name))


def test_without_a_trigger_both_train_to_the_end(two_ranks):
    assert [r["nothing"] for r in two_ranks[1]] == [{"iterations": 8, "captured": 0, "event": None}] * 2
