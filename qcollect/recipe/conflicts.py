"""Settings of ``quant`` that its type cannot honour; pure, from the catalog."""

from collections.abc import Callable, Mapping
from typing import Any

from qcollect.formats.catalog import get_quant_type
from qcollect.formats.records import QuantType


def find_quant_conflicts(
    quant_type: str,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]],
    find: Callable[[str], QuantType] = get_quant_type,
) -> list[tuple[str, str]]:
    """What ``quant_type``, and each gemm's own type, cannot take: pairs of key and sentence.

    Args:
        settings: of the recipe's ``quant`` those that a type may not take; None or absent: unset.
        overrides: the recipe's ``quant.overrides``.
        find: the quant type of a name, ``QuantSpec.find_type`` where the recipe has formats of its own.
    """
    conflicts = _conflicts("quant", find(quant_type), settings)
    for gemm, override in overrides.items():
        entry = find(override.get("type") or quant_type)
        conflicts += _conflicts(f"quant.overrides.{gemm}", entry, override)
    return conflicts


def _conflicts(section: str, entry: QuantType, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    allowed = {"scale_rule": entry.scale_rules, "rounding": entry.roundings, "grad_rounding": entry.roundings}
    conflicts = []
    for name, values in allowed.items():
        value = settings.get(name)
        if value is not None and value not in values:
            takes = f"takes {', '.join(values)}" if values else "takes none; leave it out"
            conflicts.append((f"{section}.{name}", f"{section}.{name} is {value!r}, and {entry.name} {takes}"))
    for name in ("block_size", "weight_block_size"):
        size, key = settings.get(name), f"{section}.{name}"
        if size is not None and entry.block_size is None:
            conflicts.append((key, f"{key} is {size}, and {entry.name} has no blocks; leave it out"))
        elif (
            size is not None
            and entry.micro_exponents
            and (not isinstance(size, int) or size % entry.micro_exponents[0][0])
        ):
            group = entry.micro_exponents[0][0]
            conflicts.append((key, f"{key} is {size}, and {entry.name} takes a multiple of {group} along one axis"))
    if settings.get("hadamard") is not None and entry.element is None:
        key = f"{section}.hadamard"
        conflicts.append((key, f"{key} is {settings['hadamard']}, and {entry.name} quantizes nothing; leave it out"))
    return conflicts
