"""A user's own format from its file to the captures, which are read without that file.

One run for all tests: two iterations' worth of a small model, originals and quantized copies, the format of
the recipe in one gemm replaced by a second one.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch

import qcollect
from qcollect.formats.custom import quant_type_of
from qcollect.formats.quantizer import consumed, fake_quantize
from qcollect.paths import RunPaths
from qcollect.tensor_saver import TensorSaver

pytestmark = pytest.mark.integration

TARGET = 40
FP6 = """\
name: my_fp6
element: {exponent_bits: 4, mantissa_bits: 1}
block_size: 32
scale: E8M0
scale_rules: [rceil, floor]
"""
FP5 = "name: nv_fp5\nelement: {exponent_bits: 3, mantissa_bits: 1}\nblock_size: 16\nscale: [E4M3, tensor]\n"
OVERRIDE = "quant.overrides={wgrad: {type: fp5.yaml}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "fp6.yaml").write_text(FP6)
    (folder / "fp5.yaml").write_text(FP5)
    return folder


@pytest.fixture(scope="module")
def arguments(small_recipe):
    recipe = ("--recipe", str(small_recipe), "--nproc", "1", "--target", str(TARGET))
    return (*recipe, "--set", "capture.values=both", "--set", OVERRIDE)


@pytest.fixture(scope="module")
def run_dir(qcollect_here, arguments, folder):
    result = qcollect_here("run", "fp6.yaml", *arguments, cwd=folder)
    assert result.exit_code == 0, result.err
    return Path(result.out.strip())


def captures(run_dir):
    files = [torch.load(path, weights_only=True) for path in sorted(run_dir.glob("*.pt"))]
    return [(file["tensor"], file["metadata"]) for file in files]


def test_folder_files_and_plan_carry_the_name(run_dir, folder):
    assert run_dir == folder / "enhanced_tensor_logs" / "my_fp6"
    assert len(list(run_dir.glob("*_my_fp6_rank0_*.pt"))) == TARGET
    quant = json.loads(RunPaths(run_dir).plan_path.read_text())["recipe"]["quant"]
    assert (quant["type"], list(quant["formats"])) == ("my_fp6", ["my_fp6", "nv_fp5"])
    assert quant["overrides"] == {"wgrad": {"type": "nv_fp5"}}


def test_copies_follow_from_the_originals_by_what_their_files_hold(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the formats' files are not
    originals = {(m["module"], m["tensor_name"]): x for x, m in captures(run_dir) if m["values"] == "original"}
    copies = [(x, m) for x, m in captures(run_dir) if m["values"] == "quantized"]
    assert {m["consumers"][0]["quant_type"] for _, m in copies} == {"my_fp6", "nv_fp5"}
    for copy, metadata in copies:
        (consumer,) = metadata["consumers"]
        assert torch.equal(consumed(originals[metadata["module"], metadata["tensor_name"]], consumer), copy)


def test_copies_are_values_of_the_format(run_dir):
    for copy, metadata in captures(run_dir):
        if metadata["values"] != "quantized" or metadata["consumers"][0]["quant_type"] != "my_fp6":
            continue
        (consumer,) = metadata["consumers"]
        entry = quant_type_of("my_fp6", consumer["definition"])
        assert torch.equal(fake_quantize(copy, entry, consumer["axis"], scale_rule="rceil"), copy)


def test_catalog_types_have_no_definition_in_the_file(small_recipe, qcollect_here, tmp_path):
    arguments = ("--recipe", str(small_recipe), "--nproc", "1", "--target", "2")
    result = qcollect_here("run", "mxfp8", *arguments, cwd=tmp_path)
    assert result.exit_code == 0, result.err
    consumers = [c for _, m in captures(Path(result.out.strip())) for c in m["consumers"]]
    assert consumers
    assert all(c["definition"] is None for c in consumers)


def test_changed_definition_is_another_run(run_dir, qcollect_here, arguments, folder):
    (folder / "fp6.yaml").write_text(FP6.replace("mantissa_bits: 1", "mantissa_bits: 1, bias: 6"))
    result = qcollect_here("run", "fp6.yaml", *arguments, "--resume", cwd=folder)
    assert result.exit_code == 3
    assert "quant.formats.my_fp6.element.min_exponent is -6 there and -5 now" in result.err
    (folder / "fp6.yaml").write_text(f"# the same in other words\n{FP6}description: ''\n")
    again = qcollect_here("run", "--quant", "fp6.yaml", *arguments, "--resume", cwd=folder)
    assert (again.exit_code, again.out.strip()) == (0, str(run_dir)), again.err


def test_sweep_takes_files_among_names(small_recipe, qcollect_here, folder, nothing_starts):
    quants = ("--quant", "mxfp4", "--quant", "fp5.yaml", "--quant", "fp5.yaml", "--baseline")
    result = qcollect_here("sweep", *quants, "--recipe", str(small_recipe), "--dry-run", "--json", cwd=folder)
    assert result.exit_code == 0, result.err
    assert [plan["quant_type"] for plan in result.json] == ["bf16", "mxfp4", "nv_fp5"]


def test_faulty_file_is_refused_before_anything_starts(qcollect_here, folder, nothing_starts):
    (folder / "bad.yaml").write_text(FP6.replace("E8M0", "E9M0").replace("my_fp6", "bf16"))
    for command in (("run", "bad.yaml"), ("sweep", "--quant", "bad.yaml"), ("formats", "bad.yaml")):
        result = qcollect_here(*command, cwd=folder)
        assert result.exit_code == 2
        assert "bad.yaml:1: name is 'bf16'; the catalog has bf16 already" in result.err
        assert "bad.yaml:4: scale is 'E9M0'; known: E8M0, " in result.err


def test_collect_takes_a_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a target this small reaches no backward capture
        run = qcollect.collect(model, quant_type="fp5.yaml", out_dir=tmp_path / "run", target=4, values="both")
    with run:
        model(torch.randn(8, 32)).square().sum().backward()
        run.step()
    found = captures(tmp_path / "run")
    assert {m["quant_type"] for _, m in found} == {"nv_fp5"}
    assert all(c["definition"]["scale"] == ["E4M3", "tensor"] for _, m in found for c in m["consumers"])


def test_saver_takes_a_file_and_the_name_of_a_planned_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    assert TensorSaver(tmp_path, quant_type="fp5.yaml").quant_type == "nv_fp5"
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "my_fp6")
    monkeypatch.setenv("QCOLLECT_PLAN", "plan.json")
    assert TensorSaver(tmp_path).quant_type == "my_fp6"
