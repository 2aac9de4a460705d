"""The program of a process that writes the lines of another: ``python -m qcollect.worker.write_lines``.

A message is what was measured in a micro-batch, with the templates that are new; an answer is how many lines were
written, how many bytes they have, how many could not be written, and why.
"""

import json
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from qcollect.store.capture import write_failure
from qcollect.store.files import LineFile
from qcollect.worker.child import Child, Tell, serve
from qcollect.worker.lines import LineTemplate, Measured, Record


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of lines."""

    num_written: int = 0
    num_bytes: int = 0
    num_missing: int = 0
    reason: str | None = None


def append_lines(manifest: LineFile, lines: list[str]) -> Appended:
    """Write lines by one call."""
    content = "".join(lines).encode("ascii")
    try:
        manifest.path.parent.mkdir(parents=True, exist_ok=True)
        manifest.append_encoded(content)
    except OSError as error:
        return Appended(num_missing=len(lines), reason=str(write_failure(manifest.path, error)))
    return Appended(len(lines), len(content))


class LineWorker:
    """Formats and appends.

    Args:
        settings: the manifest, whether it is synced, and whether more is written after a failure.
    """

    def __init__(self, settings: dict[str, Any], tell: Tell) -> None:
        self._manifest = LineFile(Path(settings["path"]), durable=settings["durable"])
        self._goes_on, self._tell = settings["goes_on"], tell
        self._templates: list[LineTemplate] = []
        self._records: list[Record] = []
        self._has_failed = False

    def work(self, message: tuple[list[LineTemplate], list[Record] | None, tuple[Any, ...]]) -> None:
        templates, records, measured = message
        self._templates += templates
        self._records = self._records if records is None else records
        if self._has_failed:
            return
        lines = Measured(self._records, *measured).lines(self._templates)
        appended = append_lines(self._manifest, lines)
        self._has_failed = appended.num_missing > 0 and not self._goes_on
        self._tell(json.dumps(astuple(appended)).encode())

    def close(self) -> None:
        """Nothing: what was taken is written."""


class LineProcess:
    """Such a process. Templates and records that it has already are not sent again."""

    def __init__(self, manifest: LineFile, *, goes_on: bool) -> None:
        settings = {"path": str(manifest.path), "durable": manifest.durable, "goes_on": goes_on}
        self._child = Child("qcollect.worker.write_lines", settings)
        self._num_templates = 0
        self._records: list[Record] = []

    def write(self, measured: Measured, templates: list[LineTemplate]) -> list[Appended]:
        """Have the lines written; what has become of earlier ones.

        Raises:
            CaptureError: nobody is there to do it.
        """
        new = [replace(template, quantizer=None) for template in templates[self._num_templates :]]  # used up by now
        self._num_templates += len(new)
        records = list(measured.records)
        is_known, self._records = records == self._records, records
        numbers = (measured.moment, measured.numbers, measured.amaxes, measured.scales)
        self._child.send((new, None if is_known else records, numbers))
        return [Appended(*json.loads(answer)) for answer in self._child.answers()]

    def close(self) -> list[Appended]:
        """End it, once everything is written."""
        self._child.end()
        return [Appended(*json.loads(answer)) for answer in self._child.wait()]


if __name__ == "__main__":
    serve(LineWorker)
