"""A tensor's own scale follows from all of it, also where ranks hold parts: two processes, gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qcollect.paths
from qcollect.formats.quantizer import Quantizer, fake_quantize
from qcollect.formats.scope import amax_scope

pytestmark = pytest.mark.integration

WORKER = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from qcollect.errors import FormatError
from qcollect.formats.quantizer import Quantizer
from qcollect.formats.scope import amax_scope
from qcollect.worker.script import finish

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.load(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
part = x.chunk(2)[rank].contiguous()
report = {}
for quant_type in ("nvfp4", "fp8_e4m3"):
    quantizer = Quantizer.create(quant_type)
    amax = quantizer.amax_of(part, group=dist.group.WORLD)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    assert torch.equal(quantizer.amax_of(sharded), amax)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, quantizer.apply(part, amax=amax))
    report[quant_type] = torch.cat(parts).tolist()
report["scopes"] = [amax_scope(part), amax_scope(part, dist.group.WORLD), amax_scope(sharded)]
with_nan = part.clone()
with_nan[0, 0] = float("nan") if rank else 1.0
report["nan"] = bool(Quantizer.create("fp8_e4m3").amax_of(with_nan, group=dist.group.WORLD).isnan())
try:
    Quantizer.create("nvfp4").amax_of(DTensor.from_local(part, mesh, [Partial()]))
except FormatError as error:
    report["partial"] = str(error)
if rank == 0:
    json.dump(report, open(sys.argv[2], "w"))
finish()
"""


@pytest.fixture(scope="module")
def x():
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    values[1, 3] = 30.0  # the largest is in the first rank's part
    return values


@pytest.fixture(scope="module")
def report(x, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "worker.py").write_text(WORKER)
    torch.save(x, folder / "x.pt")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(folder / "worker.py"), str(folder / "x.pt"), str(folder / "report.json")],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(qcollect.paths.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("quant_type", ["nvfp4", "fp8_e4m3"])
def test_parts_quantized_by_ranks_are_the_whole_tensor_quantized(report, x, quant_type):
    assert torch.equal(torch.tensor(report[quant_type]), fake_quantize(x, quant_type))
    alone = torch.cat([fake_quantize(part, quant_type) for part in x.chunk(2)])
    assert not torch.equal(alone, fake_quantize(x, quant_type))


def test_scope_of_the_maximum_is_told(report, x):
    assert report["scopes"] == ["local", "2 ranks", "2 ranks"]
    assert amax_scope(x) == "local"


def test_nan_on_another_rank_is_not_lost(report):
    assert report["nan"]


def test_partial_sums_are_refused(report):
    assert report["partial"].endswith("has no values to quantize; redistribute it first.")


def test_types_without_such_a_scale_ask_for_nothing(x):
    assert Quantizer.create("mxfp8").amax_of(x) is None
