"""Settings of ``quant`` that its type cannot honour; pure, from the catalog."""

from collections.abc import Mapping
from typing import Any

from qcollect.formats.catalog import QuantType, get_quant_type


def find_quant_conflicts(
    quant_type: str, settings: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """What ``quant_type``, and each gemm's own type, cannot take: pairs of key and sentence.

    Args:
        settings: ``scale_rule``, ``rounding`` and ``block_size`` of the recipe's ``quant``; None or absent: unset.
        overrides: the recipe's ``quant.overrides``.
    """
    conflicts = _conflicts("quant", get_quant_type(quant_type), settings)
    for gemm, override in overrides.items():
        entry = get_quant_type(override.get("type") or quant_type)
        conflicts += _conflicts(f"quant.overrides.{gemm}", entry, override)
    return conflicts


def _conflicts(section: str, entry: QuantType, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    allowed = {"scale_rule": entry.scale_rules, "rounding": entry.roundings}
    conflicts = []
    for name, values in allowed.items():
        value = settings.get(name)
        if value is not None and value not in values:
            takes = f"takes {', '.join(values)}" if values else "takes none; leave it out"
            conflicts.append((f"{section}.{name}", f"{section}.{name} is {value!r}, and {entry.name} {takes}"))
    if settings.get("block_size") is not None and entry.block_size is None:
        key = f"{section}.block_size"
        conflicts.append((key, f"{key} is {settings['block_size']}, and {entry.name} has no blocks; leave it out"))
    return conflicts
