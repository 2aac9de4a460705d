import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from qcollect.cli import main
from qcollect.cli.dry_run import describe_plan, print_plans
from qcollect.plan.devices import RankDevice, assign_devices
from qcollect.plan.inspection import Inspection
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut, ModuleSites
from qcollect.recipe.records import TriggerSpec
from qcollect.vocab import LayerType


def lines_of(plan):
    return list(describe_plan(plan))


def test_the_command_can_be_pasted(make_plan):
    plan = make_plan(Path('/my runs/été "x" $HOME;ls/mxfp8'))
    plan = replace(
        plan,
        env={"TENSOR_SAVE_DIR": str(plan.run_dir), "EMPTY": ""},
        unset=("RANK", "MASTER_PORT"),
        torchrun_argv=("torchrun", "-m", "qcollect.worker", "two words", "", "$HOME;ls", "'"),
    )
    lines = lines_of(plan)
    assert shlex.split(lines[lines.index("command:") + 1]) == [
        *("env", "-u", "RANK", "-u", "MASTER_PORT", f"TENSOR_SAVE_DIR={plan.run_dir}", "EMPTY="),
        *plan.torchrun_argv,
    ]
    assert f"  TENSOR_SAVE_DIR={plan.run_dir}" in lines
    assert f"  {plan.run_dir}  the captures" in lines


def test_ranks_with_the_same_captures_are_told_together(make_plan):
    plan = make_plan(world_size=3)
    cut = Cut(iteration=0, micro_batch=0, count=1, start=0)
    plan = replace(plan, schedule=replace(plan.schedule, cuts=(*plan.schedule.cuts[:2], (cut,))))
    lines = [line.strip() for line in lines_of(plan)]
    assert "ranks 0 to 1: 3 captures each" in lines
    assert "rank 2: 1 capture" in lines
    assert "1 to    3  model.layers.0.self_attn: query, query, query" in lines


def test_modules_in_high_precision_are_told_once_for_all_layers(make_plan):
    excluded = ("model.layers.0.norm", "model.layers.1.norm", "lm_head")
    assert "left in high precision: model.layers.*.norm, lm_head" in lines_of(replace(make_plan(), excluded=excluded))


def test_bytes_that_may_be_saved_are_an_upper_bound(make_plan):
    plan = make_plan()
    last = lines_of(plan)[-1]
    recipe = replace(plan.recipe, capture=replace(plan.recipe.capture, dedupe=True))
    assert lines_of(replace(plan, recipe=recipe))[-1] == f"{last}, less what capture.dedupe saves"


def test_several_plans_end_with_their_sum(make_plan, capsys):
    print_plans([make_plan(name="one"), make_plan(name="two")], as_json=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("in total: 2 runs, 12 files, about ")
    assert shown.out.endswith("; nothing was started\n")


def test_json_is_one_plan_that_can_be_read_back_or_a_list(make_plan, capsys):
    plan = make_plan()
    print_plans([plan], as_json=True)
    fields = json.loads(capsys.readouterr().out)
    assert Plan.from_dict(fields) == plan
    assert fields["num_bytes"] == plan.schedule.num_bytes()
    print_plans([plan, plan], as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_ranks_are_told_with_their_devices_down_to_the_gpu(make_plan, capsys):
    uuids = ("8932f937-d72c-4106-c12f-20bd9faed9f6", "1b2c3d4e-0000-1111-2222-333344445555")
    devices = assign_devices(2, "cuda", ("NVIDIA H100",) * 2, uuids, visible_value="4,6", is_pci_order=True)
    plan = replace(make_plan(), device="cuda", devices=devices)
    lines = lines_of(plan)
    start = lines.index("devices:")
    assert lines[start + 1 : start + 3] == [
        "  rank 0, local rank 0: cuda:0 = CUDA_VISIBLE_DEVICES entry 4 = NVIDIA H100 "
        "(GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, index 4 of nvidia-smi)",
        "  rank 1, local rank 1: cuda:1 = CUDA_VISIBLE_DEVICES entry 6 = NVIDIA H100 "
        "(GPU-1b2c3d4e-0000-1111-2222-333344445555, index 6 of nvidia-smi)",
    ]
    print_plans([plan], as_json=True)
    fields = json.loads(capsys.readouterr().out)
    assert fields["devices"][1] == {
        "rank": 1,
        "local_rank": 1,
        "device": "cuda:1",
        "device_index": 1,
        "visible_device": "6",
        "gpu_name": "NVIDIA H100",
        "gpu_uuid": "GPU-1b2c3d4e-0000-1111-2222-333344445555",
        "gpu_index": 6,
    }
    assert Plan.from_dict(fields) == plan


def test_what_is_not_known_of_a_device_is_left_out(make_plan):
    plan = replace(make_plan(), devices=assign_devices(2, "cpu", ()))
    assert "  rank 1, local rank 1: cpu" in lines_of(plan)
    bare = RankDevice(rank=0, local_rank=0, device="cuda:0", device_index=0, gpu_name="A\x1b[31m")
    assert "  rank 0, local rank 0: cuda:0 = A\\x1b[31m" in lines_of(replace(plan, devices=(bare,)))


# ---------------------------------------------------------------------------------------------
# The command, on a machine whose torch sees four GPUs
# ---------------------------------------------------------------------------------------------

SITES = ModuleSites(
    module="model.layers.0.self_attn",
    layer_type=LayerType.ATTENTION,
    layer_idx=0,
    shapes={
        f"{prefix}{name}": (1, 2, 4, 4) for prefix in ("", "grad_") for name in ("query", "key", "value", "output")
    },
)


@pytest.fixture
def dry_run(monkeypatch, tmp_path, capsys):
    """(exit code, stdout, stderr) of a dry run where so many GPUs are visible under this CUDA_VISIBLE_DEVICES."""

    def run(*flags, value=None, num_visible=4):
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        inspection = Inspection(
            modules=(SITES,),
            excluded=(),
            vocab_size=320,
            num_parameters=1,
            device="cuda" if num_visible else "cpu",
            device_names=("NVIDIA H100",) * num_visible,
        )
        monkeypatch.setattr("qcollect.launch.inspect.inspect_recipe", lambda recipe: inspection)
        arguments = ("run", "mxfp8", "--recipe", "tiny", "--target", "8", "--out", str(tmp_path / "out"), "--dry-run")
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *flags])
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (None, [None] * 4),
        ("2,3", ["2", "3"]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6", ["MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", ["MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"]),
        ("0,,1", ["0"]),
    ],
)
def test_the_command_plans_a_process_a_visible_device(dry_run, value, entries):
    code, out, _ = dry_run("--json", value=value, num_visible=len(entries))
    plan = json.loads(out)
    assert (code, plan["world_size"], plan["device"]) == (0, len(entries), "cuda")
    assert [d["visible_device"] for d in plan["devices"]] == entries
    assert [d["local_rank"] for d in plan["devices"]] == list(range(len(entries)))
    assert plan["env"].get("CUDA_VISIBLE_DEVICES") == value
    assert plan["torchrun_argv"][plan["torchrun_argv"].index("--nproc-per-node") + 1] == str(len(entries))
    assert any("CUDA ignores it" in warning for warning in plan["warnings"]) == (value == "0,,1")


@pytest.mark.parametrize("value", ["", "-1"])
def test_the_command_plans_a_run_on_the_cpu_where_all_devices_are_hidden(dry_run, value):
    code, out, _ = dry_run(value=value, num_visible=0)
    assert code == 0
    assert out.startswith("mxfp8 (tiny, cpu, 1 process)\n")
    assert "\ndevices:\n  rank 0, local rank 0: cpu\n" in out


def test_the_command_shows_chosen_devices_within_those_of_a_job(dry_run):
    code, out, _ = dry_run("--gpu-ids", "0,2,4,6", value="8,9,10,11,12,13,14,15")
    assert code == 0
    assert "\n  CUDA_VISIBLE_DEVICES=8,10,12,14\n" in out
    assert "\n  rank 3, local rank 3: cuda:3 = CUDA_VISIBLE_DEVICES entry 14 = NVIDIA H100\n" in out
    code, out, _ = dry_run("--gpu-ids", "0,2,4,6")
    assert "\n  CUDA_DEVICE_ORDER=PCI_BUS_ID\n  CUDA_VISIBLE_DEVICES=0,2,4,6\n" in out
    assert " = CUDA_VISIBLE_DEVICES entry 6 = NVIDIA H100 (index 6 of nvidia-smi)\n" in out


@pytest.mark.parametrize(
    ("flags", "value", "num_visible", "code", "message"),
    [
        (
            ("--nproc", "3"),
            "2,3",
            2,
            3,
            "--nproc 3 is more than the 2 visible cuda device(s) of CUDA_VISIBLE_DEVICES=2,3",
        ),
        (
            ("--gpu-ids", "4"),
            "2,3",
            2,
            3,
            "--gpu-ids 4: 4 is out of range: CUDA_VISIBLE_DEVICES=2,3 is set and makes 2",
        ),
        (("--gpu-ids", "0"), "-1,0", 0, 3, "--gpu-ids 0: CUDA_VISIBLE_DEVICES=-1,0 makes no device visible (its entry"),
        (
            ("--set", "launch.device=cuda"),
            "",
            0,
            3,
            "launch.device is 'cuda', and this machine's torch sees 'cpu' only",
        ),
        ((), "1,1", 0, 3, "CUDA_VISIBLE_DEVICES=1,1 names a device twice (1); CUDA then sees none"),
        (("--gpu-ids", "0,0"), None, 4, 2, "a device is named twice"),
        (("--gpu-ids", "zero"), None, 4, 2, "--gpu-ids zero: 'zero' is no device"),
    ],
)
def test_the_command_refuses_devices_that_cannot_be_had(dry_run, flags, value, num_visible, code, message):
    refused, out, err = dry_run(*flags, value=value, num_visible=num_visible)
    assert refused == code
    assert out == ""
    assert message in err


def test_a_schedule_that_waits_counts_from_its_trigger(make_plan):
    plan = make_plan()
    capture = replace(plan.recipe.capture, trigger=TriggerSpec(on=("nan", "signal")))
    lines = [line.strip() for line in lines_of(replace(plan, recipe=replace(plan.recipe, capture=capture)))]
    start = lines.index("schedule:") + 1
    assert lines[start : start + 3] == [
        "begins at the trigger: T is the first iteration in which a rank sees nan, signal",
        "ranks 0 to 1: 3 captures each",
        "iteration T+1, micro-batch 0: 3 captures",
    ]
