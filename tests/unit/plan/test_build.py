import json
from pathlib import Path

import pytest

from qcollect.errors import DeviceError, ScheduleError, SelectionError
from qcollect.plan.build import RANK_VARIABLES, build_plan
from qcollect.plan.inspection import Inspection
from qcollect.plan.record import Plan
from qcollect.recipe.records import CaptureSpec, LaunchSpec, QuantSpec, TrainSpec


@pytest.fixture
def plan_of(make_recipe, make_inspection):
    def plan(recipe=None, quant_type="mxfp8", inspection=None, **fields):
        arguments = {
            "out_dir": Path("/out"),
            "script_args": ("--flag", "a b", ""),
            "python": "/usr/bin/python3",
            "num_cores": 8,
            "loopback": None,
            "run_id": "run1",
            "run_token": "token1",
        }
        return build_plan(recipe or make_recipe(), quant_type, inspection or make_inspection(), **(arguments | fields))

    return plan


def test_plan_goes_through_json(plan_of, make_recipe, tmp_path):
    recipe = make_recipe(
        quant=QuantSpec(type="mxfp8", overrides={"wgrad": {"type": "bf16"}}, exclude=("*.o_proj",)),
        capture=CaptureSpec(target=77, values="both", iterations="spread:3"),
        launch=LaunchSpec(nproc=3, gpu_ids=None),
    )
    plan = plan_of(recipe)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_dict()))
    assert Plan.read(path) == plan


def test_plan_says_target_and_shares(plan_of, make_recipe):
    plan = plan_of(make_recipe(launch=LaunchSpec(nproc=4)))
    assert plan.to_dict()["target"] == 50
    assert plan.to_dict()["shares"] == [13, 13, 12, 12]


def test_type_of_the_run_replaces_that_of_the_recipe(plan_of):
    plan = plan_of(quant_type="hifp8")
    assert (plan.quant_type, plan.recipe.quant.type) == ("hifp8", "hifp8")
    assert plan.run_dir == Path("/out/hifp8")
    assert plan.env["CUSTOM_QUANT_TYPE"] == "hifp8"
    assert plan.env["TENSOR_SAVE_DIR"] == "/out/hifp8"


def test_worker_environment_holds_what_workers_read_and_drops_inherited_ranks(plan_of, make_recipe):
    plan = plan_of(make_recipe(launch=LaunchSpec(nproc=2)))
    assert plan.env == {
        "CUSTOM_QUANT_TYPE": "mxfp8",
        "TENSOR_SAVE_DIR": "/out/mxfp8",
        "TENSOR_SAVE_ENABLED": "true",
        "TENSOR_SAVER_ITERATION": "0",
        "CURRENT_SAMPLE_IDX": "0",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "QCOLLECT_PLAN": "/out/mxfp8/.qcollect/plan.json",
        "QCOLLECT_RUN_TOKEN": "token1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(plan.unset) == set(RANK_VARIABLES)
    assert "LOCAL_RANK" not in plan.unset


def test_ranks_of_one_node_talk_over_its_loopback(plan_of):
    env = plan_of(loopback="lo").env
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


def test_torchrun_picks_a_free_port_and_arguments_stay_apart(plan_of):
    plan = plan_of()
    assert plan.torchrun_argv == (
        "torchrun", "--standalone", "--local-addr", "127.0.0.1",
        "--log-dir", str(plan.run_dir / ".qcollect" / "logs" / "torchrun"), "--nproc-per-node", "1",
        "-m", "qcollect.worker", "--flag", "a b", "",
    )  # fmt: skip


UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.fixture
def plan_on(plan_of, make_recipe, make_inspection):
    """The plan of a machine with these GPUs visible, a user's CUDA_VISIBLE_DEVICES and launch settings."""

    def plan(names, value=None, **launch):
        inspection = make_inspection(device="cuda" if names else "cpu", device_names=names)
        return plan_of(make_recipe(launch=LaunchSpec(**launch)), inspection=inspection, user_visible_devices=value)

    return plan


def test_chosen_devices_reach_the_workers_unchanged(plan_on):
    ids = (UUID, "GPU-1b2c")
    plan = plan_on("AB", gpu_ids=ids)
    assert plan.env["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
    assert plan.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.world_size == 2


# https://github.com/pytorch/pytorch/pull/92315, https://github.com/vllm-project/vllm/pull/6582
@pytest.mark.parametrize(
    ("value", "names", "entries"),
    [
        (UUID, "A", [UUID]),
        ("GPU-8932f937", "A", ["GPU-8932f937"]),
        (f"MIG-{UUID[4:]}", "A", [f"MIG-{UUID[4:]}"]),
        (f"MIG-{UUID}/1/2", "A", [f"MIG-{UUID}/1/2"]),
        ("2,3", "AB", ["2", "3"]),
        ("0,,1", "A", ["0"]),
        ("2, 3", "AB", ["2", "3"]),
    ],
)
def test_there_is_a_process_a_visible_device_and_the_value_is_passed_on_as_it_is(plan_on, value, names, entries):
    plan = plan_on(names, value)
    assert plan.world_size == len(names)
    assert plan.env["CUDA_VISIBLE_DEVICES"] == value
    assert "CUDA_DEVICE_ORDER" not in plan.env
    assert [(d.local_rank, d.device, d.visible_device) for d in plan.devices] == [
        (i, f"cuda:{i}", entry) for i, entry in enumerate(entries)
    ]


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_devices_mean_the_cpu_or_a_refusal_where_a_gpu_was_asked_for(plan_on, value):
    plan = plan_on("", value)
    assert (plan.device, plan.world_size, plan.warnings) == ("cpu", 1, ())
    assert [(d.rank, d.device) for d in plan.devices] == [(0, "cpu")]
    assert "CUDA_VISIBLE_DEVICES" not in plan.env  # what the workers inherit
    shown = value or "''"
    with pytest.raises(DeviceError) as refused:
        plan_on("", value, device="cuda")
    assert str(refused.value) == (
        f"launch.device is 'cuda', and this machine's torch sees 'cpu' only, as CUDA_VISIBLE_DEVICES={shown} makes "
        "none visible; set launch.device=auto or install a torch build for it"
    )
    with pytest.raises(DeviceError, match="^--gpu-ids 0: CUDA_VISIBLE_DEVICES=.* makes no device visible; unset it"):
        plan_on("", value, gpu_ids=("0",))


def test_lost_devices_are_warned_of_in_the_plan(plan_on):
    (warning,) = plan_on("A", "0,,1").warnings
    assert warning.startswith(
        "CUDA_VISIBLE_DEVICES=0,,1 makes 1 device(s) visible: its entry '' at position 1 is empty"
    )
    (warning,) = plan_on("", "2,3").warnings
    assert warning.startswith("CUDA_VISIBLE_DEVICES=2,3 names 2 device(s) and torch sees none, so the run uses the CPU")


def test_the_variable_of_cuda_means_nothing_to_other_accelerators(plan_of, make_recipe, make_inspection):
    inspection = make_inspection(device="npu", device_names="AB")
    plan = plan_of(inspection=inspection, user_visible_devices="0,,1,2")
    assert (plan.world_size, plan.warnings) == (2, ())
    assert [(d.device, d.visible_device) for d in plan.devices] == [("npu:0", None), ("npu:1", None)]
    with pytest.raises(
        DeviceError, match=r"^--nproc 3 is more than the 2 visible npu device\(s\) \(A, B\); lower --nproc"
    ):
        plan_of(make_recipe(launch=LaunchSpec(nproc=3)), inspection=inspection, user_visible_devices="0,1")
    with pytest.raises(DeviceError) as refused:
        plan_of(make_recipe(launch=LaunchSpec(gpu_ids=("0", "1"))), inspection=inspection)
    assert (
        str(refused.value)
        == "--gpu-ids 0,1 chooses among CUDA devices, and this machine's torch sees 'npu'; leave it out"
    )


def test_ids_are_taken_from_what_the_user_made_visible(plan_on):
    plan = plan_on("AB", "4,5,6,7", gpu_ids=("0", "2"))
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert [d.visible_device for d in plan.devices] == ["4", "6"]
    assert [d.gpu_index for d in plan.devices] == [None, None]  # CUDA's own order need not be nvidia-smi's
    with pytest.raises(DeviceError, match="--gpu-ids 0,4: 4 is out of range: CUDA_VISIBLE_DEVICES=4,5,6,7 is set"):
        plan_on("A", "4,5,6,7", gpu_ids=("0", "4"))


def test_indices_are_those_of_nvidia_smi_where_cuda_counts_like_it(plan_on, plan_of, make_inspection):
    assert [d.gpu_index for d in plan_on("AB", gpu_ids=("6", "2")).devices] == [6, 2]
    inspection = make_inspection(device="cuda", device_names="AB")
    plan = plan_of(inspection=inspection, user_visible_devices="6,2", user_device_order="PCI_BUS_ID")
    assert [d.gpu_index for d in plan.devices] == [6, 2]


@pytest.mark.parametrize(
    ("value", "launch", "named", "with_what"),
    [
        (None, {}, "", "--gpu-ids"),
        ("2,3", {}, " of CUDA_VISIBLE_DEVICES=2,3", "CUDA_VISIBLE_DEVICES"),
        ("2,3,4", {"gpu_ids": ("0", "1")}, " of --gpu-ids 0,1", "--gpu-ids"),
    ],
)
def test_more_processes_than_devices_are_refused_with_what_limits_them(plan_on, value, launch, named, with_what):
    with pytest.raises(DeviceError) as error:
        plan_on("AB", value, nproc=3, **launch)
    assert str(error.value) == (
        f"--nproc 3 is more than the 2 visible cuda device(s){named} (A, B); lower --nproc, or make more visible with "
        f"{with_what}"
    )


def test_ids_that_torch_does_not_see_all_of_are_refused(plan_on):
    with pytest.raises(DeviceError) as refused:
        plan_on("A", gpu_ids=("0", "9"))
    assert str(refused.value) == (
        "--gpu-ids 0,9 names 2 device(s) and torch sees 1 of them; compare with nvidia-smi -L (an id that does not "
        "exist hides every one after it, and a process sees one MIG instance only)"
    )
    with pytest.raises(
        DeviceError, match=r"^--gpu-ids 1 names 1 device\(s\) of CUDA_VISIBLE_DEVICES=0,9 and torch sees none"
    ):
        plan_on("", "0,9", gpu_ids=("1",))


def test_runs_on_the_cpu_pay_no_attention_to_devices(plan_on):
    plan = plan_on("AB", "0,0", device="cpu", nproc=5, gpu_ids=("7",))
    assert (plan.device, plan.world_size) == ("cpu", 5)
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(plan.env)
    assert [d.device for d in plan.devices] == ["cpu"] * 5
    assert plan.warnings == ("launch.device is 'cpu': --gpu-ids 7 is not used",)


def test_devices_of_a_plan_go_through_json_and_may_be_absent(plan_on):
    plan = plan_on("AB", "2,3")
    fields = json.loads(json.dumps(plan.to_dict()))
    assert Plan.from_dict(fields) == plan
    del fields["devices"]  # of an earlier version
    assert Plan.from_dict(fields).devices == ()


def test_no_port_is_fixed_in_plan_or_recipe(plan_of, make_recipe):
    plan = plan_of(make_recipe(launch=LaunchSpec(nproc=2)))
    options = [argument for argument in plan.agent_argv if argument.startswith("--")]
    assert not [o for o in options if "port" in o or "endpoint" in o]
    assert not {"MASTER_PORT", "MASTER_ADDR", "PET_RDZV_ENDPOINT"} & set(plan.env)
    assert {"MASTER_PORT", "PET_RDZV_ENDPOINT"} <= set(plan.unset)  # nor is one inherited
    recipes = Path(__file__).parents[3] / "recipes"
    for path in (*recipes.glob("*.yaml"), *recipes.glob("*.py")):
        assert not any(word in path.read_text().lower() for word in ("port:", "master_port", "29500")), path


def test_one_process_a_device_and_one_on_the_cpu(plan_of, make_recipe, make_inspection):
    on_cards = make_inspection(device="cuda", device_names=("A", "B", "C"))
    assert plan_of(inspection=on_cards).world_size == 3
    assert plan_of(make_recipe(launch=LaunchSpec(device="cpu")), inspection=on_cards).world_size == 1
    assert plan_of().world_size == 1


def test_impossible_target_is_refused_before_the_launch(plan_of, make_recipe):
    with pytest.raises(ScheduleError, match="target 101 is more than this run can produce: 100 files"):
        plan_of(make_recipe(capture=CaptureSpec(target=101)))


def test_small_target_warns_in_the_plan(plan_of, make_recipe):
    assert plan_of().warnings == ()
    (warning,) = plan_of(make_recipe(capture=CaptureSpec(target=3))).warnings
    assert warning.startswith("the target 3 is too small to reach a backward capture on rank(s) 0;")


def test_exclude_that_names_nothing_is_refused(plan_of, make_recipe):
    with pytest.raises(SelectionError, match=r"^quant.exclude: '\*.dwn_proj' matches nothing; did you mean "):
        plan_of(make_recipe(quant=QuantSpec(exclude=("*.dwn_proj",))))
    with pytest.raises(SelectionError, match="'model.layers.0.mlp' matches nothing"):  # it only holds others
        plan_of(make_recipe(quant=QuantSpec(exclude=("model.layers.0.mlp",))))
    plan_of(make_recipe(quant=QuantSpec(exclude=("*.down_proj", "model.embed_tokens", "lm_head"))))


def test_micro_batches_of_the_recipe_count(plan_of, make_recipe):
    recipe = make_recipe(
        capture=CaptureSpec(target=250, iterations="0-1"), train=TrainSpec(iterations=2, micro_batches=2)
    )
    assert [(c.iteration, c.micro_batch, c.count) for c in plan_of(recipe).schedule.cuts[0]] == [
        (0, 0, 100),
        (0, 1, 25),
        (1, 0, 100),
        (1, 1, 25),
    ]


def test_inspection_goes_through_json(make_inspection):
    inspection = make_inspection(num_layers=1, device="cuda", device_names=("A",))
    assert Inspection.from_dict(json.loads(json.dumps(inspection.to_dict()))) == inspection
