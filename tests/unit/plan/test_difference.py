"""Which settings make a repeated run another run."""

from typing import Any

import pytest

from qcollect.formats.custom import definition_of, quant_type_of
from qcollect.plan.difference import describe_difference, first_difference


def definition(block_size: int) -> dict[str, Any]:
    element = {"exponent_bits": 4, "mantissa_bits": 1}
    stored = definition_of(quant_type_of("own", {"element": element, "block_size": block_size, "scale": "E8M0"}))
    assert stored is not None
    return stored


def plan(quant: dict[str, Any] | None = None, **recipe: Any) -> dict[str, Any]:
    sections = {"name": "r", "train": {"seed": 0}, "quant": {"type": "mxfp8", **(quant or {})}, **recipe}
    fields = {"quant_type": "mxfp8", "world_size": 1, "device": "cpu", "target": 8, "script_args": []}
    return {**fields, "recipe": sections, "schedule": {"length": 8}}


def test_same_settings_do_not_differ() -> None:
    assert first_difference(plan(), plan()) is None
    assert first_difference(plan(name="a", launch={"nproc": 1}), plan(name="b", launch={"nproc": 2})) is None


@pytest.mark.parametrize(
    ("stored", "planned", "name", "sentence"),
    [
        (plan(train={"seed": 1}), plan(), "train.seed", "train.seed is 1 there and 0 now"),
        (plan({"type": "mxfp4"}), plan(), "quant.type", "quant.type is 'mxfp4' there and 'mxfp8' now"),
        (plan(model={"config": {"hidden_size": 64}}), plan(model={"config": {"hidden_size": 32}}),
         "model.config.hidden_size", "model.config.hidden_size is 64 there and 32 now"),
        ({**plan(), "target": 9}, plan(), "target", "target is 9 there and 8 now"),
        ({**plan(), "schedule": {}}, plan(), "schedule", "schedule is {} there and {'length': 8} now"),
        ({**plan(), "recipe": {"quant": 5}}, plan(), "train", "train is None there and {'seed': 0} now"),
    ],
)  # fmt: skip
def test_first_value_that_differs_is_named(
    stored: dict[str, Any], planned: dict[str, Any], name: str, sentence: str
) -> None:
    assert first_difference(stored, planned) == name
    assert describe_difference(name, stored, planned) == sentence


def test_changed_definition_of_the_runs_type_is_another_run() -> None:
    stored, planned = (plan({"type": "own", "formats": {"own": definition(size)}}) for size in (32, 16))
    name = first_difference(stored, planned)
    assert name == "quant.formats.own.block_size"
    assert describe_difference(name, stored, planned) == "quant.formats.own.block_size is 32 there and 16 now"


def test_changed_definition_of_a_type_of_one_gemm_is_another_run() -> None:
    overrides = {"dgrad": {"type": "own"}}
    stored, planned = (plan({"overrides": overrides, "formats": {"own": definition(size)}}) for size in (32, 16))
    assert first_difference(stored, planned) == "quant.formats.own.block_size"


def test_definition_that_the_run_does_not_use_is_no_difference() -> None:
    stored, planned = (plan({"formats": {"own": definition(size)}}) for size in (32, 16))
    assert first_difference(stored, planned) is None


def test_plan_of_before_there_were_definitions_is_no_difference() -> None:
    assert first_difference(plan(), plan({"types": ["mxfp8"], "formats": {}})) is None
