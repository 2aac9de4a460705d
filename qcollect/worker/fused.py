"""Megatron's fused projections taken apart: where query, key and value lie in ``linear_qkv``."""

from torch import Tensor

from qcollect.errors import UsageError


def split_fused_qkv(
    tensor: Tensor, num_heads: int, num_kv_groups: int, head_dim: int, dim: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a fused QKV projection, heads in order.

    The fused dimension is laid out group by group: the query heads that share one key/value head, then that key
    head, then that value head. Three equal chunks would be wrong even without grouping. With 4 heads, 2 groups and
    head_dim 2 features 0-3 and 8-11 are query, 4-5 and 12-13 key, 6-7 and 14-15 value.

    Args:
        tensor: an output of ``linear_qkv`` or its gradient, fused along the last dimension; or its weight or bias,
            or their gradients (``dim=0``).
        num_heads: query heads held here: of the whole layer, or of one tensor-parallel rank.
        num_kv_groups: key/value heads held here (``num_query_groups``); ``num_heads`` without grouping.
        head_dim: features of a head (``kv_channels``).
        dim: the fused dimension.

    Returns:
        query of ``num_heads * head_dim`` features along ``dim``, key and value of ``num_kv_groups * head_dim``.

    Raises:
        UsageError: the heads do not divide into the groups, or the dimension is not of their size.
    """
    if min(num_heads, num_kv_groups, head_dim) < 1 or num_heads % num_kv_groups:
        raise UsageError(f"{num_heads} query heads of {head_dim} features do not divide into {num_kv_groups} groups")
    heads_per_group = num_heads // num_kv_groups
    fused_size = num_kv_groups * (heads_per_group + 2) * head_dim
    if tensor.shape[dim] != fused_size:
        raise UsageError(
            f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} has {tensor.shape[dim]} features; {num_heads} "
            f"query heads and {num_kv_groups} groups of {head_dim} need {fused_size}"
        )
    axis = dim % tensor.dim()
    groups: Tensor = tensor.unflatten(axis, (num_kv_groups, heads_per_group + 2, head_dim))  # type: ignore[no-untyped-call]
    query = groups.narrow(axis + 1, 0, heads_per_group)
    key, value = groups.narrow(axis + 1, heads_per_group, 1), groups.narrow(axis + 1, heads_per_group + 1, 1)
    return query.flatten(axis, axis + 2), key.flatten(axis, axis + 2), value.flatten(axis, axis + 2)
