"""Where each value of a recipe came from, so that a message can name it: a line of a file, or a flag."""

from dataclasses import dataclass, field

from qcollect.document import KeyPath


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """A place in front of a message: ``r.yaml:7``, ``r.yaml`` or ``--set capture.values``.

    ``order`` sorts problems: the file's lines first, then overrides as they were given.
    """

    order: int
    text: str = field(compare=False)
    is_override: bool = field(compare=False, default=False)


_AFTER_ALL_LINES = 1_000_000_000


class Origins:
    """The origin of every value, by the path of its key."""

    def __init__(self, file: str, lines: dict[KeyPath, int]) -> None:
        self._file = file
        self._origins = {path: self.line(line) for path, line in lines.items()}
        self._num_overrides = 0

    def line(self, line: int) -> Origin:
        return Origin(line, f"{self._file}:{line}")

    def override(self, text: str) -> Origin:
        """A new origin for an override; give it to ``replace`` if the override is taken."""
        self._num_overrides += 1
        return Origin(_AFTER_ALL_LINES + self._num_overrides, text, is_override=True)

    def replace(self, path: KeyPath, origin: Origin) -> None:
        """From now on ``path`` and all below it come from ``origin``."""
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]
        self._origins[path] = origin

    def of(self, path: KeyPath) -> Origin:
        """The origin of ``path``, else of what it is part of, else the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._origins:
                return self._origins[path[:end]]
        return Origin(0, self._file)
