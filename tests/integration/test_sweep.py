"""A sweep leaves folders that can be compared capture by capture, and does again only what is missing.

One sweep for all tests: bf16, mxfp8, mxfp4 and hifp8 over three iterations, of the first and the last
originals and quantized copies; mxfp4 fails in the first call and is done in the second.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import qcollect
from qcollect.paths import RunPaths
from qcollect.store.index import open_run
from qcollect.vocab import CaptureName

pytestmark = pytest.mark.integration

TYPES = ("bf16", "mxfp8", "mxfp4", "hifp8")
NUM_ITERATIONS = 3
CAPTURED = (0, 2)
# a layer: attention 8 tensors and 3 copies, seven linears with 6 tensors and 6 copies
TARGET = 2 * len(CAPTURED) * (11 + 7 * 12)

SCRIPT = """
import os, runpy
from qcollect.recipe.load import bundled_dir
if os.environ["CUSTOM_QUANT_TYPE"] == os.environ.get("TEST_FAILING_TYPE"):
    raise RuntimeError("no such luck")
runpy.run_path(str(bundled_dir() / "train.py"), run_name="__main__")
"""

# the training of the recipe with nothing of the collector in it
BARE_SCRIPT = """
import json, runpy, sys
import torch
from qcollect.recipe.load import bundled_dir, load_recipe
from qcollect.worker.dataset import make_batches
from qcollect.worker.model import build_model

recipe, (out_path, num_iterations) = load_recipe(sys.argv[1]), sys.argv[2:]
bare = runpy.run_path(str(bundled_dir() / "train.py"))
torch.use_deterministic_algorithms(recipe.train.deterministic)
rank, world_size, device = bare["init_ranks"]("cpu")
model = build_model(recipe.model, device=device)
batches = make_batches(recipe, rank=rank, world_size=world_size, vocab_size=model.config.vocab_size)
losses = bare["train"](recipe, model, batches, world_size=world_size, num_iterations=int(num_iterations))
if rank == 0:
    with open(out_path, "w") as file:
        json.dump(losses, file)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, small_recipe):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "train_or_fail.py").write_text(SCRIPT)
    settings = (
        f"script={folder / 'train_or_fail.py'}",
        "capture.values=both",
        "capture.layers=1",
        f"capture.iterations={list(CAPTURED)}",
        "launch.grace_s=2",
    )
    sets = [text for setting in settings for text in ("--set", setting)]
    out = folder / "out"
    return ["--recipe", str(small_recipe), "--target", str(TARGET), "--out", str(out), *sets], out


@pytest.fixture(scope="module")
def first_call(qcollect_here, arguments):
    """With mxfp4 failing: the result, and the trees of the folders after it."""
    args, out = arguments
    return qcollect_here("sweep", "--all", "--baseline", *args, "--json", env={"TEST_FAILING_TYPE": "mxfp4"}), out


@pytest.fixture(scope="module")
def second_call(qcollect_here, arguments, first_call, list_tree):
    args, out = arguments
    before = {name: list_tree(out / name) for name in TYPES}
    return qcollect_here("sweep", "--all", "--baseline", *args, "--json"), before


@pytest.fixture(scope="module")
def runs(second_call, arguments):
    assert second_call[0].exit_code == 0, second_call[0].err
    return {name: open_run(arguments[1] / name) for name in TYPES}


def test_a_failing_member_does_not_keep_the_others_from_being_done(first_call):
    result, out = first_call
    assert result.exit_code == 6
    assert result.json["exit_code"] == 6
    assert [(r["quant_type"], r["state"], r["exit_code"]) for r in result.json["runs"]] == [
        ("bf16", "completed", 0),
        ("mxfp8", "completed", 0),
        ("mxfp4", "failed", 4),
        ("hifp8", "completed", 0),
    ]
    assert "error: mxfp4: rank " in result.err and "failed: RuntimeError: no such luck" in result.err
    assert sorted(path.name for path in out.iterdir()) == sorted(TYPES)


def test_a_second_call_resumes_what_failed_and_leaves_the_rest_alone(second_call, arguments, list_tree):
    (result, before), out = second_call, arguments[1]
    assert result.exit_code == 0, result.err
    assert [(r["quant_type"], r["action"]) for r in result.json["runs"]] == [
        ("bf16", "skip"),
        ("mxfp8", "skip"),
        ("mxfp4", "resume"),
        ("hifp8", "skip"),
    ]
    assert {name for name in TYPES if list_tree(out / name) != before[name]} == {"mxfp4"}
    assert f"mxfp8: complete already: {TARGET} captures" in result.err


def test_a_call_on_a_complete_sweep_starts_and_changes_nothing(
    qcollect_here, arguments, runs, list_tree, nothing_starts
):
    args, out = arguments
    before, started = list_tree(out), time.monotonic()
    result = qcollect_here("sweep", "--all", "--baseline", *args)
    assert result.exit_code == 0
    assert result.out.splitlines() == [str(out / name) for name in TYPES]
    assert list_tree(out) == before
    assert time.monotonic() - started < 30


def test_a_sweep_of_another_recipe_does_not_replace_what_is_there(
    qcollect_here, arguments, runs, list_tree, nothing_starts
):
    args, out = arguments
    before = list_tree(out)
    result = qcollect_here("sweep", "--all", *args, "--set", "train.learning_rate=0.5")
    assert result.exit_code == 3
    assert (
        f"{out / 'mxfp8'} holds a run of other settings: train.learning_rate is 0.001 there and 0.5 now" in result.err
    )
    assert "--overwrite" in result.err
    assert list_tree(out) == before


def test_the_baseline_comes_first(runs):
    started = {name: json.loads(RunPaths(_dir(runs, name)).run_path.read_text())["started_at"] for name in TYPES}
    assert min(started, key=started.get) == "bf16"


def test_keys_and_counters_agree_across_the_members(runs):
    def counters(name):
        return {c.key: CaptureName.parse(c.path.name).counter for c in runs[name]}

    reference = counters("bf16")
    assert len(reference) == TARGET
    for name in TYPES:
        assert counters(name) == reference


def test_all_members_see_the_same_tokens(runs):
    def hashes(name):
        return {(c.metadata["rank"], c.metadata["iteration"]): c.metadata["token_hash"] for c in runs[name]}

    reference = hashes("bf16")
    assert len(set(reference.values())) == len(reference) == 2 * len(CAPTURED)
    for name in TYPES:
        assert hashes(name) == reference


@pytest.mark.parametrize("name", TYPES)
def test_a_quantized_copy_follows_from_its_original_and_is_a_fixed_point(runs, name):
    originals = {_site(c): c for c in runs[name].select(values="original")}
    copies = runs[name].select(values="quantized")
    assert len(copies) == TARGET - 2 * len(CAPTURED) * (8 + 7 * 6)
    for capture in copies:
        (consumer,) = capture.metadata["consumers"]
        original = originals[_site(capture)]
        assert consumer in original.metadata["consumers"]
        assert consumer["quant_type"] == name
        copy = capture.load()
        assert torch.equal(_quantize(original.load(), consumer), copy), capture.path.name
        assert torch.equal(_quantize(copy, consumer), copy), capture.path.name


@pytest.mark.parametrize("name", TYPES[1:])
def test_a_type_is_applied_everywhere_it_is_said_to_be(runs, name):
    """Every operand has copies that differ from it, in each module and for each gemm."""
    originals = {_site(c): c for c in runs[name].select(values="original", iteration=0, rank=0)}
    copies = runs[name].select(values="quantized", iteration=0, rank=0)
    changed = {
        (c.metadata["module"], c.metadata["tensor_name"], c.key.gemm)
        for c in copies
        if not torch.equal(c.load().flatten(), originals[_site(c)].load().flatten())
    }
    assert changed == {(c.metadata["module"], c.metadata["tensor_name"], c.key.gemm) for c in copies}
    baseline = {c.key: c for c in runs["bf16"].select(tensor_name="output", iteration=0, rank=0)}
    outputs = runs[name].select(tensor_name="output", iteration=0, rank=0)
    assert len(outputs) == 8
    assert all(not torch.equal(c.load(), baseline[c.key].load()) for c in outputs)


@pytest.mark.parametrize("name", TYPES)
def test_modules_left_in_high_precision_are_listed(runs, name):
    plan = json.loads(RunPaths(_dir(runs, name)).plan_path.read_text())
    layers = [f"model.layers.{i}.{norm}_layernorm" for i in range(2) for norm in ("input", "post_attention")]
    assert sorted(plan["excluded"]) == sorted(["lm_head", "model.embed_tokens", "model.norm", *layers])
    assert plan["quant_type"] == plan["recipe"]["quant"]["type"] == name


def test_training_without_quantization_is_training_without_qcollect(runs, qcollect_here, small_recipe, tmp_path):
    settings = ("--set", f"capture.iterations=0-{NUM_ITERATIONS - 1}", "--target", str(2 * NUM_ITERATIONS))
    none = qcollect_here("run", "none", "--recipe", str(small_recipe), *settings, "--out", str(tmp_path))
    assert none.exit_code == 0, none.err
    bare = _train_bare(small_recipe, tmp_path, _dir(runs, "bf16"))
    assert len(bare) == NUM_ITERATIONS
    assert _losses(tmp_path / "none") == bare
    assert _losses(_dir(runs, "bf16")) == bare
    assert _losses(_dir(runs, "mxfp8")) != bare


def _train_bare(recipe: Path, tmp_path: Path, run_dir: Path) -> list[float]:
    (tmp_path / "bare.py").write_text(BARE_SCRIPT)
    num_threads = json.loads(RunPaths(run_dir).plan_path.read_text())["env"]["OMP_NUM_THREADS"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = [str(tmp_path / "bare.py"), str(recipe), str(tmp_path / "losses.json"), str(NUM_ITERATIONS)]
    environment = os.environ | {"OMP_NUM_THREADS": num_threads}
    command = [*launcher, "--nproc-per-node", "2", *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses: list[float] = json.loads((tmp_path / "losses.json").read_text())
    return losses


def _losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in RunPaths(run_dir).metrics_path.read_text().splitlines()]


def _dir(runs, name: str) -> Path:
    return runs[name][0].path.parent


def _site(capture):
    m = capture.metadata
    return m["rank"], m["iteration"], m["module"], m["operation"], m["phase"], m["tensor_name"]


def _quantize(tensor, consumer):
    return qcollect.consumed(tensor, consumer)
