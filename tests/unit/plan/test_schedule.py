import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.errors import ScheduleError, SelectionError
from qcollect.plan.schedule import (
    Schedule,
    build_schedule,
    choose_captures,
    first_sample_idx,
    order_layers,
    split_evenly,
    spread_evenly,
    warn_of_small_target,
)
from qcollect.recipe.records import CaptureSpec, QuantSpec, TriggerSpec
from qcollect.vocab import Gemm

quick = settings(max_examples=100, deadline=None, derandomize=True)
MXFP8 = QuantSpec(type="mxfp8")


def schedule_of(captures, spec, *, world_size=1, num_iterations=10, micro_batches=1, micro_batch_size=1):
    return build_schedule(
        captures,
        spec,
        world_size=world_size,
        num_iterations=num_iterations,
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
    )


@pytest.fixture(scope="module")
def fifty():
    """Stands for the captures of a layer: the schedule looks at nothing but their number and operation."""
    return list(range(50))


# ---- order -------------------------------------------------------------------------------------


def test_layers_are_completed_middle_first_last_then_evenly_between():
    assert order_layers(range(16)) == [8, 0, 15, 4, 11, 2, 6, 13, 9, 1, 3, 5, 7, 10, 12, 14]


@pytest.mark.parametrize(
    ("layers", "order"),
    [([], []), ([0], [0]), (range(2), [1, 0]), (range(3), [1, 0, 2]), (range(4), [2, 0, 3, 1]), ([9, 3, 3], [9, 3])],
)
def test_few_layers_are_ordered_too(layers, order):
    assert order_layers(layers) == order


@quick
@given(st.sets(st.integers(0, 200), max_size=40))
def test_order_of_layers_is_a_permutation(layers):
    assert sorted(order_layers(layers)) == sorted(layers)


def test_layer_is_attention_first_then_its_linears_in_model_order(llama_sites):
    captures = choose_captures(llama_sites(3), MXFP8, CaptureSpec())
    modules = [name for name, _ in itertools.groupby(c.module for c in captures)]
    names = ("self_attn", *(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))
    assert modules == [f"model.layers.{i}.{name}" for i in (1, 0, 2) for name in names]


def test_groups_are_whole_with_forward_and_backward_together(llama_sites):
    captures = choose_captures(llama_sites(1), MXFP8, CaptureSpec())
    assert len(captures) == 50
    assert [c.tensor for c in captures[:8]] == [
        "query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value",
    ]  # fmt: skip
    assert [c.tensor for c in captures[8:14]] == [
        "q_proj_input", "q_proj_weight", "q_proj_output",
        "q_proj_grad_output", "q_proj_grad_input", "q_proj_grad_weight",
    ]  # fmt: skip
    assert {c.component for c in captures[:8]} == {"FA"}
    assert {c.component for c in captures[8:]} == {"linear"}


def test_sixteen_layers_give_800_captures_and_the_default_target_is_one_whole_layer(llama_sites):
    captures = choose_captures(llama_sites(16), MXFP8, CaptureSpec())
    assert len(captures) == 800
    assert {c.layer_idx for c in captures[: CaptureSpec().num_wanted]} == {8}


# ---- values ------------------------------------------------------------------------------------


def count(captures, module):
    return Counter(str(c.values) for c in captures if c.module == module)


@pytest.mark.parametrize(
    ("values", "attention", "linear"),
    [
        ("original", {"original": 8}, {"original": 6}),
        ("both", {"original": 8, "quantized": 3}, {"original": 6, "quantized": 6}),
        ("quantized", {"original": 5, "quantized": 3}, {"original": 3, "quantized": 6}),
    ],
)
def test_values_give_one_file_for_each_consuming_gemm(llama_sites, values, attention, linear):
    captures = choose_captures(llama_sites(1), MXFP8, CaptureSpec(values=values))
    assert count(captures, "model.layers.0.self_attn") == attention
    assert count(captures, "model.layers.0.self_attn.q_proj") == linear


def test_quantized_copies_are_named_after_their_gemm(llama_sites):
    captures = choose_captures(llama_sites(1), MXFP8, CaptureSpec(values="quantized"))
    assert [c.tensor for c in captures if c.module.endswith("q_proj")] == [
        "q_proj_input_fprop", "q_proj_input_wgrad", "q_proj_weight_fprop", "q_proj_weight_dgrad", "q_proj_output",
        "q_proj_grad_output_dgrad", "q_proj_grad_output_wgrad", "q_proj_grad_input", "q_proj_grad_weight",
    ]  # fmt: skip


@pytest.mark.parametrize("values", ["both", "quantized"])
def test_type_none_has_originals_only(llama_sites, values):
    captures = choose_captures(llama_sites(1), QuantSpec(type="none"), CaptureSpec(values=values))
    assert {str(c.values) for c in captures} == {"original"}
    assert len(captures) == 50


def test_attention_left_alone_keeps_its_originals(llama_sites):
    quant = QuantSpec(type="mxfp8", attention="none")
    captures = choose_captures(llama_sites(1), quant, CaptureSpec(values="quantized"))
    assert count(captures, "model.layers.0.self_attn") == {"original": 8}
    assert count(captures, "model.layers.0.self_attn.q_proj") == {"original": 3, "quantized": 6}


def test_excluded_module_keeps_its_originals(linear_site):
    captures = choose_captures([linear_site("a", 0, excluded=True)], MXFP8, CaptureSpec(values="both"))
    assert count(captures, "a") == {"original": 6}


def test_gemm_that_quantizes_nothing_has_no_copies(linear_site):
    quant = QuantSpec(type="mxfp8", overrides={"wgrad": {"type": "none"}})
    captures = choose_captures([linear_site("a", 0)], quant, CaptureSpec(values="both"))
    assert {c.gemm for c in captures} == {None, Gemm.FPROP, Gemm.DGRAD}
    # what wgrad reads as it is stays as it is
    only = choose_captures([linear_site("a", 0)], quant, CaptureSpec(values="quantized"))
    assert [c.tensor for c in only] == [
        "a_input", "a_input_fprop", "a_weight_fprop", "a_weight_dgrad", "a_output",
        "a_grad_output", "a_grad_output_dgrad", "a_grad_input", "a_grad_weight",
    ]  # fmt: skip


def test_gemm_that_alone_quantizes_has_copies(linear_site):
    quant = QuantSpec(type="none", overrides={"fprop": {"type": "mxfp8"}})
    captures = choose_captures([linear_site("a", 0)], quant, CaptureSpec(values="both"))
    assert [c.tensor for c in captures if c.gemm] == ["a_input_fprop", "a_weight_fprop"]


def test_frozen_weight_has_no_gradient_and_no_wgrad(linear_site):
    site = linear_site("a", 0, without_grad=("grad_weight",))
    captures = choose_captures([site], MXFP8, CaptureSpec(values="both"))
    assert [c.tensor for c in captures] == [
        "a_input", "a_input_fprop", "a_weight", "a_weight_fprop", "a_weight_dgrad", "a_output",
        "a_grad_output", "a_grad_output_dgrad", "a_grad_input",
    ]  # fmt: skip


def test_input_without_grad_has_no_gradient_and_no_dgrad(linear_site):
    site = linear_site("a", 0, without_grad=("grad_input",))
    captures = choose_captures([site], MXFP8, CaptureSpec(values="both"))
    assert [c.tensor for c in captures] == [
        "a_input", "a_input_fprop", "a_input_wgrad", "a_weight", "a_weight_fprop", "a_output",
        "a_grad_output", "a_grad_output_wgrad", "a_grad_weight",
    ]  # fmt: skip


# ---- selectors ---------------------------------------------------------------------------------


def test_lm_head_is_captured_only_on_request(llama_sites):
    sites = llama_sites(2)
    assert not any(c.module == "lm_head" for c in choose_captures(sites, MXFP8, CaptureSpec()))
    asked = choose_captures(sites, MXFP8, CaptureSpec(modules=("lm_head",), values="both"))
    assert {c.module for c in asked} == {"lm_head"}
    assert [c.tensor for c in asked] == [
        "lm_head_input", "lm_head_weight", "lm_head_output",
        "lm_head_grad_output", "lm_head_grad_input", "lm_head_grad_weight",
    ]  # fmt: skip
    assert {c.layer_idx for c in asked} == {None}
    last = choose_captures(sites, MXFP8, CaptureSpec(modules=("*",)))
    assert last[-1].module == "lm_head"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"layers": (0, "2-3")}, {0, 2, 3}),
        ({"layers": "every:2"}, {0, 2}),
        ({"layers": "3"}, {3}),
    ],
)
def test_layers_select(llama_sites, fields, expected):
    assert {c.layer_idx for c in choose_captures(llama_sites(4), MXFP8, CaptureSpec(**fields))} == expected


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"modules": ("*.q_proj", "*.layers.1.*.down_proj")}, 12 + 6),
        ({"layer_types": ("attention",)}, 16),
        ({"operations": ("backward",)}, 2 * (4 + 21)),
        ({"phases": ("post",)}, 2 * (4 + 21)),
        ({"tensor_names": ("grad_*",)}, 2 * (4 + 21)),
        ({"tensor_names": ("weight",), "operations": ("forward",)}, 14),
    ],
)
def test_names_select(llama_sites, fields, count):
    assert len(choose_captures(llama_sites(2), MXFP8, CaptureSpec(**fields))) == count


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"modules": ("*.down_prj",)},
            "capture.modules: '*.down_prj' matches nothing; did you mean '*.down_proj' or '*.o_proj'?",
        ),
        ({"layers": (7,)}, "capture.layers is [7]: index 7 does not exist, there are 2 (0-1)"),
        (
            {"tensor_names": ("query",), "layer_types": ("linear",)},
            "capture.tensor_names: 'query' matches nothing; there are: input, weight, output, grad_output, grad_input, "
            "grad_weight",
        ),
        (
            {"modules": ("lm_head",), "layers": (0,)},
            "capture.layers, capture.modules and capture.layer_types together match none of the model's 17 modules, "
            "from model.layers.0.self_attn; loosen one of them",
        ),
        (
            {"tensor_names": ("weight",), "operations": ("backward",)},
            "capture.operations, capture.phases and capture.tensor_names together match no tensor",
        ),
    ],
)
def test_selector_that_matches_nothing_names_the_alternatives(llama_sites, fields, text):
    with pytest.raises(SelectionError) as error:
        choose_captures(llama_sites(2), MXFP8, CaptureSpec(**fields))
    assert str(error.value) == text


# ---- shares ------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 400), st.integers(1, 8))
def test_shares_sum_to_the_target_and_the_first_ranks_take_one_more(target, world_size):
    schedule = schedule_of(list(range(50)), CaptureSpec(target=target, iterations="0-9"), world_size=world_size)
    shares = [schedule.share(rank) for rank in range(world_size)]
    assert schedule.target == sum(shares) == target
    assert shares == [target // world_size + (rank < target % world_size) for rank in range(world_size)]


@quick
@given(
    st.integers(1, 200),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.sampled_from(("every:3", "0-5", "7", "every:2")),
)
def test_every_schedule_is_exact_and_counts_through(target, world_size, num_iterations, micro_batches, size, samples):
    spec = CaptureSpec(target=target, iterations="all", samples=samples)
    try:
        schedule = schedule_of(
            list(range(10)),
            spec,
            world_size=world_size,
            num_iterations=num_iterations,
            micro_batches=micro_batches,
            micro_batch_size=size,
        )
    except (ScheduleError, SelectionError):
        return
    assert schedule.target == target
    for cuts in schedule.cuts:
        places = [(cut.iteration, cut.micro_batch) for cut in cuts]
        assert places == sorted(set(places))
        assert all(0 < cut.count <= 10 for cut in cuts)
        starts = itertools.accumulate((cut.count for cut in cuts), initial=0)
        assert [cut.start for cut in cuts] == list(starts)[:-1]


@quick
@given(st.integers(0, 100), st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_spreading_is_exact_and_as_even_as_it_can_be(total, capacities):
    total = min(total, sum(capacities))
    shares = spread_evenly(total, capacities)
    assert sum(shares) == total
    assert all(share <= capacity for share, capacity in zip(shares, capacities, strict=True))
    free = [s for s, c in zip(shares, capacities, strict=True) if s < c]
    assert not free or max(shares) - min(free) <= 1


def test_split_evenly():
    assert split_evenly(10, 4) == [3, 3, 2, 2]


def test_last_group_is_cut(llama_sites):
    schedule = schedule_of(choose_captures(llama_sites(2), MXFP8, CaptureSpec()), CaptureSpec(target=11))
    (cut,) = schedule.cuts[0]
    assert (cut.iteration, cut.micro_batch, cut.count, cut.start) == (0, 0, 11, 0)
    assert [c.tensor for c in schedule.captures[:11]][8:] == ["q_proj_input", "q_proj_weight", "q_proj_output"]


def test_ranks_take_the_same_list_each_to_its_share(fifty):
    schedule = schedule_of(fifty, CaptureSpec(target=7), world_size=3)
    assert [[cut.count for cut in cuts] for cuts in schedule.cuts] == [[3], [2], [2]]
    assert {cut.iteration for cuts in schedule.cuts for cut in cuts} == {0}


def test_iterations_share_the_target(fifty):
    spec = CaptureSpec(target=11, iterations="spread:3")
    (cuts,) = schedule_of(fifty, spec, num_iterations=30).cuts
    assert [(cut.iteration, cut.count, cut.start) for cut in cuts] == [(0, 4, 0), (10, 4, 4), (20, 3, 8)]


def test_micro_batches_are_filled_one_after_the_other(fifty):
    (cuts,) = schedule_of(fifty, CaptureSpec(target=120), micro_batches=3).cuts
    assert [(cut.micro_batch, cut.count, cut.start) for cut in cuts] == [(0, 50, 0), (1, 50, 50), (2, 20, 100)]


def test_ranks_are_chosen(fifty):
    schedule = schedule_of(fifty, CaptureSpec(target=5, ranks=(1, 3)), world_size=4)
    assert [schedule.share(rank) for rank in range(4)] == [0, 3, 0, 2]


def test_samples_choose_the_micro_batches_that_hold_them(fifty):
    # 2 ranks, 2 micro-batches of 2 sequences: iteration 0 has samples 0-7, iteration 1 8-15
    spec = CaptureSpec(target=60, samples=(2, 4, 9), iterations="0-1")
    schedule = schedule_of(fifty, spec, world_size=2, micro_batches=2, micro_batch_size=2)
    places = [[(cut.iteration, cut.micro_batch, cut.count) for cut in cuts] for cuts in schedule.cuts]
    assert places == [[(0, 1, 15), (1, 0, 15)], [(0, 0, 30)]]


def test_rank_without_a_chosen_sample_takes_no_part(fifty):
    schedule = schedule_of(fifty, CaptureSpec(target=10, samples=(1,)), world_size=4)
    assert [schedule.share(rank) for rank in range(4)] == [0, 10, 0, 0]


def test_iteration_with_fewer_chosen_samples_gives_what_it_can(fifty):
    spec = CaptureSpec(target=150, samples=(0, 1, 2), iterations="0-1")
    (cuts,) = schedule_of(fifty, spec, micro_batches=2).cuts
    assert [(cut.iteration, cut.micro_batch, cut.count) for cut in cuts] == [(0, 0, 50), (0, 1, 50), (1, 0, 50)]


def test_samples_outside_what_is_captured_are_refused(fifty):
    with pytest.raises(SelectionError) as error:
        schedule_of(fifty, CaptureSpec(target=1, samples=(5,)))
    assert str(error.value) == (
        "capture.samples names no sample of the iterations and ranks that are captured; loosen capture.samples, "
        "capture.iterations or capture.ranks"
    )


def test_global_sample_index_takes_turns_over_ranks():
    firsts = [
        first_sample_idx(rank, iteration, micro_batch, 2, 2, 3)
        for iteration in range(2)
        for micro_batch in range(2)
        for rank in range(2)
    ]
    assert firsts == list(range(0, 24, 3))


# ---- refusals and warnings -----------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "micro_batches", "possible"), [(1, 1, 50), (2, 1, 100), (2, 3, 300)])
def test_target_above_what_the_run_can_produce_is_refused_with_the_number(fifty, world_size, micro_batches, possible):
    arguments = {"world_size": world_size, "micro_batches": micro_batches}
    assert schedule_of(fifty, CaptureSpec(target=possible), **arguments).target == possible
    with pytest.raises(ScheduleError) as error:
        schedule_of(fifty, CaptureSpec(target=possible + 1), **arguments)
    assert str(error.value) == (
        f"target {possible + 1} is more than this run can produce: {possible} files = 50 captures a micro-batch, "
        f"{micro_batches} micro-batch(es), 1 iteration(s), {world_size} rank(s); lower --target, or capture more with "
        "--set capture.iterations=spread:K or capture.values=both"
    )


def test_number_in_the_refusal_is_the_most_uneven_ranks_can_do(fifty):
    # rank 0 has two chosen micro-batches, rank 1 one: shares may differ by one only
    spec = CaptureSpec(target=101, samples=(0, 1, 2))
    assert [schedule_of(fifty, spec, world_size=2, micro_batches=2).share(rank) for rank in range(2)] == [51, 50]
    with pytest.raises(ScheduleError, match="target 102 is more than this run can produce: 101 files"):
        schedule_of(fifty, CaptureSpec(target=102, samples=(0, 1, 2)), world_size=2, micro_batches=2)


def test_target_too_small_for_a_backward_capture_on_every_rank_is_warned_of(llama_sites):
    captures = choose_captures(llama_sites(1), MXFP8, CaptureSpec())

    def warning(target, world_size, captures=captures, **fields):
        spec = CaptureSpec(target=target, **fields)
        return warn_of_small_target(schedule_of(captures, spec, world_size=world_size), spec)

    assert warning(5, 1) is None
    assert warning(10, 2) is None
    assert warning(4, 1) == (
        "the target 4 is too small to reach a backward capture on rank(s) 0; raise --target, or choose with "
        "capture.operations"
    )
    assert "on rank(s) 1;" in warning(9, 2)
    assert "on rank(s) 0, 1, 2, 3;" in warning(2, 4)
    assert "on rank(s) 3;" in warning(2, 4, ranks=(3,))
    assert warning(1, 4, samples=(0,)) is not None


def test_no_warning_where_backward_was_not_asked_for(llama_sites):
    spec = CaptureSpec(target=3, operations=("forward",))
    assert warn_of_small_target(schedule_of(choose_captures(llama_sites(1), MXFP8, spec), spec), spec) is None


# ---- files ---------------------------------------------------------------------------------------


def test_schedule_goes_through_json(llama_sites):
    spec = CaptureSpec(target=123, values="both", iterations="spread:2")
    schedule = schedule_of(choose_captures(llama_sites(2), MXFP8, spec), spec, world_size=3, micro_batches=2)
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert again.target == 123


def test_estimated_bytes_are_tensors_and_their_wrapping(linear_site):
    spec = CaptureSpec(target=8, iterations="0-1", tensor_names=("input", "weight", "output", "grad_output"))
    schedule = schedule_of(choose_captures([linear_site("a", 0)], MXFP8, spec), spec)
    assert schedule.num_bytes() == 8 * 4096 + 2 * 4 * (32 + 64 + 32 + 32)


# ---- a trigger ---------------------------------------------------------------------------------


def test_with_a_trigger_the_target_is_spread_over_its_iterations(fifty):
    spec = CaptureSpec(target=33, trigger=TriggerSpec(on=("nan",), iterations=3))
    schedule = schedule_of(fifty, spec, world_size=2)
    assert [[(c.iteration, c.count, c.start) for c in cuts] for cuts in schedule.cuts] == [
        [(0, 6, 0), (1, 6, 6), (2, 5, 12)],
        [(0, 6, 0), (1, 5, 6), (2, 5, 11)],
    ]


def test_with_a_trigger_a_target_too_large_is_told_to_take_more_of_its_iterations(fifty):
    spec = CaptureSpec(target=51, trigger=TriggerSpec(on=("nan",)))
    with pytest.raises(ScheduleError, match=r"50 files = .* --set capture\.trigger\.iterations=K or"):
        schedule_of(fifty, spec)
