from collections.abc import Callable

import pytest

from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import TriggerSpec, recipe_from_dict

Write = Callable[[str], str]
Refusals = Callable[..., list[str]]
KNOWN = "known: loss_spike, nan, grad_norm_jump, signal."


def test_without_one_captures_begin_with_the_training(write_recipe: Write, minimal: str) -> None:
    assert load_recipe(write_recipe(minimal)).capture.trigger is None


@pytest.mark.parametrize(
    "text",
    [
        "{on: [loss_spike, nan]}",
        "{on: 'loss_spike, nan'}",
        "[loss_spike, nan]",
        "'loss_spike,nan'",
        "[loss_spike, nan, nan]",
    ],
)
def test_names_can_be_written_in_several_ways(write_recipe: Write, minimal: str, text: str) -> None:
    recipe = load_recipe(write_recipe(f"{minimal}capture: {{trigger: {text}}}\n"))
    assert recipe.capture.trigger == TriggerSpec(on=("loss_spike", "nan"))


def test_settings_from_outside_reach_into_the_section(write_recipe: Write, minimal: str) -> None:
    settings = ["capture.trigger.on=nan", "capture.trigger.iterations=3"]
    assert load_recipe(write_recipe(minimal), settings).capture.trigger == TriggerSpec(on=("nan",), iterations=3)


def test_a_section_goes_through_json(write_recipe: Write, minimal: str) -> None:
    recipe = load_recipe(write_recipe(minimal), ["capture.trigger={on: signal, window: 7, loss_factor: 1.5}"])
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert recipe.capture.trigger == TriggerSpec(on=("signal",), window=7, loss_factor=1.5)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{on: [loss_spik]}", f"capture.trigger.on is ['loss_spik']; 'loss_spik' is not one; {KNOWN} "
                              "Did you mean 'loss_spike'?"),
        ("{on: []}", f"capture.trigger.on is []; must name at least one; {KNOWN}"),
        ("{on: 3}", "capture.trigger.on is 3; must be a list of texts"),
        ("{iterations: 2}", "capture.trigger.on is missing"),
        ("{on: nan, windw: 3}", "unknown key 'capture.trigger.windw'; known: on, iterations, window, warmup, "
                                "loss_factor, grad_norm_factor. Did you mean 'window'?"),
        ("{on: nan, loss_factor: 1}", "capture.trigger.loss_factor is 1; must be above 1"),
        ("{on: nan, iterations: 0}", "capture.trigger.iterations is 0; must be at least 1"),
        ("true", "capture.trigger is true; must be a section with keys of: on, iterations, window, warmup, "
                 "loss_factor, grad_norm_factor"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_be_right(
    refusals: Refusals, minimal: str, text: str, refusal: str
) -> None:
    assert refusals(f"{minimal}capture:\n  trigger: {text}\n") == [f"r.yaml:4: {refusal}"]


@pytest.mark.parametrize("other", ["iterations: 'spread:2'", "samples: [0, 1]"])
def test_what_counts_from_the_start_of_training_is_refused_beside_it(
    refusals: Refusals, minimal: str, other: str
) -> None:
    key = f"capture.{other.split(':')[0]}"
    (refusal,) = refusals(f"{minimal}capture:\n  trigger: nan\n  {other}\n")
    assert refusal.startswith(
        f"r.yaml:5: {key} counts from the start of the training, and with capture.trigger nobody knows beforehand "
        "when captures begin; "
    )


@pytest.mark.parametrize(("on", "first"), [("nan", 1), ("[signal, loss_spike]", 1), ("loss_spike", 11)])
def test_training_must_be_long_enough(
    refusals: Refusals, write_recipe: Write, minimal: str, on: str, first: int
) -> None:
    text = f"{minimal}capture: {{trigger: {{on: {on}, iterations: 3}}}}\n"
    load_recipe(write_recipe(text), [f"train.iterations={first + 3}"])
    assert refusals(text, f"train.iterations={first + 2}") == [
        f"r.yaml:3: capture.trigger can capture its 3 iteration(s) from iteration {first} on, which takes {first + 3} "
        f"in all, and train.iterations is {first + 2}; train longer, or lower capture.trigger.iterations or warmup"
    ]
