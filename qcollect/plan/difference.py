"""In which field two plans would capture differently: what resume and sweep refuse to mix."""

from collections.abc import Mapping
from typing import Any

# what may differ between a run and its repetition without changing a captured value
_IRRELEVANT_SECTIONS = ("launch", "name", "path")


def first_difference(stored: dict[str, Any], planned: dict[str, Any]) -> str | None:
    """The name of a field of the plan, or of its recipe (dotted), in which two plans differ; None: in none that counts.

    Args:
        stored: ``plan.json`` of a run.
        planned: ``Plan.to_dict`` of the new launch.
    """
    for key in ("quant_type", "world_size", "device", "target", "script_args"):
        if stored.get(key) != planned[key]:
            return key
    before, now = _relevant(stored.get("recipe", {})), _relevant(planned["recipe"])
    for section, fields in now.items():
        name = _difference(section, before.get(section), fields)
        if name is not None:
            return name
    # the same settings and another list: another version of qcollect, or of the model's files
    return None if stored.get("schedule") == planned["schedule"] else "schedule"


def describe_difference(name: str, stored: dict[str, Any], planned: dict[str, Any]) -> str:
    """``train.seed is 1 there and 0 now``; of what is long, only that it differs."""
    before, now = (_find(fields, name) for fields in (stored, planned))
    if max(len(repr(before)), len(repr(now))) > 60:
        return f"{name} differs"
    return f"{name} is {before!r} there and {now!r} now"


def _relevant(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without what no captured value follows from; of its own number formats, those that are used."""
    relevant = {section: fields for section, fields in recipe.items() if section not in _IRRELEVANT_SECTIONS}
    if isinstance(quant := relevant.get("quant"), Mapping):
        overrides = (quant.get("overrides") or {}).values()
        shadow = (relevant.get("capture") or {}).get("shadow") or ()
        used = {quant.get("type"), *(o.get("type") for o in overrides if isinstance(o, Mapping)), *shadow}
        formats = {name: fields for name, fields in (quant.get("formats") or {}).items() if name in used}
        relevant["quant"] = {key: value for key, value in quant.items() if key != "types"} | {"formats": formats}
    return relevant


def _difference(name: str, before: Any, now: Any) -> str | None:
    """The dotted name, from ``name`` on, of the first value that differs; None: they are the same."""
    if before == now:
        return None
    if not isinstance(now, dict) or not isinstance(before, dict):
        return name
    fields = dict.fromkeys([*now, *before])
    found = (_difference(f"{name}.{key}", before.get(key), now.get(key)) for key in fields)
    return next((where for where in found if where is not None), None)


def _find(plan: dict[str, Any], name: str) -> Any:
    if name in plan:
        return plan[name]
    value: Any = plan.get("recipe")
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
