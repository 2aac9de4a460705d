from dataclasses import replace

import pytest

from qcollect.plan.memory import CPU_RUNTIME_BYTES, DEVICE_RUNTIME_BYTES, estimate_memory
from qcollect.recipe.records import CaptureSpec, TrainSpec


@pytest.fixture
def estimate(make_recipe, make_inspection):
    """Of 1000 parameters in 2 layers; a micro-batch is 1 x 4 tokens, a linear's input and output 4 x 8 each."""

    def of(device="cpu", capture=None, **train):
        return estimate_memory(make_recipe(train=TrainSpec(**train), capture=capture), make_inspection(), device)

    return of


@pytest.mark.parametrize(("compute", "num_bytes"), [("bf16", 20), ("fp32", 24)])
def test_states_are_weights_gradients_masters_and_both_moments(estimate, compute, num_bytes):
    assert estimate(compute=compute).state_bytes == 1000 * num_bytes


# a layer: 7 linears of 32 + 32 elements, and query, key, value and output of 32 each
LAYER = 7 * 64 + 4 * 32
LOGITS = 16 * 4 * 320


@pytest.mark.parametrize(("compute", "num_bytes"), [("bf16", 2), ("fp32", 4)])
def test_activations_are_twice_the_inputs_and_outputs(estimate, compute, num_bytes):
    assert estimate(compute=compute).activation_bytes == 2 * num_bytes * 2 * LAYER + LOGITS


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all(estimate):
    kept = estimate(activation_checkpointing="non_reentrant").activation_bytes
    assert kept == 2 * 2 * (LAYER + 2 * 32) + LOGITS


def test_the_largest_capture_counts_and_lm_head_only_when_it_is_asked_for(
    estimate, make_recipe, make_inspection, linear_site
):
    assert estimate().capture_bytes == 32 * 64
    head = replace(linear_site("lm_head", None, on_request=True), shapes={"output": (1, 4, 320)})
    inspection = replace(make_inspection(), modules=(*make_inspection().modules, head))
    for modules, largest in ((None, 64), (("lm_head",), 1280)):
        recipe = make_recipe(capture=CaptureSpec(modules=modules))
        assert estimate_memory(recipe, inspection, "cpu").capture_bytes == 32 * largest


def test_a_device_has_a_context_and_the_sum_is_all_of_it(estimate):
    assert estimate("cpu").runtime_bytes == CPU_RUNTIME_BYTES
    found = estimate("cuda")
    assert found.runtime_bytes == DEVICE_RUNTIME_BYTES
    assert found.num_bytes == (found.state_bytes + found.activation_bytes + found.capture_bytes + found.runtime_bytes)
