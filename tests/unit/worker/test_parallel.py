"""Weights spread over two ranks, by FSDP2 and by tensor parallelism: gloo, CPU, all in one pair of processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import qcollect
from qcollect.formats.quantizer import Quantizer, bind_consumer, fake_quantize
from qcollect.worker.tokens import hash_tokens

pytestmark = pytest.mark.integration

PROGRAM = """
import json, os, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import qcollect
from qcollect.formats.quantizer import Quantizer
from qcollect.tensor_saver import save_tensor
from qcollect.worker.script import finish

warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
report = {}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def step(model, **inputs):
    output = model(**inputs)
    (output.loss if hasattr(output, "loss") else output.square().sum()).backward()
    grads = [whole(p.grad) for p in model.parameters()]
    model.zero_grad()
    return [whole(output.logits if hasattr(output, "logits") else output).detach(), *grads]


def train(name, model, quant_type, target, num_steps=1, **inputs):
    plain = step(model, **inputs)
    with qcollect.collect(model, quant_type, folder / name, target) as run:
        for _ in range(num_steps):
            captured = step(model, **inputs)
            done = run.step()
    report[name] = {
        "done": done,
        "captured": run.num_captured,
        "same": all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True)),
    }
    return captured


model = MLP()
for layer in (model.up, model.down, model):
    fully_shard(layer)
x = (torch.arange(128.0).reshape(4, 32) / 128 + rank).requires_grad_()
grads = train("fsdp", model, "none", 24, x=x)[1:]
report["fsdp_weight"] = type(model.up.weight).__name__
torch.save(grads[0], folder / f"fsdp_grad{rank}.pt")

same_x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
train("tp", parallelize_module(MLP(), mesh, plan), "none", 24, x=same_x)
spread_x = distribute_tensor(same_x.detach(), mesh, [Shard(0)])
train("tp_spread_input", parallelize_module(MLP(), mesh, plan), "none", 24, x=spread_x)
# an odd target: one rank has its share one capture earlier, and still takes part in the scales of the other
train("tp_nvfp4", parallelize_module(MLP(), mesh, plan), "nvfp4", 23, num_steps=2, x=same_x)

torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=8,
                num_key_value_heads=2, max_position_embeddings=64, use_cache=False)
).train()
layer = llama.model.layers[0]
names = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "o_proj": 0, "gate_proj": 1, "up_proj": 1, "down_proj": 0}
for name, module in layer.named_modules():
    if isinstance(module, nn.Linear):
        parallelize_module(module, mesh, ColwiseParallel() if names[name.rsplit(".", 1)[-1]] else RowwiseParallel())
ids = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(1))
train("llama", llama, "none", 100, input_ids=ids, labels=ids)
train("llama_fp8", llama, "fp8_e4m3", 100, input_ids=ids, labels=ids)
settings = {"mode": "stats", "num_iterations": 1, "shadow": ["nvfp4"]}
with qcollect.collect(llama, "fp8_e4m3", folder / "llama_stats", **settings) as run:
    step(llama, input_ids=ids, labels=ids)
    report["stats_done"] = run.step()

matrix = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
quantizer = Quantizer.create("nvfp4", hadamard=16)
parts = distribute_tensor(matrix, mesh, [Shard(0)])
report["rotated"] = torch.equal(quantizer.amax_of(parts), quantizer.amax_of(matrix))
save_tensor(parts, "linear", "forward", tensor_name="weight", quant_type="none")
print(json.dumps(report))
finish()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(the folder, what rank 0 and rank 1 say)"""
    folder = tmp_path_factory.mktemp("parallel")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TENSOR_SAVE", "QCOLLECT", "CUSTOM_QUANT"))}
    env |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TENSOR_SAVE_DIR": str(folder / "by_hand")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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


def captures(folder, **wanted):
    """The captures of both ranks, first rank 0's."""
    found = list(qcollect.open_run(folder).select(**wanted))
    assert [c.metadata["rank"] for c in found] == [0, 1]
    return found


def test_training_of_weights_that_are_spread_is_unchanged(two_ranks):
    _, reports = two_ranks
    for report in reports:
        for name, num_captured in (("fsdp", 12), ("tp", 12), ("llama", 50)):
            assert report[name] == {"done": True, "captured": num_captured, "same": True}
        assert report["tp_nvfp4"]["done"]
        assert not report["tp_nvfp4"]["same"]
    assert sorted(report["tp_nvfp4"]["captured"] for report in reports) == [11, 12]


def test_weight_sharded_by_fsdp_is_whole_in_the_file(two_ranks):
    folder, reports = two_ranks
    assert reports[0]["fsdp_weight"] == "DTensor"
    first, second = captures(folder / "fsdp", module="up", tensor_name="weight")
    assert first.load().shape == (128, 32)
    assert torch.equal(first.load(), second.load())
    assert first.metadata["sharding"] is None


def test_weight_gradient_under_fsdp_is_the_ranks_own_before_reduction(two_ranks):
    folder, _ = two_ranks
    first, second = (c.load() for c in captures(folder / "fsdp", module="up", tensor_name="grad_weight"))
    assert not torch.equal(first, second)
    torch.testing.assert_close((first + second) / 2, torch.load(folder / "fsdp_grad0.pt"))


def test_tensor_parallel_rank_saves_its_part_and_where_it_lies(two_ranks):
    folder, _ = two_ranks
    expected = {
        ("up", "input"): ([4, 32], [4, 32], [0, 0], "Replicate"),
        ("up", "weight"): ([64, 32], [128, 32], [64, 0], "Shard(0)"),
        ("up", "output"): ([4, 64], [4, 128], [0, 64], "Shard(1)"),
        ("up", "grad_input"): ([4, 32], [4, 32], [0, 0], "Partial(sum)"),
        ("down", "weight"): ([32, 64], [32, 128], [0, 64], "Shard(1)"),
        ("down", "grad_weight"): ([32, 64], [32, 128], [0, 64], "Shard(1)"),
        ("down", "output"): ([4, 32], [4, 32], [0, 0], "Partial(sum)"),
    }
    for (module, name), (shape, global_shape, offset, placement) in expected.items():
        _, second = captures(folder / "tp", module=module, tensor_name=name)
        assert list(second.load().shape) == second.tensor_info["shape"] == shape
        assert second.metadata["sharding"] == {
            "global_shape": global_shape,
            "offset": offset,
            "placements": [placement],
            "mesh_shape": [2],
            "mesh_dim_names": ["tp"],
            "mesh_coordinate": [1],
        }


def test_input_that_is_spread_is_hashed_as_the_ranks_part(two_ranks):
    folder, _ = two_ranks
    same_x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    both = captures(folder / "tp_spread_input", module="up", tensor_name="weight")
    assert [c.metadata["token_hash"] for c in both] == [hash_tokens(part) for part in same_x.split(2)]


@pytest.mark.parametrize(("module", "dim"), [("up", 0), ("down", 1)])
def test_parts_are_quantized_by_the_scale_of_the_whole(two_ranks, module, dim):
    folder, _ = two_ranks
    both = captures(folder / "tp_nvfp4", module=module, tensor_name="weight")
    for gemm, axis in (("fprop", 1), ("dgrad", 0)):
        entries = [next(e for e in c.metadata["consumers"] if e["gemm"] == gemm) for c in both]
        assert {e["amax_scope"] for e in entries} == {"2 ranks"}
        parts = [qcollect.consumed(c.load(), e) for c, e in zip(both, entries, strict=True)]
        whole = torch.cat([c.load() for c in both], dim=dim)
        assert torch.equal(torch.cat(parts, dim=dim), fake_quantize(whole, "nvfp4", axis))
    (entry, *_) = captures(folder / "tp_nvfp4", module="up", tensor_name="input")[0].metadata["consumers"]
    assert entry["amax_scope"] == "local"  # every rank has all of it


def test_scale_of_a_transformed_whole_is_found_from_its_parts(two_ranks):
    assert all(report["rotated"] for report in two_ranks[1])


def test_kernel_that_runs_on_a_ranks_heads_says_which(two_ranks):
    folder, _ = two_ranks
    for name, shape, dim in (
        ("query", [2, 4, 6, 8], 1),
        ("grad_key", [2, 1, 6, 8], 1),
        ("output", [2, 6, 4, 8], 2),
        ("grad_output", [2, 6, 4, 8], 2),
    ):
        _, second = captures(folder / "llama_fp8", layer_type="attention", tensor_name=name)
        sharding = second.metadata["sharding"]
        assert list(second.load().shape) == shape
        assert sharding["global_shape"] == [size * (1 + (i == dim)) for i, size in enumerate(shape)]
        assert sharding["offset"] == [shape[dim] if i == dim else 0 for i in range(4)]
        assert sharding["placements"] == [f"Shard({dim})"]
    both = captures(folder / "llama_fp8", layer_type="attention", tensor_name="query")
    largest = max(c.tensor_info["abs_max"] for c in both)
    for capture in both:
        (entry,) = capture.metadata["consumers"]
        assert (entry["amax"], entry["amax_scope"]) == (largest, "2 ranks")


def test_statistics_are_those_of_the_ranks_part(two_ranks):
    folder, reports = two_ranks
    assert all(report["stats_done"] for report in reports)
    files = {c.key: c for c in qcollect.open_run(folder / "llama_fp8")}
    lines = {c.key: c for c in qcollect.open_run(folder / "llama_stats")}
    assert len(lines) == 2 * 95 and files.keys() <= lines.keys()
    for key, capture in lines.items():
        file = files[replace(key, values="original", gemm=None)]
        assert capture.metadata["sharding"] == file.metadata["sharding"] or key.gemm
        if key.gemm is None:
            assert capture.tensor_info == file.tensor_info
            continue
        (entry,) = capture.metadata["consumers"]
        assert entry == next(e for e in file.metadata["consumers"] if e["gemm"] == key.gemm)
        part = file.load().reshape(entry["shape"])
        assert capture.errors["fp8_e4m3"] == bind_consumer(part, entry).with_stats(histograms=False)[1].describe()
        alone = Quantizer.create("nvfp4", axis=entry["axis"]).apply_with_stats(part)[1]
        assert capture.errors["nvfp4"] == alone.describe()


def test_part_saved_by_hand_is_that_of_the_rank(two_ranks):
    folder, _ = two_ranks
    both = captures(folder / "by_hand", tensor_name="weight")
    assert torch.equal(
        torch.cat([c.load() for c in both]), torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    )
    assert [c.metadata["sharding"]["offset"] for c in both] == [[0, 0], [4, 0]]
