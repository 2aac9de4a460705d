"""Capture mode stats: the numbers of mode tensors without its files, and further types beside, training untouched."""

import json
import os
import threading
import traceback
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qcollect
from qcollect.cli import app
from qcollect.errors import CaptureError, FormatError, UsageError
from qcollect.formats.error_stats import describe_totals
from qcollect.formats.quantizer import Quantizer, bind_consumer
from qcollect.formats.resolved import Quantizer as Resolved
from qcollect.paths import RunPaths
from qcollect.recipe.records import CaptureSpec
from qcollect.store.manifest import read_manifest
from qcollect.vocab import CaptureKey
from qcollect.worker import lines
from qcollect.worker.state import STATE

NUM_ITERATIONS = 2


@pytest.fixture
def train(make_llama, tokens):
    """SGD from the same weights on the same tokens; the losses and the collector."""

    def train(out_dir, quant_type, *, micro_batches=1, dtype=torch.bfloat16, **settings):
        STATE.clear()
        model = make_llama(dtype=dtype, num_hidden_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        settings = {"num_iterations": NUM_ITERATIONS, "micro_batches": micro_batches, "seed": 3} | settings
        with qcollect.collect(model, quant_type, out_dir, **settings) as run:
            for iteration in range(20):
                for micro_batch in range(micro_batches):
                    ids = tokens(2, 6, seed=10 * iteration + micro_batch)
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                if run.step():
                    break
        return losses, run

    return train


def by_key(run_dir):
    return {capture.key: capture for capture in qcollect.open_run(run_dir)}


def recomputed(original, consumer):
    """The errors of one use of a captured original by the formats' own interface."""
    binding = bind_consumer(original.reshape(consumer["shape"]), consumer)
    return binding.with_stats(histograms=False)[1].describe()


HADAMARD = {"overrides": {"wgrad": {"hadamard": 4}, "dgrad": {"type": "mxfp4"}}}
CASES = [
    ("mxfp8", {}),
    ("mxfp4", {"rounding": "stochastic"}),
    ("mxfp4", {"weight_block_size": [16, 16]}),
    ("hifp8", {}),
    ("nvfp4", {}),
    ("fp8_e4m3", {}),
    ("bf16", {}),
    ("mxfp8", HADAMARD),
    ("mxfp8", {"attention": "none", "exclude": "*.o_proj"}),
]


@pytest.mark.parametrize(("quant_type", "quant"), CASES, ids=str)
def test_numbers_are_those_of_the_tensors(train, tmp_path, quant_type, quant):
    _, counted = train(tmp_path / "count", quant_type, mode="stats", num_iterations=1, **quant)
    settings = {"values": "both", "iterations": "all", "target": counted.num_captured * NUM_ITERATIONS}
    losses, _ = train(tmp_path / "tensors", quant_type, **settings, **quant)
    stats_losses, run = train(tmp_path / "stats", quant_type, mode="stats", **quant)
    assert stats_losses == losses
    assert not list((tmp_path / "stats").rglob("*.pt"))
    tensors, stats = by_key(tmp_path / "tensors"), by_key(tmp_path / "stats")
    assert tensors.keys() == stats.keys()
    assert len(stats) == run.num_captured == settings["target"]
    originals = {(k.module, k.tensor_name, k.iteration): c for k, c in tensors.items() if k.values == "original"}
    for key, capture in stats.items():
        expected = tensors[key].metadata
        moment = {name: expected[name] for name in lines.MOMENT_FIELDS if name != "save_time"}
        assert capture.metadata.items() >= moment.items()
        same = ("module", "layer_type", "layer_idx", "operation", "phase", "token_layout", "quant_type", "loss_scale")
        assert [capture.metadata[name] for name in same] == [expected[name] for name in same]
        if key.values == "original":
            assert capture.tensor_info == tensors[key].tensor_info
            assert (capture.errors, capture.metadata["consumers"]) == ({}, [])
            continue
        (consumer,) = expected["consumers"]
        assert capture.metadata["consumers"] == [consumer]
        original = originals[key.module, key.tensor_name, key.iteration].load()
        assert capture.errors == {consumer["quant_type"]: recomputed(original, consumer)}
        assert capture.tensor_info.items() <= tensors[key].tensor_info.items()


@pytest.mark.parametrize("quant_type", ["bf16", "none", "mxfp8"])
def test_shadow_types_are_measured_on_the_same_originals_and_leave_training_alone(train, tmp_path, quant_type):
    shadow = ["mxfp8", "mxfp4", "hifp8", "nvfp4"]
    quant = {"scale_rule": None, "attention": "none"} if quant_type == "none" else {}
    settings = {"values": "original", "iterations": "all", "target": 2 * 100}
    losses, _ = train(tmp_path / "tensors", quant_type, **settings, **quant)
    shadow_losses, run = train(tmp_path / "stats", quant_type, mode="stats", shadow=shadow, **quant)
    assert shadow_losses == losses
    originals = {(k.module, k.tensor_name, k.iteration): c for k, c in by_key(tmp_path / "tensors").items()}
    num_operands = 0
    for key, capture in by_key(tmp_path / "stats").items():
        if key.values == "original":
            continue
        num_operands += 1
        own = [] if quant_type == "none" else [quant_type]
        assert list(capture.errors) == [*own, *(name for name in shadow if name not in own)]
        original = originals[key.module, key.tensor_name, key.iteration].load()
        (consumer,) = capture.metadata["consumers"]
        for name in shadow:
            tensor_scale = name == "hifp8"
            quantizer = Quantizer.create(
                name, axis=consumer["axis"], tensor_scale=tensor_scale, saturate=tensor_scale or None
            )
            _, stats = quantizer.apply_with_stats(original.reshape(consumer["shape"]))
            assert capture.errors[name] == stats.describe()
    assert num_operands == NUM_ITERATIONS * 2 * 45
    assert run.num_captured == NUM_ITERATIONS * 2 * 95


def test_shadow_takes_the_rules_that_apply_to_it(train, tmp_path):
    quant = {"scale_rule": "rceil", "overrides": {"dgrad": {"block_size": 64}, "wgrad": {"type": "mxfp8"}}}
    train(tmp_path / "run", "mxfp4", mode="stats", values="quantized", shadow=["mxfp8_e5m2", "hifp8"], **quant)
    train(tmp_path / "tensors", "mxfp4", values="original", target=100, iterations=[0], **quant)
    originals = {(k.module, k.tensor_name): c for k, c in by_key(tmp_path / "tensors").items()}
    for key, capture in by_key(tmp_path / "run").items():
        if key.iteration or key.gemm not in ("dgrad", "wgrad"):
            continue
        (consumer,) = capture.metadata["consumers"]
        # the override of a gemm's type says nothing about another type
        size = 64 if key.gemm == "dgrad" else None
        quantizer = Resolved.create("mxfp8_e5m2", axis=consumer["axis"], scale_rule="rceil", block_size=size)
        original = originals[key.module, key.tensor_name].load().reshape(consumer["shape"])
        assert capture.errors["mxfp8_e5m2"] == quantizer.apply_with_stats(original)[1].describe()


def test_formats_of_ones_own_are_shadow_types(train, tmp_path):
    path = tmp_path / "my4.yaml"
    path.write_text("name: my4\nelement: {exponent_bits: 2, mantissa_bits: 1}\nblock_size: 32\nscale: E8M0\n")
    train(tmp_path / "run", "bf16", mode="stats", num_iterations=1, shadow=[str(path), "mxfp4"])
    assert all("my4" in c.errors for c in qcollect.open_run(tmp_path / "run").select(values="quantized"))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"values": "original"}, 2 * 50),
        ({"values": "quantized"}, 2 * 45),
        ({"layers": [1]}, 95),
        ({"tensor_names": "query"}, 4),
        ({"operations": "forward", "values": "original"}, 2 * 25),
    ],
    ids=str,
)
def test_selectors_choose_as_ever(train, tmp_path, settings, count):
    _, run = train(tmp_path / "run", "mxfp8", mode="stats", **settings)
    counts = [sum(k.iteration == i for k in by_key(tmp_path / "run")) for i in range(NUM_ITERATIONS)]
    assert counts == [count] * NUM_ITERATIONS
    assert run.num_captured == sum(counts)


def test_every_micro_batch_and_iteration_is_taken(train, tmp_path):
    _, run = train(tmp_path / "run", "mxfp8", mode="stats", micro_batches=3, num_iterations=4, iterations="every:2")
    keys = by_key(tmp_path / "run").keys()
    assert {(k.iteration, k.micro_batch) for k in keys} == {(i, m) for i in (0, 2) for m in range(3)}
    assert len({k.sample_idx for k in keys}) == 6
    assert run.sink.counts.num_written == len(keys)
    hashes = {c.metadata["token_hash"] for c in qcollect.open_run(tmp_path / "run")}
    assert len(hashes) == 6


@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "fp8_e4m3", "hifp8"])
def test_training_asks_no_tensor_for_its_numbers(train, tmp_path, monkeypatch, quant_type):
    """On a device it would wait for them; the losses are asked for by the test itself."""
    waited = []
    for name in ("tolist", "__float__", "__int__", "__bool__"):
        asked = getattr(torch.Tensor, name)

        def watched(tensor, asked=asked):
            frames = traceback.extract_stack()
            if threading.current_thread() is threading.main_thread() and tensor.is_floating_point():
                waited.extend(frame for frame in frames[:-1] if f"{os.sep}qcollect{os.sep}worker" in frame.filename)
            return asked(tensor)

        monkeypatch.setattr(torch.Tensor, name, watched)
    _, run = train(tmp_path, quant_type, mode="stats", shadow=["mxfp4", "nvfp4", "fp8_e5m2"])
    assert run.num_captured > 0
    assert not waited


def test_q_k_and_v_share_the_measurement_of_their_input(train, tmp_path, monkeypatch):
    from qcollect.worker import statistics

    measured = []
    monkeypatch.setattr(statistics, "summarize", lambda x, out, _: measured.append(x) or out.zero_())
    train(tmp_path / "run", "mxfp8", mode="stats", values="original", tensor_names="input", num_iterations=1)
    assert len(qcollect.open_run(tmp_path / "run")) == 14
    assert len(measured) == 2 * 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_give_the_lines_of_the_run_without(make_llama, tokens, tmp_path, use_reentrant):
    def train(name, prepare):
        STATE.clear()
        model = prepare(make_llama(num_hidden_layers=2))
        ids = tokens(2, 6)
        with qcollect.collect(model, "mxfp4", tmp_path / name, mode="stats", num_iterations=1, shadow=["hifp8"]) as run:
            model(input_ids=ids, labels=ids).loss.backward()
            assert run.step()
        return by_key(tmp_path / name)

    def checkpointed(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return model

    plain, recomputing = train("plain", lambda model: model), train("recomputing", checkpointed)
    assert plain.keys() == recomputing.keys()
    for key, capture in recomputing.items():
        assert capture.errors == plain[key].errors
        names = plain[key].tensor_info.keys() - {"requires_grad", "is_leaf"}
        assert all(capture.tensor_info[name] == plain[key].tensor_info[name] for name in names)


def test_a_value_that_changes_in_place_afterwards_was_measured_before(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with qcollect.collect(model, "mxfp8", tmp_path / "run", mode="stats", num_iterations=1) as run:
        model(x).square().sum().backward()
        assert run.step()
    (output,) = qcollect.open_run(tmp_path / "run").select(module="0", tensor_name="output")
    assert output.tensor_info["min"] < 0


def test_shared_memory_that_was_changed_is_measured_again(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            with torch.no_grad():
                x.mul_(2)
            return y + self.b(x)

    x = torch.randn(4, 8)
    with qcollect.collect(Twice(), "mxfp8", tmp_path / "run", mode="stats", num_iterations=1, tensor_names="input",
                          operations="forward", values="original") as run:  # fmt: skip
        run.model(x).sum()
        run.step()
    a, b = qcollect.open_run(tmp_path / "run").select(tensor_name="input")
    assert b.tensor_info["max"] == 2 * a.tensor_info["max"]


def test_what_does_not_come_makes_the_run_no_longer(tmp_path):
    class WithSpare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear1, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear1(x)

    model, x = WithSpare(), torch.randn(4, 8)
    with (
        pytest.warns(UserWarning, match="not called in iteration 0: spare; nothing is captured there"),
        qcollect.collect(model, "mxfp8", tmp_path / "run", mode="stats", num_iterations=3) as run,
    ):
        model(x).square().sum().backward()
        while not run.step():
            model(x).square().sum().backward()
    assert run.iteration == 3
    keys = by_key(tmp_path / "run")
    assert len(keys) == run.share == 3 * (5 + 4)  # neither grad_input nor what only dgrad reads
    assert {k.module for k in keys} == {"linear1"}


def test_values_that_are_no_numbers_are_null_or_counted(tmp_path):
    model = nn.Linear(32, 4, bias=False)
    x = torch.full((2, 32), float("nan"))
    with qcollect.collect(
        model, "hifp8", tmp_path / "run", mode="stats", num_iterations=1, tensor_names="input"
    ) as run:
        model(x).sum().backward()
        run.step()
    text = RunPaths(tmp_path / "run").manifest_path(0).read_text()
    records = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [r["tensor_info"]["num_nan"] for r in records if not r.get("errors")] == [64]
    assert [r["tensor_info"]["mean"] for r in records if not r.get("errors")] == [None]
    errors = [r["errors"]["hifp8"] for r in records if r.get("errors")]
    assert [(e["num_nan"], e["mse"], e["sqnr_db"]) for e in errors] == [(64, 0.0, None)] * 2


def test_a_manifest_that_cannot_be_written_ends_the_training(train, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qcollect.store.files.LineFile.append_encoded", fail)
    with pytest.raises(CaptureError, match="rank00000.jsonl: cannot be written: No space left on device"):
        train(tmp_path / "run", "mxfp8", mode="stats")
    with pytest.warns(UserWarning, match="captures could not be written"):
        train(tmp_path / "run2", "mxfp8", mode="stats", on_error="continue")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tokens": "0-63"}, "capture.tokens is '0-63', and with capture.mode stats no file has it"),
        ({"storage": "codes"}, "capture.storage is 'codes', and with capture.mode stats no file has it"),
        ({"scales": True}, "capture.scales is True, and with capture.mode stats no file has it"),
        ({"compress": "zstd"}, "capture.compress is 'zstd', and with capture.mode stats no file has it"),
        ({"host_memory_gb": 1.0}, "capture.host_memory_gb is 1.0, and with capture.mode stats no file has it"),
        ({"layout": "by_iteration"}, "capture.layout is 'by_iteration', and with capture.mode stats no file has it"),
        ({"durability": "file"}, "capture.durability is 'file', and with capture.mode stats there are no files"),
        ({"shadow": ["none"]}, "capture.shadow names none, which quantizes nothing"),
        ({"shadow": ["mxfp9"]}, "mxfp9"),
        (
            {"shadow": ["mxfp4"], "values": "original"},
            "capture.shadow is mxfp4, and capture.values 'original' measures",
        ),
    ],
    ids=str,
)
def test_settings_of_files_are_refused_by_name(train, tmp_path, settings, text):
    with pytest.raises((UsageError, FormatError), match=text):
        train(tmp_path / "run", "mxfp8", mode="stats", **settings)
    assert not (tmp_path / "run").exists()


def test_errors_alone_of_a_run_that_quantizes_nothing_are_refused(train, tmp_path):
    with pytest.raises(UsageError, match="nothing that is captured is quantized"):
        train(tmp_path / "run", "none", mode="stats", values="quantized")


# ---- planned runs: the commands, and going on ----------------------------------------------------


@pytest.fixture
def stats_recipe(recipe):
    return replace(recipe, capture=CaptureSpec(mode="stats", shadow=("mxfp4",)))


@pytest.fixture
def train_planned(make_llama, tokens):
    def train(*, seed=0, num_iterations=3):
        STATE.clear()
        model = make_llama(num_hidden_layers=2, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with qcollect.collect(model) as run:
            for iteration in range(num_iterations):
                ids = tokens(2, 6, seed=iteration)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step():
                    break
        return run

    return train


def without_time(path):
    found = []
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        del record["metadata"]["save_time"]
        found.append(record)
    return found


@pytest.mark.parametrize("num_kept", [0, 1, 189, 250, 569, 570])
def test_a_resumed_run_keeps_its_lines_and_adds_the_others(plan, stats_recipe, train_planned, num_kept):
    planned = plan(stats_recipe)
    path = RunPaths(planned.run_dir).manifest_path(0)
    run = train_planned()
    before, content = without_time(path), path.read_bytes().splitlines(keepends=True)
    assert len(before) == planned.schedule.target == run.num_captured
    torn = content[num_kept][:20] if num_kept < len(content) else b""
    path.write_bytes(b"".join(content[:num_kept]) + torn)
    run = train_planned()
    assert (run.num_captured, run.sink.counts.num_written) == (len(before), len(before) - num_kept)
    after = path.read_bytes().splitlines(keepends=True)
    assert after[:num_kept] == content[:num_kept]
    assert sorted(map(json.dumps, without_time(path))) == sorted(map(json.dumps, before))


def test_a_training_that_does_not_repeat_itself_is_not_gone_on_with(plan, stats_recipe, train_planned):
    path = RunPaths(plan(stats_recipe).run_dir).manifest_path(0)
    train_planned()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:50]))
    before = path.read_bytes()
    with pytest.raises(
        CaptureError, match="computed again to resume the run, is not what its line in the manifest says"
    ):
        train_planned(seed=1)
    assert path.read_bytes() == before


def test_commands_read_a_run_of_statistics(plan, stats_recipe, train_planned):
    planned = plan(stats_recipe)
    train_planned()
    run_dir = str(planned.run_dir)
    verify = CliRunner().invoke(app, ["verify", run_dir])
    count = f"{planned.schedule.target:,}"
    assert verify.exit_code == 0, verify.output
    assert f"0 files, 0 bytes, {count} lines of statistics, {count} of {count} planned: all is well" in verify.output
    ls = CliRunner().invoke(app, ["ls", run_dir, "--where", "gemm=fprop", "--where", "layer_idx=0"])
    assert "mxfp4.sqnr_db" in ls.output.splitlines()[0] and "file" not in ls.output.splitlines()[0].split()
    listed = CliRunner().invoke(app, ["ls", run_dir, "--limit", "1", "--where", "gemm=wgrad", "--json"])
    (described,) = json.loads(listed.stdout)
    assert (described["path"], described["file"]) == (None, None)
    assert described["errors"].keys() == {"mxfp8", "mxfp4"}
    ordered = CliRunner().invoke(
        app, ["ls", run_dir, "--columns", "mxfp4.mse,module", "--sort", "-mxfp4.mse", "--limit", "3"]
    )
    assert ordered.exit_code == 0 and len(ordered.output.splitlines()) == 4
    status = CliRunner().invoke(app, ["status", run_dir, "--once", "--json"])
    (snapshot,) = (
        json.loads(status.stdout)["runs"] if "runs" in json.loads(status.stdout) else json.loads(status.stdout)
    )
    assert (snapshot["captured"], snapshot["num_files"]) == (planned.schedule.target, 0)
    assert snapshot["bytes"] == RunPaths(planned.run_dir).manifest_path(0).stat().st_size


def test_verify_finds_and_mends_what_is_wrong_with_lines(plan, stats_recipe, train_planned):
    planned = plan(stats_recipe)
    train_planned()
    path = RunPaths(planned.run_dir).manifest_path(0)
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*content[1:], content[1], content[2][:30]]))
    found = CliRunner().invoke(app, ["verify", str(planned.run_dir)])
    assert found.exit_code == 4
    assert "lists the statistics of" in found.output and "its last line was not ended" in found.output
    assert "which is planned" in found.output
    mended = CliRunner().invoke(app, ["verify", str(planned.run_dir), "--repair"])
    assert mended.exit_code == 4  # one is missing still
    assert path.read_bytes() == b"".join(content[1:])
    assert CliRunner().invoke(app, ["verify", str(planned.run_dir), "--repair"]).output.count("1 finding") == 1


def test_the_plan_has_everything_and_says_so(plan, stats_recipe):
    planned = plan(stats_recipe)
    schedule = planned.schedule
    assert schedule.num_files == 0
    assert schedule.target == 3 * len(schedule.captures)
    from qcollect.cli.dry_run import describe_plan

    text = "\n".join(describe_plan(planned))
    assert f"files: 0; lines of statistics in the manifests: {schedule.target:,}, about" in text
    assert f"3 iterations (0 to 2), 3 micro-batches with {len(schedule.captures)} lines of statistics each" in text


def test_the_manifest_is_as_large_as_was_said(plan, stats_recipe, train_planned):
    planned = plan(stats_recipe)
    train_planned()
    size = RunPaths(planned.run_dir).manifest_path(0).stat().st_size
    assert 0.85 < size / planned.schedule.num_bytes() < 1.15


def test_records_are_those_of_the_plan(plan, stats_recipe, train_planned):
    planned = plan(stats_recipe)
    train_planned()
    keys = [CaptureKey.from_metadata(r.metadata) for r in read_manifest(RunPaths(planned.run_dir).manifest_path(0))]
    assert len(set(keys)) == len(keys) == planned.schedule.target


def test_totals_of_nothing_are_zero():
    assert describe_totals([0.0] * 8, 0)["mse"] == 0.0
    assert describe_totals([0.0] * 8, 0)["sqnr_db"] is None


def test_lines_of_gradients_alone_where_both_orientations_are_the_last_that_is_wanted(train, tmp_path):
    settings = {"mode": "stats", "values": "quantized", "tensor_names": ["grad_output"], "modules": ["*q_proj"]}
    _, run = train(tmp_path / "run", "mxfp8", **settings)
    assert run.sink.counts.num_written == NUM_ITERATIONS * 2 * 2
    assert {key.gemm for key in by_key(tmp_path / "run")} == {"dgrad", "wgrad"}
