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


def test_chosen_devices_reach_the_workers_unchanged(plan_of, make_recipe, make_inspection):
    ids = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "3")
    plan = plan_of(
        make_recipe(launch=LaunchSpec(gpu_ids=ids)), inspection=make_inspection(device="cuda", device_names=("A", "B"))
    )
    assert plan.env["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
    assert plan.world_size == 2


def test_more_processes_than_devices_are_refused(plan_of, make_recipe, make_inspection):
    with pytest.raises(DeviceError) as error:
        plan_of(
            make_recipe(launch=LaunchSpec(nproc=3)), inspection=make_inspection(device="cuda", device_names=("A", "B"))
        )
    assert str(error.value) == (
        "--nproc 3 is more than the 2 visible cuda device(s) (A, B); lower --nproc, or make more visible with --gpu-ids"
    )


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
