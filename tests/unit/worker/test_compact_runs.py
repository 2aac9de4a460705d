"""Runs whose captures are stored compactly: the same tensors as without, found, verified, shown and resumed alike."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import qcollect
import qcollect.errors
from qcollect.cli import app
from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.store.compact import is_same
from qcollect.store.manifest import read_manifest
from qcollect.vocab import CaptureKey


@pytest.fixture
def train(make_llama, tokens):
    def train(*, seed=0):
        model = make_llama(num_hidden_layers=2, seed=seed)
        ids = tokens(2, 6)
        with qcollect.collect(model) as run:
            for _ in range(3):
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad()
                if run.step():
                    break
        return run

    return train


def with_capture(recipe, **settings):
    return replace(recipe, capture=replace(recipe.capture, **settings))


def loaded(run_dir):
    return {c.key: c.load() for c in qcollect.open_run(run_dir)}


COMPACT = [
    {"storage": "codes"},
    {"storage": "codes", "scales": True},
    {"compress": "zstd"},
    {"storage": "codes", "compress": "zstd"},
]


@pytest.fixture
def plain_tensors(plan, recipe, train, tmp_path, monkeypatch):
    """What a run without any of it captures, by key."""
    run_dir = plan(with_capture(recipe, values="both", target=120)).run_dir
    train()
    tensors = loaded(run_dir)
    run_dir.rename(tmp_path / "plain")
    return tensors


@pytest.mark.parametrize("settings", COMPACT, ids=str)
def test_a_compact_run_holds_the_same_tensors(plan, recipe, train, plain_tensors, settings):
    if "compress" in settings:
        pytest.importorskip("zstandard")
    planned = plan(with_capture(recipe, values="both", target=120, **settings))
    train()
    run = qcollect.open_run(planned.run_dir)
    tensors = loaded(planned.run_dir)
    assert tensors.keys() == plain_tensors.keys()
    assert all(is_same(tensors[key], plain_tensors[key]) for key in tensors)
    for capture in run:
        if settings.get("storage") == "codes" and capture.metadata["values"] == "quantized":
            assert capture.metadata["storage"] == "codes"
        elif "compress" not in settings:
            assert capture.metadata["storage"] == "values"
    if settings.get("storage") == "codes":
        assert len(run.select(storage="codes")) > 50


@pytest.mark.parametrize("settings", [{}, *COMPACT, {"tokens": "0-2"}, {"scales": True}], ids=str)
@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4", "hif4", "mxint8", "hifp8"])
def test_the_plan_foresees_the_bytes(plan, recipe, make_llama, tokens, quant_type, settings):
    if "compress" in settings:
        pytest.importorskip("zstandard")
    planned = plan(with_capture(recipe, values="both", target=120, **settings), quant_type)
    model, ids = make_llama(num_hidden_layers=2), tokens(2, 6)
    with qcollect.collect(model) as run:
        model(input_ids=ids, labels=ids).loss.backward()
        run.step()
    written = sum(path.stat().st_size for path in planned.run_dir.glob("*.pt"))
    assert run.saver.num_saved == 120
    assert written <= planned.schedule.num_bytes()
    # what is planned of a tensor is what it takes; what is around it is a bound
    by_tensor = {c.tensor: c.num_bytes for c in planned.schedule.captures}
    if "compress" not in settings:
        for path in planned.run_dir.glob("*q_proj_input_fprop.pt"):
            overhead = path.stat().st_size - by_tensor["q_proj_input_fprop"]
            assert 0 < overhead < 4096


def test_a_compact_run_is_resumed(plan, recipe, train):
    planned = plan(with_capture(recipe, values="both", target=120, storage="codes", scales=True))
    paths = RunPaths(planned.run_dir)
    train()
    before = loaded(planned.run_dir)
    whole = paths.manifest_path(0).read_bytes().splitlines(keepends=True)
    for record in read_manifest(paths.manifest_path(0))[50:]:
        (paths.run_dir / record.file).unlink()
    paths.manifest_path(0).write_bytes(b"".join(whole[:50]))
    run = train()
    assert (run.num_captured, run.saver.num_saved) == (120, 70)
    after = loaded(planned.run_dir)
    assert after.keys() == before.keys()
    assert all(is_same(after[key], before[key]) for key in before)


@pytest.fixture
def of_tokens(plan, recipe, make_llama, tokens):
    """A run of long sequences, half of whose tokens are stored, to be interrupted and gone on with."""
    recipe = replace(recipe, data=replace(recipe.data, sequence_length=128))
    recipe = with_capture(recipe, values="both", target=120, storage="codes", tokens="every:2")
    planned = plan(recipe)

    def train(seed=0):
        model, ids = make_llama(num_hidden_layers=2, seed=seed, max_position_embeddings=128), tokens(2, 128)
        with qcollect.collect(model) as run:
            model(input_ids=ids, labels=ids).loss.backward()
            run.step()
        return run

    return planned, train


def test_rows_are_those_of_the_whole_tensors(of_tokens):
    planned, train = of_tokens
    train()
    run = qcollect.open_run(planned.run_dir)
    for capture in run:
        tensor, m = capture.load(), capture.metadata
        if m["tensor_name"] in ("weight", "grad_weight"):
            assert m["stored_rows"] is None
            continue
        axis = m["stored_rows"]["axis"]
        shape = list(capture.tensor_info["shape"])
        assert shape[axis] == m["stored_rows"]["of"]
        shape[axis] //= 2
        assert (list(tensor.shape), m["stored_rows"]["num"]) == (shape, shape[axis])
    # an original, what its gemms consumed of it by its rows, and the rows of what they did consume
    (original,) = run.select(module="model.layers.0.self_attn.q_proj", tensor_name="input", values="original")
    copies = run.select(module="model.layers.0.self_attn.q_proj", tensor_name="input", values="quantized")
    assert len(copies) == 2
    for consumer, copy in zip(original.metadata["consumers"], copies, strict=True):
        assert is_same(qcollect.consumed(original.load(), consumer), copy.load())
    written = sum(path.stat().st_size for path in planned.run_dir.glob("*.pt"))
    assert written <= planned.schedule.num_bytes()


def test_a_run_of_rows_is_resumed_and_another_training_noticed(of_tokens):
    planned, train = of_tokens
    train()
    paths = RunPaths(planned.run_dir)
    last = read_manifest(paths.manifest_path(0))[-1]
    (paths.run_dir / last.file).unlink()
    run = train()
    assert (run.num_captured, run.saver.num_saved) == (120, 1)
    (paths.run_dir / read_manifest(paths.manifest_path(0))[-1].file).unlink()
    with pytest.raises(CaptureError, match=r"computed again to resume the run, is not what .*elements differ"):
        train(seed=1)


def test_commands_know_compact_files(plan, recipe, train):
    planned = plan(with_capture(recipe, values="both", target=120, storage="codes"))
    train()
    run = CliRunner()
    assert run.invoke(app, ["verify", str(planned.run_dir)]).exit_code == 0
    listed = run.invoke(app, ["ls", str(planned.run_dir), "--where", "storage=codes", "--columns", "storage,file"])
    assert listed.exit_code == 0
    file = listed.stdout.splitlines()[1].split()[1]
    shown = run.invoke(app, ["show", str(planned.run_dir / file)])
    assert shown.exit_code == 0
    tensor = qcollect.load(planned.run_dir / file)
    assert f"first values: {' '.join(repr(v) for v in tensor.flatten()[:8].tolist())}" in shown.stdout
    assert f"shape: {'x'.join(map(str, tensor.shape))}" in shown.stdout
    manifest = RunPaths(planned.run_dir).manifest_path(0)
    lines = manifest.read_bytes()
    manifest.write_bytes(b"")
    assert run.invoke(app, ["verify", str(planned.run_dir), "--repair"]).exit_code == 0
    assert sorted(manifest.read_bytes().splitlines()) == sorted(lines.splitlines())


def test_collect_takes_the_same_settings(make_llama, tokens, train_llama, tmp_path):
    settings = {"values": "quantized", "storage": "codes", "tokens": [0], "scales": True}
    train_llama(make_llama(), tokens(1, 8), "mxfp4", tmp_path / "run", 30, **settings)
    captures = qcollect.open_run(tmp_path / "run")
    assert {c.metadata["storage"] for c in captures} == {"codes", "values"}
    with pytest.raises(qcollect.errors.UsageError, match="capture.storage is 'codes', and with capture.values"):
        train_llama(make_llama(), tokens(1, 8), "mxfp4", tmp_path / "other", 30, storage="codes")
    assert isinstance(CaptureKey.from_metadata(captures[0].metadata), CaptureKey)
    assert isinstance(captures[0].load(), torch.Tensor)
