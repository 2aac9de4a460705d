"""Writes the documents that the code can print; ``--check`` says which of them are out of date.

    python tests/docs/generate.py            # qcollect/cli/README.md, the table in qcollect/formats/README.md
    python tests/docs/generate.py --check    # exit 1 and the difference where one is out of date

It stands with the tests because it is one of the checks, and no part of what is installed.
"""

import os
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before typer is imported: the same help on every terminal and host
    os.environ |= {"_TYPER_FORCE_DISABLE_TERMINAL": "1", "COLUMNS": "100"}
    for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
        os.environ.pop(name, None)

from typer.main import get_command
from typer.testing import CliRunner

from qcollect.cli import app
from qcollect.formats.table import markdown_table

REPOSITORY = Path(__file__).resolve().parents[2]
CLI_REFERENCE = "qcollect/cli/README.md"
FORMATS = "qcollect/formats/README.md"
BEGIN, END = "<!-- formats:begin -->\n", "\n<!-- formats:end -->"
HEAD = """# Commands

Written by `python tests/docs/generate.py` from `--help`; `shell/check` fails when it is out of date.

Results go to stdout, progress and messages to stderr; there is no colour or animation off a terminal. Exit codes:

| code | meaning |
|---|---|
| 0 | the target was reached, or the run was complete already |
| 1 | internal error |
| 2 | the request is wrong: usage, recipe, quant type, selector |
| 3 | the request is right, and this machine or folder cannot serve it |
| 4 | a worker failed |
| 5 | stalled |
| 6 | a sweep failed in part |
| 7 | stopped before the target |
| 130, 143 | Ctrl-C, SIGTERM |
"""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command after ``qcollect``, groups before their members; the first is empty."""
    command = command or get_command(app)
    yield path
    for name, member in getattr(command, "commands", {}).items():
        yield from commands(member, (*path, name))


def help_text(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="qcollect")
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def cli_reference() -> str:
    sections = (f"## {' '.join(('qcollect', *path))}\n\n```\n{help_text(path)}\n```\n" for path in commands())
    return "\n".join([HEAD, *sections])


def with_table(text: str, table: str) -> str:
    """The text with the table between the markers.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{FORMATS}: needs the lines {BEGIN.strip()} and {END.strip()}, once each")
    return text[: text.index(BEGIN) + len(BEGIN)] + table + text[text.index(END) :]


def documents(root: Path) -> dict[str, tuple[str, str]]:
    """By path, what stands there and what should."""
    reference, formats = root / CLI_REFERENCE, root / FORMATS
    found = reference.read_text(encoding="utf-8") if reference.exists() else ""
    text = formats.read_text(encoding="utf-8")
    return {CLI_REFERENCE: (found, cli_reference()), FORMATS: (text, with_table(text, markdown_table()))}


def main(arguments: list[str], root: Path = REPOSITORY) -> int:
    if arguments not in ([], ["--check"]):
        print(f"unknown arguments {arguments}; known: --check", file=sys.stderr)
        return 2
    stale = {path: texts for path, texts in documents(root).items() if texts[0] != texts[1]}
    for path, (found, wanted) in stale.items():
        if arguments:
            difference = unified_diff(found.splitlines(), wanted.splitlines(), f"{path}, as it is", path, lineterm="")
            print("\n".join(difference))
            print(f"{path} is out of date; 'python tests/docs/generate.py' writes it", file=sys.stderr)
        else:
            (root / path).write_text(wanted, encoding="utf-8")
            print(f"{path}: written")
    return int(bool(arguments and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
