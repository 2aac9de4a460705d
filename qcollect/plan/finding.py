"""What a check found: one line that says what is so, how bad that is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from qcollect.errors import MissingExtraError


class Level(StrEnum):
    """``problem`` forbids a run; ``warning`` is allowed and most likely not meant."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a preflight.

    Args:
        check: what was looked at, one word: ``checkpoint``, ``data``, ``space``, ...
        level: how bad it is.
        message: what is so, and where.
        advice: what to do; empty where nothing is to be done.
    """

    check: str
    level: Level
    message: str
    advice: str = ""

    @property
    def text(self) -> str:
        """Message and advice in one sentence, as an error shows them."""
        return f"{self.message}; {self.advice}" if self.advice else self.message

    @classmethod
    def ok(cls, check: str, message: str) -> Self:
        return cls(check=check, level=Level.OK, message=message)

    @classmethod
    def warning(cls, check: str, message: str, advice: str) -> Self:
        return cls(check=check, level=Level.WARNING, message=message, advice=advice)

    @classmethod
    def problem(cls, check: str, message: str, advice: str) -> Self:
        return cls(check=check, level=Level.PROBLEM, message=message, advice=advice)

    @classmethod
    def of_error(cls, check: str, error: Exception | str) -> Self:
        """The problem an error tells; what follows its last semicolon is what to do."""
        separator = ": " if isinstance(error, MissingExtraError) else "; "
        message, _, advice = str(error).rpartition(separator)
        return cls.problem(check, message, advice) if message else cls.problem(check, advice, "")

    def to_dict(self) -> dict[str, str]:
        return {"check": self.check, "level": str(self.level), "message": self.message, "advice": self.advice}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            check=fields["check"], level=Level(fields["level"]), message=fields["message"], advice=fields["advice"]
        )


def texts(findings: Iterable[Finding], level: Level) -> tuple[str, ...]:
    """The findings of one level as sentences, each once."""
    return tuple(dict.fromkeys(f.text for f in findings if f.level == level))
