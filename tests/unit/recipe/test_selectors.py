import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcollect.errors import SelectionError
from qcollect.recipe.selectors import check_selector, expand_indices, match_names

NAMES = [
    f"model.layers.{i}.{leaf}" for i in range(2) for leaf in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (3, (3,)),
        ("3", (3,)),
        ([4, 0, 4], (0, 4)),
        ("0-3", (0, 1, 2, 3)),
        ("9-9", (9,)),
        ([0, "4-6", 9], (0, 4, 5, 6, 9)),
        ("0, 4-6, 9", (0, 4, 5, 6, 9)),
        ("every:4", (0, 4, 8)),
        ("every:100", (0,)),
        ("spread:1", (0,)),
        ("spread:4", (0, 2, 5, 7)),
        ("spread:10", tuple(range(10))),
        ("all", tuple(range(10))),
    ],
)
def test_selector_means_these_of_ten_indices(selector: object, expected: tuple[int, ...]) -> None:
    assert expand_indices(selector, 10) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "selector",
    ["", "x", "1-", "-1", -1, True, None, 1.5, [1.5], [True], "every:0", "spread:0", "3-1", [], "1;2", "٣", "9" * 30],
)
def test_nonsense_is_refused_and_the_grammar_named(selector: object) -> None:
    with pytest.raises(SelectionError, match=r"capture\.layers (is|runs)"):
        check_selector(selector, key="capture.layers")  # type: ignore[arg-type]


def test_message_of_nonsense_names_the_term_and_what_to_write() -> None:
    with pytest.raises(SelectionError) as caught:
        expand_indices("0-3,first", 10, key="capture.layers")
    assert str(caught.value) == (
        "capture.layers is '0-3,first': 'first' is not an index (3), a range (0-3), "
        "every:N, spread:K, all, or a list of these"
    )


@pytest.mark.parametrize(
    ("selector", "count", "message"),
    [
        ([0, 17], 16, "capture.layers is [0, 17]: index 17 does not exist, there are 16 (0-15)"),
        ("14-99", 16, "capture.layers is '14-99': index 16 does not exist, there are 16 (0-15)"),
        ("0-99999999999", 16, "capture.layers is '0-99999999999': index 16 does not exist, there are 16 (0-15)"),
        ("spread:17", 16, "capture.layers is 'spread:17': 17 indices are asked for, there are 16 (0-15)"),
        ("all", 0, "capture.layers is 'all': there are none"),
        (0, 0, "capture.layers is 0: index 0 does not exist, there are none"),
    ],
)
def test_index_that_does_not_exist_is_refused_with_those_that_do(selector: object, count: int, message: str) -> None:
    with pytest.raises(SelectionError) as caught:
        expand_indices(selector, count, key="capture.layers")  # type: ignore[arg-type]
    assert str(caught.value) == message


@given(count=st.integers(1, 400), data=st.data())
def test_spread_gives_k_indices_from_zero_at_even_distances(count: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, count))
    indices = expand_indices(f"spread:{num}", count)
    gaps = {b - a for a, b in zip(indices, [*indices[1:], count], strict=True)}
    assert len(indices) == num
    assert indices[0] == 0
    assert max(gaps) - min(gaps) <= 1


@given(indices=st.lists(st.integers(0, 50), min_size=1))
def test_list_and_comma_text_mean_the_same(indices: list[int]) -> None:
    text = ",".join(str(i) for i in indices)
    assert expand_indices(indices, 51) == expand_indices(text, 51) == tuple(sorted(set(indices)))


def test_names_come_in_their_own_order_each_once() -> None:
    assert match_names(["*.up_proj", "*.0.*"], NAMES) == (*NAMES[:3], NAMES[5])


def test_single_pattern_may_be_text() -> None:
    assert match_names("*.q_proj", NAMES) == (NAMES[0], NAMES[3])


def test_name_with_brackets_matches_itself() -> None:
    assert match_names(["w[0]"], ["w[0]", "w0"]) == ("w[0]", "w0")


def test_globs_are_case_sensitive() -> None:
    with pytest.raises(SelectionError):
        match_names(["*.Q_PROJ"], NAMES)


@pytest.mark.parametrize(
    ("pattern", "ending"),
    [
        ("*.q_prj", "did you mean '*.q_proj'?"),
        ("model.layers.0.mlp.up_pro", "did you mean 'model.layers.0.mlp.up_proj'?"),
        ("zzz", "there are: model.layers.0.self_attn.q_proj, "),
    ],
)
def test_pattern_without_match_is_refused_with_near_names(pattern: str, ending: str) -> None:
    with pytest.raises(SelectionError) as caught:
        match_names(["*.k_proj", pattern], NAMES, key="capture.modules")
    assert str(caught.value).startswith(f"capture.modules: {pattern!r} matches nothing; ")
    assert ending.rstrip("?") in str(caught.value)


def test_many_names_are_cut_short() -> None:
    with pytest.raises(SelectionError, match=r"there are: n0, n1, n2, n3, n4, n5, n6, n7, \.\.\. \(30 in all\)$"):
        match_names(["zzz"], [f"n{i}" for i in range(30)])


def test_empty_list_of_patterns_is_refused() -> None:
    with pytest.raises(SelectionError, match="is an empty list and selects nothing"):
        match_names([], NAMES)
