import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from qcollect.errors import RecipeError
from qcollect.recipe.load import list_recipes, load_recipe
from qcollect.recipe.records import Recipe, recipe_from_dict


def through_json(recipe: Recipe) -> Recipe:
    return recipe_from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("name", [summary.name for summary in list_recipes()])
def test_bundled_recipe_survives_json(name: str) -> None:
    recipe = load_recipe(name)
    assert through_json(recipe) == recipe


def test_recipe_with_everything_set_survives_json(write_recipe: Callable[[str], str], minimal: str) -> None:
    recipe = load_recipe(
        write_recipe(minimal),
        [
            "data.path=[a.txt, b.jsonl]",
            "train.betas=[0.8, 0.9]",
            "train.grad_clip=null",
            "quant.overrides={dgrad: {type: mxfp8_e5m2, scale_rule: rceil}, wgrad: {rounding: half_away}}",
            "quant.exclude=['*.down_proj']",
            "capture.layers=[0, 2-3]",
            "capture.iterations=every:10",
            "capture.modules=*.q_proj",
            "launch.gpu_ids=[0, 2]",
        ],
    )
    assert through_json(recipe) == recipe
    assert recipe.quant.overrides == {
        "dgrad": {"type": "mxfp8_e5m2", "scale_rule": "rceil"},
        "wgrad": {"rounding": "half_away"},
    }
    assert recipe.capture.layers == (0, "2-3")
    assert recipe.launch.gpu_ids == ("0", "2")


def test_to_dict_holds_json_types_only(write_recipe: Callable[[str], str], minimal: str) -> None:
    fields = load_recipe(write_recipe(minimal)).to_dict()
    assert json.loads(json.dumps(fields)) == fields


def test_absent_keys_take_their_default() -> None:
    fields = load_recipe("tiny").to_dict()
    del fields["train"]["betas"], fields["quant"]["overrides"]
    assert recipe_from_dict(fields) == load_recipe("tiny")


@pytest.mark.parametrize("damage", [{"train": {"epochs": 3}}, {"train": None}, {"name": ...}])
def test_stored_recipe_that_does_not_fit_is_refused(damage: dict[str, object]) -> None:
    fields = {**load_recipe("tiny").to_dict(), **damage}
    fields = {key: value for key, value in fields.items() if value is not ...}
    with pytest.raises(RecipeError, match=r"a stored recipe cannot be read: .*another version of qcollect"):
        recipe_from_dict(fields)


def test_records_need_neither_pydantic_nor_yaml_nor_torch() -> None:
    code = (
        "import sys, qcollect.recipe.records, qcollect.recipe.selectors; "
        "assert not {'pydantic', 'yaml', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; from qcollect.recipe.load import load_recipe; load_recipe('tiny'); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
