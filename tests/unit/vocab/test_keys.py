import pytest

from qcollect.vocab import GROUPS, CaptureKey, LayerType

METADATA = {
    "rank": 3,
    "local_rank": 1,
    "iteration": 2,
    "micro_batch": 1,
    "sample_idx": 40,
    "module": "model.layers.0.self_attn.q_proj",
    "operation": "forward",
    "phase": "pre",
    "tensor_name": "input",
    "values": "original",
    "consumers": [{"gemm": "fprop"}, {"gemm": "wgrad"}],
    "save_time": "2024-12-01 14:30:22",
    "run_id": "abc",
}


def test_original_has_no_gemm():
    assert CaptureKey.from_metadata(METADATA) == CaptureKey(
        rank=3,
        iteration=2,
        micro_batch=1,
        sample_idx=40,
        module="model.layers.0.self_attn.q_proj",
        operation="forward",
        phase="pre",
        tensor_name="input",
        gemm=None,
        values="original",
    )


def test_quantized_copy_has_the_gemm_of_its_consumer():
    metadata = METADATA | {"values": "quantized", "consumers": [{"gemm": "wgrad"}]}
    key = CaptureKey.from_metadata(metadata)
    assert (key.values, key.gemm) == ("quantized", "wgrad")


@pytest.mark.parametrize("field", ["save_time", "run_id", "local_rank", "quant_type", "world_size"])
def test_time_run_and_format_are_no_part_of_a_key(field):
    assert CaptureKey.from_metadata(METADATA | {field: "other"}) == CaptureKey.from_metadata(METADATA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("iteration", 0),
        ("micro_batch", 0),
        ("sample_idx", 0),
        ("module", "model.layers.1.self_attn.q_proj"),
        ("operation", "backward"),
        ("phase", "post"),
        ("tensor_name", "weight"),
        ("values", "quantized"),
    ],
)
def test_each_part_of_a_key_tells_captures_apart(field, value):
    assert CaptureKey.from_metadata(METADATA | {field: value}) != CaptureKey.from_metadata(METADATA)


def test_old_metadata_without_the_newer_fields_has_a_key():
    metadata = {"rank": 0, "iteration": 0, "operation": "forward", "phase": "pre", "tensor_name": "query"}
    key = CaptureKey.from_metadata(metadata)
    assert (key.micro_batch, key.sample_idx, key.module, key.values, key.gemm) == (0, 0, "", "original", None)


def test_groups_are_eight_of_attention_and_six_of_a_linear():
    assert [s.tensor_name for s in GROUPS[LayerType.ATTENTION]] == [
        "query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value",
    ]  # fmt: skip
    assert [s.tensor_name for s in GROUPS[LayerType.LINEAR]] == [
        "input", "weight", "output", "grad_output", "grad_input", "grad_weight",
    ]  # fmt: skip
