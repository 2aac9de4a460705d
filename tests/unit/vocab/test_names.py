import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.vocab import QUANT_TYPES, TENSOR_NAMES, CaptureName, Gemm

quick = settings(max_examples=200, deadline=None, derandomize=True)

WRITTEN = {
    "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt": CaptureName(
        timestamp="20241201_143022",
        counter=1,
        iteration=0,
        layer_type="attention",
        layer_idx=8,
        operation="forward",
        phase="pre",
        component="FA",
        quant_type="mxfp8",
        rank=0,
        sample_idx=0,
        tensor="query",
    ),
    "20241201_143022_0009_iter000_linear_L8_forward_pre_linear_mxfp8_rank0_sample0_q_proj_input.pt": CaptureName(
        timestamp="20241201_143022",
        counter=9,
        iteration=0,
        layer_type="linear",
        layer_idx=8,
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="mxfp8",
        rank=0,
        sample_idx=0,
        tensor="q_proj_input",
    ),
}


def old(name: str, **fields: object) -> tuple[str, CaptureName]:
    date = name[:15]
    return name, CaptureName(timestamp=date, counter=int(name[16:20]), **fields)


OLDER = [
    old(
        "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt",
        iteration=0,
        layer_type="linear",
        layer_idx=0,
        operation="forward",
        phase="post",
        component="linear",
        quant_type="bf16",
        rank=0,
        sample_idx=0,
        tensor="output",
    ),
    old(
        "20241201_143022_0002_iter003_linear_LNone_forward_post_linear_hifp8_rank11_sample7_output.pt",
        iteration=3,
        layer_type="linear",
        layer_idx=None,
        operation="forward",
        phase="post",
        component="linear",
        quant_type="hifp8",
        rank=11,
        sample_idx=7,
        tensor="output",
    ),
    old(
        "20250908_095220_0003_attention_L0_forward_pre_FA_mxfp8_value.pt",
        layer_type="attention",
        layer_idx=0,
        operation="forward",
        phase="pre",
        component="FA",
        quant_type="mxfp8",
        tensor="value",
    ),
    old(
        "20250908_095220_0006_linear_L1_forward_pre_linear_mxfp8_weight.pt",
        layer_type="linear",
        layer_idx=1,
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="mxfp8",
        tensor="weight",
    ),
    old(
        "20250908_091143_0001_attention_L0_forward_hifp8_query.pt",
        layer_type="attention",
        layer_idx=0,
        operation="forward",
        quant_type="hifp8",
        tensor="query",
    ),
    old(
        "20250908_091143_0004_linear_L1_forward_mxfp8_input.pt",
        layer_type="linear",
        layer_idx=1,
        operation="forward",
        quant_type="mxfp8",
        tensor="input",
    ),
    old(
        "20250908_091143_0004_linear_forward_mxfp4_input.pt",
        layer_type="linear",
        layer_idx=None,
        operation="forward",
        quant_type="mxfp4",
        tensor="input",
    ),
    old(
        "20250908_091143_0004_linear_LNone_forward_fp16_weight.pt",
        layer_type="linear",
        layer_idx=None,
        operation="forward",
        quant_type="fp16",
        tensor="weight",
    ),
    old(
        "20250908_091143_0004_attention_forward_post_FA_bf16_output.pt",
        layer_type="attention",
        layer_idx=None,
        operation="forward",
        phase="post",
        component="FA",
        quant_type="bf16",
        tensor="output",
    ),
]


@pytest.mark.parametrize("name", WRITTEN)
def test_written_names_are_these_to_the_letter(name):
    assert WRITTEN[name].build() == name
    assert CaptureName.parse(name) == WRITTEN[name]


@pytest.mark.parametrize(("name", "fields"), OLDER)
def test_older_forms_are_read(name, fields):
    assert CaptureName.parse(name) == fields


@pytest.mark.parametrize(
    "name",
    [
        "20250908_091143_0006_linear_L1_backward_hifp8_input.pt",
        "20250908_091143_0006_linear_LNone_backward_hifp8_input.pt",
        "20250908_091143_0006_linear_backward_hifp8_input.pt",
        "20250908_095220_0008_linear_L1_backward_pre_linear_mxfp8_input.pt",
        "20241201_143022_0006_iter000_linear_L1_backward_pre_linear_mxfp8_rank0_sample0_input.pt",
    ],
)
def test_backward_input_of_a_linear_in_old_folders_is_its_grad_output(name):
    assert CaptureName.parse(name).tensor == "grad_output"


@pytest.mark.parametrize(
    "name",
    [
        "20250908_091143_0006_attention_L1_backward_hifp8_input.pt",
        "20250908_091143_0006_linear_L1_forward_hifp8_input.pt",
        "20241201_143022_0006_iter000_linear_L1_backward_pre_linear_mxfp8_rank0_sample0_q_proj_input.pt",
    ],
)
def test_other_inputs_stay_inputs(name):
    assert CaptureName.parse(name).tensor.endswith("input")


@pytest.mark.parametrize(
    ("form", "tensor"),
    [
        ("20241201_143022_0001_iter000_linear_L8_forward_pre_linear_{}_rank0_sample0_input.pt", "input"),
        ("20250908_095220_0005_linear_L1_forward_pre_linear_{}_input.pt", "input"),
        ("20250908_095220_0005_linear_L1_forward_{}_input.pt", "input"),
        ("20250908_095220_0005_linear_forward_{}_e5m2_is_a_tensor.pt", None),
    ],
)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_quant_type_is_matched_longest_first(form, tensor, quant_type):
    parsed = CaptureName.parse(form.format(quant_type))
    if tensor is not None:
        assert (parsed.quant_type, parsed.tensor) == (quant_type, tensor)
    elif quant_type == "mxfp8":
        assert (parsed.quant_type, parsed.tensor) == ("mxfp8_e5m2", "is_a_tensor")


def test_type_that_is_not_in_the_catalog_is_read_where_a_rank_ends_it():
    name = "20241201_143022_0001_iter000_linear_L8_forward_pre_linear_my_type_9_rank0_sample0_input.pt"
    assert CaptureName.parse(name).quant_type == "my_type_9"
    assert CaptureName.parse(name, quant_types=["bf16"]).quant_type == "my_type_9"


def test_name_without_a_layer_leaves_the_field_out():
    name = CaptureName(
        timestamp="20241201_143022",
        counter=3,
        iteration=0,
        layer_type="linear",
        layer_idx=None,
        operation="backward",
        phase="post",
        component="linear",
        quant_type="none",
        rank=0,
        sample_idx=0,
        tensor="lm_head_grad_weight",
    )
    built = name.build()
    assert built == "20241201_143022_0003_iter000_linear_backward_post_linear_none_rank0_sample0_lm_head_grad_weight.pt"
    assert CaptureName.parse(built) == name


def test_fields_grow_past_their_padding():
    name = (
        "20241201_143022_123456_iter1234567_linear_L4096_forward_pre_linear_mxfp8_rank10000_sample987654321_"
        "down_proj_input_fprop.pt"
    )
    parsed = CaptureName.parse(name)
    assert (parsed.counter, parsed.iteration, parsed.layer_idx) == (123456, 1234567, 4096)
    assert (parsed.rank, parsed.sample_idx) == (10000, 987654321)
    assert parsed.build() == name


@pytest.mark.parametrize(
    "tensor", ["w[0]", "a/b", "../../etc/passwd", "a\0b", "50%", "a%2Fb", "%", "two\nlines", "*?.pt"]
)
def test_tensor_names_no_file_can_have_come_back_as_they_were(tensor):
    name = CaptureName(
        timestamp="20241201_143022",
        counter=1,
        iteration=0,
        layer_type="linear",
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="bf16",
        rank=0,
        sample_idx=0,
        tensor=tensor,
    )
    built = name.build()
    assert "/" not in built and "\0" not in built
    assert CaptureName.parse(built) == name


names = st.builds(
    CaptureName,
    timestamp=st.datetimes().map(lambda t: t.replace(year=max(t.year, 1000)).strftime("%Y%m%d_%H%M%S")),
    counter=st.integers(0, 10**7),
    iteration=st.integers(0, 10**7),
    layer_type=st.sampled_from(("attention", "linear", "mlp", "moe_router")),
    layer_idx=st.none() | st.integers(0, 10**5),
    operation=st.sampled_from(("forward", "backward")),
    phase=st.sampled_from(("pre", "post", "unknown")),
    component=st.sampled_from(("FA", "linear", "unknown", "TEDotProductAttention")),
    quant_type=st.sampled_from(QUANT_TYPES) | st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True),
    rank=st.integers(0, 10**6),
    sample_idx=st.integers(0, 10**9),
    tensor=st.one_of(
        st.sampled_from(TENSOR_NAMES),
        st.tuples(
            st.sampled_from(("q_proj", "down_proj", "0", "w[0]", "fc1.bias")),
            st.sampled_from(TENSOR_NAMES),
            st.sampled_from(("", *(f"_{g}" for g in Gemm))),
        ).map(lambda parts: f"{parts[0]}_{parts[1]}{parts[2]}"),
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40),
    ),
)


@quick
@given(names)
def test_names_round_trip(name):
    if (name.layer_type, name.operation, name.tensor) != ("linear", "backward", "input"):  # the older word for another
        assert CaptureName.parse(name.build()) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tensor.pt",
        "20241201_143022_0001.pt",
        "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query",
        "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt.tmp",
        ".20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt.ab12.tmp",
        "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_query.pt",
        "20241201_143022_001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt",
        "20241201_1430_0001_attention_L8_forward_mxfp8_query.pt",
        "20250908_091143_0001_attention_L0_sideways_hifp8_query.pt",
        "20250908_091143_0001_attention_L0_forward_int3_query.pt",
        "20250908_091143_0001_attention_Lx_forward_hifp8.pt",
        "a/20250908_091143_0001_attention_L0_forward_hifp8_query.pt",
        "20250908_091143_0001_attention_L0_forward_hifp8_query.pt\n",
    ],
)
def test_garbage_is_no_name(name):
    with pytest.raises(ValueError) as error:
        CaptureName.parse(name)
    assert str(error.value) == f"{name!r} is not a capture's file name"


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        ("query", (None, "query", None)),
        ("grad_key", (None, "grad_key", None)),
        ("value_fprop", (None, "value", "fprop")),
        ("q_proj_input", ("q_proj", "input", None)),
        ("q_proj_input_wgrad", ("q_proj", "input", "wgrad")),
        ("gate_proj_grad_input", ("gate_proj", "grad_input", None)),
        ("o_proj_grad_output_dgrad", ("o_proj", "grad_output", "dgrad")),
        ("my_tensor", (None, "my_tensor", None)),
    ],
)
def test_tensor_field_splits_into_projection_name_and_gemm(tensor, parts):
    name = CaptureName(
        timestamp="20241201_143022",
        counter=1,
        layer_type="linear",
        operation="forward",
        quant_type="bf16",
        tensor=tensor,
    )
    assert name.split_tensor() == parts
