import json
import subprocess
from pathlib import Path

import pytest

from qcollect.errors import PreflightError
from qcollect.launch import inspect
from qcollect.plan.inspection import Inspection
from qcollect.recipe.load import load_recipe

INSPECTION = Inspection(
    modules=(), excluded=("lm_head",), vocab_size=320, num_parameters=1, device="cuda", device_names=("A",)
)


@pytest.fixture
def answer(monkeypatch):
    """Have the worker answer like this; what it was asked, and with which environment."""
    asked = {}

    def set_answer(*, exit_code=0, inspection=None, out="", err="", error=None):
        def run(command, *, env, **kwargs):
            asked.update(command=command, env=env, recipe=None)
            if error is not None:
                raise error
            if inspection is not None:
                asked["recipe"] = json.loads(Path(command[-2]).read_text())
                Path(command[-1]).write_text(json.dumps(inspection.to_dict()))
            return subprocess.CompletedProcess(command, exit_code, stdout=out, stderr=err)

        monkeypatch.setattr(inspect.subprocess, "run", run)
        return asked

    return set_answer


def test_the_recipe_goes_out_and_the_inspection_comes_back(answer):
    asked, recipe = answer(inspection=INSPECTION), load_recipe("tiny")
    assert inspect.inspect_recipe(recipe) == INSPECTION
    assert asked["recipe"] == recipe.to_dict()
    assert not Path(asked["command"][-1]).parent.exists()


def test_the_worker_sees_the_chosen_devices_and_nothing_of_a_launch_around_it(answer, monkeypatch):
    for name in ("RANK", "MASTER_PORT", "PET_NNODES", "QCOLLECT_PLAN", "QCOLLECT_RUN_TOKEN", "QCOLLECT_PARENT"):
        monkeypatch.setenv(name, "1")
    asked = answer(inspection=INSPECTION)
    inspect.inspect_recipe(load_recipe("tiny", ["launch.gpu_ids=[GPU-8932f937, GPU-1b2c]"]))
    environment = asked["env"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-8932f937,GPU-1b2c"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not {"RANK", "MASTER_PORT", "PET_NNODES", "QCOLLECT_PLAN", "QCOLLECT_RUN_TOKEN"} & set(environment)


def test_all_problems_are_told(answer):
    problems = Inspection.from_dict(INSPECTION.to_dict() | {"problems": ["no checkpoint", "no data"]})
    answer(inspection=problems)
    with pytest.raises(PreflightError, match=r"^no checkpoint\nno data$"):
        inspect.inspect_recipe(load_recipe("tiny"))


def test_a_worker_that_fails_is_quoted_with_its_last_lines(answer):
    answer(exit_code=1, err="".join(f"line {i}\n" for i in range(50)))
    with pytest.raises(PreflightError) as refused:
        inspect.inspect_recipe(load_recipe("tiny"))
    assert str(refused.value) == "recipe tiny: the model cannot be inspected:\n" + "\n".join(
        f"line {i}" for i in range(38, 50)
    )


def test_a_worker_that_does_not_answer_is_no_traceback(answer):
    answer(error=subprocess.TimeoutExpired("python", inspect.TIMEOUT_S))
    with pytest.raises(PreflightError, match=r"no answer from '\S+ -m qcollect\.worker' within 600 s"):
        inspect.inspect_recipe(load_recipe("tiny"))


def test_devices_are_told_or_why_torch_cannot_tell_them(answer):
    answer(out='a banner\n{"device": "cuda", "devices": ["A", "B"]}\n')
    assert inspect.describe_devices() == {"device": "cuda", "devices": ["A", "B"]}
    answer(exit_code=1, err="Traceback\nModuleNotFoundError: No module named 'torch'\n")
    assert inspect.describe_devices() == {
        "device": "unknown: torch failed: ModuleNotFoundError: No module named 'torch'",
        "devices": [],
    }
