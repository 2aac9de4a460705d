"""In which field two plans would capture differently: what resume and sweep refuse to mix."""

from typing import Any

# what may differ between a run and its repetition without changing a captured value
_IRRELEVANT_SECTIONS = ("launch", "name", "path")
_IRRELEVANT_FIELDS = (("quant", "types"),)


def first_difference(stored: dict[str, Any], planned: dict[str, Any]) -> str | None:
    """The name of a field of the plan, or of its recipe (dotted), in which two plans differ; None: in none that counts.

    Args:
        stored: ``plan.json`` of a run.
        planned: ``Plan.to_dict`` of the new launch.
    """
    for key in ("quant_type", "world_size", "device", "target", "script_args"):
        if stored.get(key) != planned[key]:
            return key
    for section, fields in planned["recipe"].items():
        before = stored.get("recipe", {}).get(section)
        if section in _IRRELEVANT_SECTIONS or before == fields:
            continue
        if not isinstance(fields, dict) or not isinstance(before, dict):
            return str(section)
        for name in dict.fromkeys([*fields, *before]):
            if before.get(name) != fields.get(name) and (section, name) not in _IRRELEVANT_FIELDS:
                return f"{section}.{name}"
    # the same settings and another list: another version of qcollect, or of the model's files
    return None if stored.get("schedule") == planned["schedule"] else "schedule"


def describe_difference(name: str, stored: dict[str, Any], planned: dict[str, Any]) -> str:
    """``train.seed is 1 there and 0 now``; of what is long, only that it differs."""
    before, now = (_find(fields, name) for fields in (stored, planned))
    if max(len(repr(before)), len(repr(now))) > 60:
        return f"{name} differs"
    return f"{name} is {before!r} there and {now!r} now"


def _find(plan: dict[str, Any], name: str) -> Any:
    if name in plan:
        return plan[name]
    value: Any = plan.get("recipe")
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
