"""Settings that cannot be honoured together: of ``quant`` and its type, of ``capture`` and its mode; pure."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from qcollect.errors import FormatError
from qcollect.formats.catalog import get_quant_type
from qcollect.formats.records import QuantType
from qcollect.recipe.records import STATISTICS, CaptureSpec, QuantSpec

_RULES = ("scale_rule", "rounding", "grad_rounding", "block_size", "weight_block_size")
# of ``capture``, what only tensors in files have
_OF_FILES = ("tokens", "layout", "host_memory_gb", "storage", "scales", "compress", "dedupe")


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


def of_type(quant: QuantSpec, name: str) -> QuantSpec:
    """``quant`` for another type: what of its rules that type takes, in every gemm and in attention kernels.

    A gemm's override that has a type of its own says nothing about another one.
    """
    overrides = {gemm: override for gemm, override in quant.overrides.items() if "type" not in override}
    settings = {rule: getattr(quant, rule) for rule in _RULES}
    refused = {key for key, _ in find_quant_conflicts(name, settings, overrides, quant.find_type)}
    kept = {
        gemm: {rule: value for rule, value in override.items() if f"quant.overrides.{gemm}.{rule}" not in refused}
        for gemm, override in overrides.items()
    }
    left_out = {rule: None for rule in _RULES if f"quant.{rule}" in refused}
    return replace(quant, type=name, overrides=kept, attention="qkv", exclude=(), **left_out)  # type: ignore[arg-type]


def find_capture_conflicts(capture: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a recipe's ``capture`` section asks for and its mode does not have: pairs of key and sentence."""
    if capture["mode"] != STATISTICS:
        shadow = ", ".join(capture["shadow"])
        text = f"capture.shadow is {shadow}, and shadow types are measured with capture.mode stats only"
        return [("capture.shadow", f"{text}; set it, or leave them out")] if shadow else []
    defaults = {field.name: field.default for field in fields(CaptureSpec)}
    conflicts = []
    if capture["target"] is not None:
        text = f"capture.target is {capture['target']}, and capture.mode stats takes everything its selectors leave"
        conflicts.append(
            ("capture.target", f"{text}; leave it out (capture.target=null), and bound the run by train.iterations")
        )
    conflicts += [
        (
            f"capture.{name}",
            f"capture.{name} is {capture[name]!r}, and with capture.mode stats no file has it; leave it out",
        )
        for name in _OF_FILES
        if capture[name] != defaults[name]
    ]
    if capture["durability"] == "file":
        text = "capture.durability is 'file', and with capture.mode stats there are no files; use none or all"
        conflicts.append(("capture.durability", text))
    if capture["shadow"] and capture["values"] == "original":
        text = f"capture.shadow is {', '.join(capture['shadow'])}, and capture.values 'original' measures no errors"
        conflicts.append(("capture.shadow", f"{text}; set capture.values to quantized or both"))
    return conflicts


def find_shadow_faults(shadow: tuple[str, ...], quant: QuantSpec) -> list[tuple[str, str]]:
    """The shadow types that quantize nothing, or that nobody knows: pairs of key and sentence."""
    faults = []
    for name in shadow:
        try:
            entry = quant.find_type(name)
        except FormatError as error:
            faults.append(("capture.shadow", f"capture.shadow: {error}"))
            continue
        if entry.element is None:
            faults.append(("capture.shadow", f"capture.shadow names {name}, which quantizes nothing; leave it out"))
    return faults


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
