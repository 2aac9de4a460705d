import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qcollect.errors import UsageError
from qcollect.worker.fused import split_fused_qkv


def test_groups_of_heads_are_found_where_megatron_puts_them():
    """Feature i holds i; three equal chunks would be wrong: NVIDIA-NeMo/RL pull request 2802."""
    query, key, value = split_fused_qkv(torch.arange(16), num_heads=4, num_kv_groups=2, head_dim=2)
    assert query.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert key.tolist() == [4, 5, 12, 13]
    assert value.tolist() == [6, 7, 14, 15]


def test_without_grouping_heads_take_turns():
    query, key, value = split_fused_qkv(torch.arange(12), num_heads=2, num_kv_groups=2, head_dim=2)
    assert (query.tolist(), key.tolist(), value.tolist()) == ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from((0, 1, 2, -1, -2, -3)))
def test_split_is_the_projection_by_the_split_weight(groups, heads_per_group, head_dim, dim):
    num_heads = groups * heads_per_group
    fused_size = (num_heads + 2 * groups) * head_dim
    weight = torch.arange(fused_size * 3.0).reshape(fused_size, 3)
    parts = split_fused_qkv(weight, num_heads, groups, head_dim, dim=0)
    assert [len(part) for part in parts] == [num_heads * head_dim, groups * head_dim, groups * head_dim]
    assert sorted(torch.cat(parts)[:, 0].tolist()) == weight[:, 0].tolist()
    x = torch.arange(12.0).reshape(2, 2, 3)
    outputs = split_fused_qkv(x @ weight.t(), num_heads, groups, head_dim)
    for part, output in zip(parts, outputs, strict=True):
        assert torch.equal(output, x @ part.t())
    shape = [2, 3, 5]
    shape[dim] = fused_size
    assert split_fused_qkv(torch.zeros(shape), num_heads, groups, head_dim, dim=dim)[1].shape[dim] == groups * head_dim


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (4, 2, 2),
            "dimension -1 of a tensor of shape (5, 18) has 18 features; 4 query heads and 2 groups of 2 need 16",
        ),
        ((4, 3, 2), "4 query heads of 2 features do not divide into 3 groups"),
        ((0, 1, 2), "0 query heads of 2 features do not divide into 1 groups"),
    ],
)
def test_heads_that_do_not_fit_are_refused(arguments, text):
    with pytest.raises(UsageError) as error:
        split_fused_qkv(torch.zeros(5, 18), *arguments)
    assert str(error.value) == text
