"""Typed values of a definition, and all that is wrong with it. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Problem = tuple[str, str]
"""A dotted key, and a sentence that names it."""


class Reader:
    """Typed values of a section; what is wrong is noted, and what is asked for then None."""

    def __init__(
        self, values: Mapping[str, Any], prefix: str, known: Sequence[str], problems: list[Problem] | None = None
    ) -> None:
        self.values, self.prefix = values, prefix
        self.problems: list[Problem] = [] if problems is None else problems
        for key in values:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                question = f" Did you mean {near[0]!r}?" if near else ""
                full = f"{prefix}{key}"
                self.problems.append((full, f"unknown key {full!r}; known: {', '.join(known)}.{question}"))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def refuse(self, key: str, why: str) -> None:
        full = f"{self.prefix}{key}"
        value = f" is {show(self.values[key])};" if key in self.values else ""
        self.problems.append((full, f"{full}{value} {why}"))

    def miss(self, key: str, what: str) -> None:
        full = f"{self.prefix}{key}"
        self.problems.append((full, f"{full} is missing; {what}"))

    def section(self, key: str, known: Sequence[str]) -> "Reader | None":
        value = self.values.get(key)
        if isinstance(value, Mapping):
            return Reader(value, f"{self.prefix}{key}.", known, self.problems)
        if value is None:
            self.miss(key, f"its keys are: {', '.join(known)}")
        else:
            self.refuse(key, f"must be a section with keys of: {', '.join(known)}")
        return None

    def whole(self, key: str, low: int, high: int, *, default: int | None = None) -> int | None:
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.miss(key, f"it is a whole number from {low} to {high}")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(key, f"must be a whole number from {low} to {high}")
            return None
        return value

    def number(self, key: str) -> float | None:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(key, "must be a number")
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return default if value is None else bool(value)

    def text(self, key: str, *, default: str) -> str:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "must be text")
        return default if value is None else str(value)

    def choices(self, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        """Some of ``allowed``, default first; all if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return tuple(allowed)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or any(name not in allowed for name in names):
            self.refuse(key, f"known: {', '.join(allowed)}" if allowed else "there is none to choose; leave it out")
        elif len(set(names)) != len(names):
            self.refuse(key, "one is named twice")
        else:
            return tuple(names)
        return tuple(allowed)


def show(value: Any) -> str:
    """A value as a message shows it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
