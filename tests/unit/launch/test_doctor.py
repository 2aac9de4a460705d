"""What a run needs is looked at in the order a run would come upon it; what cannot be told is said to be so."""

import json
from dataclasses import replace

import pytest

from qcollect.errors import DatasetError, DeviceError, ExitCode, PreflightError, UsageError
from qcollect.host.facts import DiskSpace
from qcollect.host.machine import MachineFacts
from qcollect.launch import preflight
from qcollect.launch.claim import ClaimMode, claim
from qcollect.launch.doctor import examine
from qcollect.plan.finding import Finding, Level
from qcollect.plan.inspection import Inspection
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.load import load_recipe
from qcollect.vocab import LayerType

GIB = 1 << 30
FACTS = MachineFacts(
    system="Linux",
    has_proc=True,
    python=(3, 12, 1),
    packages={"torch": "2.13.0", "transformers": "5.24.0", "safetensors": "0.8.0", "tokenizers": "0.23.3"},
    host_name="node7",
    host_name_problem=None,
    loopback_problem=None,
    available_bytes=64 * GIB,
    max_open_files=20_000,
    shared_memory_bytes=8 * GIB,
    device_files=(),
)
HEADS = dict.fromkeys(("query", "key", "value", "output"), (1, 2, 4, 4))
ATTENTION = ModuleSites(
    module="model.layers.0.self_attn",
    layer_type=LayerType.ATTENTION,
    layer_idx=0,
    shapes=HEADS | {f"grad_{name}": shape for name, shape in HEADS.items()},
)
INSPECTION = Inspection(
    modules=(ATTENTION,),
    excluded=("lm_head",),
    vocab_size=320,
    num_parameters=1000,
    device="cpu",
    device_names=(),
    num_samples=288,
    findings=(Finding.ok("checkpoint", "none is needed"), Finding.ok("data", "enough")),
)


@pytest.fixture
def look(tmp_path):
    """Examine ``tiny`` with these settings, on this machine, with this answer of the worker or this error of it."""

    def run(*settings, facts=FACTS, answer=INSPECTION):
        def look_at(recipe):
            if isinstance(answer, Exception):
                raise answer
            return answer

        recipe = load_recipe("tiny", ["capture.target=8", *settings])
        return examine(recipe, out_dir=tmp_path / "out", now=0.0, facts=facts, look_at=look_at)

    return run


def found(result, level):
    return [(f.check, f.text) for f in result.findings if f.level == level]


def test_where_nothing_is_amiss_every_check_says_so(look, tmp_path):
    result = look()
    assert [f.check for f in result.findings] == [
        *("system", "python", "torch", "transformers", "port", "host_name", "open_files"),
        *("script", "quant", "output", "checkpoint", "data", "devices", "capture", "memory", "space"),
    ]
    assert {f.level for f in result.findings} == {Level.OK}
    assert (result.exit_code, result.not_checked) == (ExitCode.OK, ())
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_told_in_a_line(look):
    messages = {
        f.check: f.message for f in look("capture.target=24", "launch.nproc=2", "capture.iterations=0-1").findings
    }
    assert messages["capture"] == "24 captures of mxfp8 in 2 iteration(s) by 2 process(es) on cpu"
    assert messages["quant"] == "mxfp8; swept: mxfp8, mxfp4, hifp8"


def test_json_holds_every_finding_under_the_same_keys(look):
    fields = json.loads(json.dumps(look().to_dict()))
    assert list(fields) == ["recipe", "exit_code", "num_problems", "num_warnings", "not_checked", "findings"]
    assert {tuple(f) for f in fields["findings"]} == {("check", "level", "message", "advice")}
    assert (fields["recipe"], fields["exit_code"], fields["num_problems"]) == ("tiny", 0, 0)


# ---------------------------------------------------------------------------------------------
# Problems
# ---------------------------------------------------------------------------------------------


def test_on_another_system_only_the_machine_is_looked_at(look):
    result = look(facts=replace(FACTS, system="Darwin"))
    assert [check for check, _ in found(result, Level.PROBLEM)] == ["system"]
    assert result.not_checked == ("output", "checkpoint", "data", "tokenizer", "devices", "capture", "memory", "space")


def test_without_torch_what_needs_it_is_not_checked(look):
    result = look(facts=replace(FACTS, packages={**FACTS.packages, "torch": None}), answer=AssertionError())
    assert [check for check, _ in found(result, Level.PROBLEM)] == ["torch"]
    assert result.exit_code == ExitCode.PREFLIGHT
    assert result.not_checked == ("checkpoint", "data", "tokenizer", "devices", "capture", "memory", "space")


@pytest.mark.parametrize(
    ("error", "check", "text"),
    [
        (
            PreflightError("the model cannot be inspected:\nlast line"),
            "inspection",
            "the model cannot be inspected:\nlast line",
        ),
        (DeviceError("--gpu-ids 9 is out of range; give such"), "devices", "--gpu-ids 9 is out of range; give such"),
        (UsageError("--gpu-ids x is no device; give an index"), "devices", "--gpu-ids x is no device; give an index"),
    ],
)
def test_an_inspection_that_fails_is_a_problem_of_its_own(look, error, check, text):
    result = look(answer=error)
    assert found(result, Level.PROBLEM) == [(check, text)]
    assert "memory" in result.not_checked


def test_what_the_worker_found_is_told_with_what_it_stands_before(look):
    missing = Finding.problem("checkpoint", "no model", "get one")
    result = look(
        answer=replace(INSPECTION, modules=(), findings=(missing, Finding.of_error("data", DatasetError("none"))))
    )
    assert found(result, Level.PROBLEM) == [("checkpoint", "no model; get one"), ("data", "none")]
    assert result.not_checked == ("capture", "memory", "space")


def test_a_script_that_is_not_there_is_a_problem(look, tmp_path):
    ((check, text),) = found(look(f"script={tmp_path}/gone.py"), Level.PROBLEM)
    assert check == "script"
    assert text.startswith(f"script {tmp_path}/gone.py does not exist; name the training script in the recipe")


def test_a_folder_with_a_run_is_a_problem_as_it_is_for_run(look, make_plan, tmp_path):
    claim(make_plan(tmp_path / "out" / "mxfp8"), mode=ClaimMode.NEW, now=0.0)
    ((check, text),) = found(look(), Level.PROBLEM)
    assert check == "output"
    assert text.startswith(f"{tmp_path}/out/mxfp8 is in use by run run-one")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("capture.target=9", "target 9 is more than this run can produce: 8 files"),
        ("capture.modules=*.q_prj", "capture.modules: '*.q_prj' matches nothing"),
        ("launch.device=cuda", "launch.device is 'cuda', and this machine's torch sees 'cpu' only"),
        ("launch.show_ranks=7", "launch.show_ranks is [7]: index 7 does not exist"),
    ],
)
def test_a_plan_that_cannot_be_made_is_a_problem(look, setting, text):
    result = look(setting)
    ((check, told),) = found(result, Level.PROBLEM)
    assert check == "capture" and text in told
    assert result.not_checked == ("memory", "space")


def test_memory_and_space_that_do_not_suffice_are_told_together(look, monkeypatch):
    monkeypatch.setattr("qcollect.launch.doctor.disk_space", lambda path: DiskSpace(free_bytes=1, free_inodes=None))
    result = look(facts=replace(FACTS, available_bytes=1000))
    assert [check for check, _ in found(result, Level.PROBLEM)] == ["memory", "space"]
    assert result.exit_code == ExitCode.PREFLIGHT


# ---------------------------------------------------------------------------------------------
# Warnings
# ---------------------------------------------------------------------------------------------


def test_warnings_forbid_nothing(look):
    facts = replace(FACTS, host_name_problem="Name or service not known", max_open_files=256)
    result = look(facts=facts)
    assert [check for check, _ in found(result, Level.WARNING)] == ["host_name", "open_files"]
    assert (result.exit_code, result.count(Level.WARNING)) == (ExitCode.OK, 2)


def test_a_target_too_small_for_backward_is_warned_of_once(look):
    result = look("capture.target=1")
    assert [check for check, _ in found(result, Level.WARNING)] == ["capture"]


def test_what_the_worker_warns_of_is_told_once(look):
    odd = Finding.warning("data", "odd data", "look at them")
    result = look(answer=replace(INSPECTION, findings=(odd,)))
    assert found(result, Level.WARNING) == [("data", "odd data; look at them")]


def test_a_sweep_that_would_be_refused_is_a_warning_for_a_run(look):
    ((check, text),) = found(look("quant.scale_rule=ceil"), Level.WARNING)
    assert check == "quant"
    assert text == (
        "'sweep --all' would be refused: recipe tiny with quant type hifp8: quant.scale_rule is 'ceil', and hifp8 "
        "takes none; leave it out"
    )


def test_space_for_one_run_but_not_for_the_sweep_is_a_warning(look, monkeypatch, tmp_path):
    monkeypatch.setattr("qcollect.launch.doctor.disk_space", lambda path: DiskSpace(free_bytes=GIB, free_inodes=40))
    result = look()
    ((check, text),) = found(result, Level.WARNING)
    assert check == "space"
    assert text == (
        f"'sweep --all' would be refused: {tmp_path}/out: the run makes 99 files and 40 inodes are free; "
        "lower --target, or choose another --out"
    )
    assert result.exit_code == ExitCode.OK


# ---------------------------------------------------------------------------------------------
# The same for a run
# ---------------------------------------------------------------------------------------------


def test_what_doctor_calls_a_problem_refuses_a_run(look, tmp_path, monkeypatch):
    """The functions a run calls raise exactly what is found here."""
    (tmp_path / "out").write_text("a file")
    ((_, text),) = found(look(), Level.PROBLEM)
    with pytest.raises(PreflightError) as refused:
        preflight.check_output(tmp_path / "out" / "mxfp8", mode=ClaimMode.NEW, now=0.0)
    assert str(refused.value) == text
