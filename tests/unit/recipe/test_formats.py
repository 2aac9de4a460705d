"""Number formats of a user's own in recipes: by file, or written into the recipe."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qcollect.formats.custom import load_quant_type
from qcollect.recipe.load import load_recipe
from qcollect.recipe.overrides import Override
from qcollect.recipe.records import QuantSpec, recipe_from_dict

Write = Callable[[str], str]
Refusals = Callable[..., list[str]]
FP6 = "name: my_fp6\nelement: {exponent_bits: 4, mantissa_bits: 1}\nblock_size: 32\nscale: E8M0\n"
INLINE = (
    "quant: {type: own, formats: {own: {element: {exponent_bits: 4, mantissa_bits: 1}, block_size: 32, scale: E8M0}}}"
)


@pytest.fixture
def write(write_recipe: Write) -> Write:
    """Writes the recipe, with ``fp6.yaml`` and ``deep/fp5.yaml`` beside it."""
    Path("fp6.yaml").write_text(FP6, encoding="utf-8")
    Path("deep").mkdir()
    Path("deep/fp5.yaml").write_text(FP6.replace("my_fp6", "my_fp5").replace("4", "3", 1), encoding="utf-8")
    return write_recipe


def test_file_stands_under_its_name_and_its_definition_in_the_recipe(write: Write, minimal: str) -> None:
    quant = load_recipe(write(f"{minimal}quant: {{type: fp6.yaml}}\n")).quant
    assert quant.type == "my_fp6"
    assert list(quant.formats) == ["my_fp6"]
    assert quant.find_type("my_fp6") == load_quant_type("fp6.yaml")
    assert quant.find_type("mxfp8").name == "mxfp8"


def test_file_is_taken_wherever_a_type_is(write: Write, minimal: str) -> None:
    text = "quant: {types: [mxfp8, fp6.yaml], overrides: {dgrad: {type: deep/fp5.yaml, rounding: half_away}}}\n"
    quant = load_recipe(write(minimal + text)).quant
    assert (quant.type, quant.types) == ("mxfp8", ("mxfp8", "my_fp6"))
    assert quant.overrides == {"dgrad": {"type": "my_fp5", "rounding": "half_away"}}
    assert list(quant.formats) == ["my_fp6", "my_fp5"]


def test_file_may_come_from_an_override_or_a_flag(write: Write, minimal: str) -> None:
    path = write(minimal)
    flag = Override(key="quant.type", value="fp6.yaml", origin="--quant")
    for given in ("quant.type=fp6.yaml", flag):
        assert load_recipe(path, [given]).quant.type == "my_fp6"
    assert load_recipe(path, ["quant.types=mxfp8, fp6.yaml"]).quant.types == ("mxfp8", "my_fp6")


def test_path_is_relative_to_the_current_directory_or_the_recipes(
    write: Write, minimal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write(minimal)).absolute().parent
    (folder / "r.yaml").write_text(f"{minimal}quant: {{type: $RECIPE_DIR/fp6.yaml}}\n", encoding="utf-8")
    monkeypatch.chdir(folder / "deep")
    assert load_recipe("../r.yaml").quant.type == "my_fp6"
    assert load_recipe("../r.yaml", ["quant.type=fp5.yaml"]).quant.type == "my_fp5"


def test_definition_may_stand_in_the_recipe(write: Write, minimal: str) -> None:
    quant = load_recipe(write(f"{minimal}{INLINE}\n")).quant
    assert quant.type == "own"
    assert quant.formats["own"]["element"]["max_value"] == 384.0
    assert quant.formats["own"]["scale_rules"] == ["floor", "ceil", "even", "rceil"]


def test_definitions_are_equal_however_they_are_written(write: Write, minimal: str) -> None:
    by_file = load_recipe(write(minimal), ["quant.type=fp6.yaml"]).quant
    text = INLINE.replace("own", "my_fp6").replace("mantissa_bits: 1", "mantissa_bits: 1, bias: 7, inf: false")
    assert load_recipe(write(f"{minimal}{text}\n")).quant == QuantSpec(type="my_fp6", formats=by_file.formats)


def test_recipe_with_formats_survives_json(write: Write, minimal: str) -> None:
    recipe = load_recipe(write(f"{minimal}{INLINE}\n"), ["quant.overrides={wgrad: {type: fp6.yaml}}"])
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict(), allow_nan=False))) == recipe


def test_rules_of_an_own_type_are_checked_as_the_catalogs(write: Write, minimal: str) -> None:
    write(minimal)
    assert load_recipe("r.yaml", ["quant.type=fp6.yaml", "quant.scale_rule=rceil"]).quant.scale_rule == "rceil"


def test_wrong_choices_for_an_own_type_are_refused(write: Write, refusals: Refusals, minimal: str) -> None:
    write(minimal)
    given = ("quant.type=fp6.yaml", "quant.scale_rule=nearest")
    assert refusals(minimal, *given) == [
        "--set quant.scale_rule: quant.scale_rule is 'nearest', and my_fp6 takes floor, ceil, even, rceil"
    ]
    given = ("quant.overrides={dgrad: {type: fp6.yaml, rounding: hybrid}}",)
    assert refusals(minimal, *given)[0].endswith(
        "quant.overrides.dgrad.rounding is 'hybrid', and my_fp6 takes nearest_even, half_away, stochastic"
    )


def test_faults_in_a_file_are_named_with_both_places(write: Write, refusals: Refusals, minimal: str) -> None:
    write(minimal)
    Path("bad.yaml").write_text(FP6.replace("E8M0", "E9M0").replace("32", "0"), encoding="utf-8")
    known = "known: E8M0, E4M3, E6M2, tensor, none, [E4M3, tensor], [E6M2, tensor]"
    assert refusals(f"{minimal}quant: {{type: bad.yaml}}\n") == [
        f"r.yaml:3: quant.type is 'bad.yaml': bad.yaml:4: scale is 'E9M0'; {known}"
    ]


def test_faults_in_the_recipe_have_a_line_each(write: Write, refusals: Refusals, minimal: str) -> None:
    text = (
        "quant:\n"
        "  formats:\n"
        "    mxfp8: {element: {exponent_bits: 4, mantissa_bits: 1}, block_size: 32, scale: E8M0}\n"
        "    own:\n"
        "      name: own\n"
        "      element: {exponent_bits: 9, mantissa_bits: 1}\n"
        "      scale: tensor\n"
        "    other: 5\n"
    )
    write(minimal)
    assert refusals(minimal + text) == [
        "r.yaml:5: quant.formats.mxfp8 is 'mxfp8'; the catalog has mxfp8 already; choose another name",
        "r.yaml:7: unknown key 'quant.formats.own.name'; known: description, element, block_size, scale, scale_rules, "
        "roundings.",
        "r.yaml:8: quant.formats.own.element.exponent_bits is 9; must be a whole number from 1 to 7",
        "r.yaml:10: quant.formats.other is 5; must be a section (element: ..., scale: ...)",
    ]


def test_missing_file_is_named_and_the_one_beside_the_recipe_offered(
    write: Write, refusals: Refusals, minimal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write(minimal)).absolute().parent
    assert refusals(minimal, "quant.type=gone.yaml") == [
        f"--set quant.type: quant.type is 'gone.yaml': no number format file gone.yaml (in {folder}); "
        "the types that need none: 'qcollect formats'"
    ]
    (folder / "r.yaml").write_text(f"{minimal}quant: {{type: fp6.yaml}}\n", encoding="utf-8")
    monkeypatch.chdir(folder / "deep")
    with pytest.raises(Exception, match=r"; the one beside the recipe is \$RECIPE_DIR/fp6.yaml$"):
        load_recipe("../r.yaml")


def test_two_definitions_of_a_name_are_refused(write: Write, refusals: Refusals, minimal: str) -> None:
    write(minimal)
    Path("other.yaml").write_text(FP6.replace("32", "16"), encoding="utf-8")
    assert refusals(f"{minimal}quant: {{types: [fp6.yaml, other.yaml]}}\n") == [
        "r.yaml:3: quant.types.1 is 'other.yaml': my_fp6 is also defined otherwise; rename one of them"
    ]


def test_unknown_names_are_refused_with_the_recipes_own_among_the_known(refusals: Refusals, minimal: str) -> None:
    text = INLINE.replace("type: own", "type: ovn, types: [mxfp8, ownn], overrides: {dgrad: {type: owm}}")
    found = refusals(f"{minimal}{text}\n")
    assert len(found) == 3
    assert all("own" in line.split("known: ")[1] for line in found)
    assert found[0].startswith("r.yaml:3: quant.type is 'ovn'; known: ")
    assert found[1].startswith("r.yaml:3: quant.types is ['mxfp8', 'ownn']; 'ownn' is not one; known: ")
    assert found[2].startswith("r.yaml:3: quant.overrides.dgrad.type is 'owm'; known: ")
