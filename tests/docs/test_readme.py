"""The README names what exists: commands, flags, scripts, files."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from qcollect.cli import app

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(
    path for folder in ("", "qcollect/**/", "recipes/**/", "tests/**/") for path in REPOSITORY.glob(f"{folder}*.md")
)


def command_lines() -> list[list[str]]:
    """The words of every line that calls qcollect in a shell block, comments left out."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "qcollect"]


def find_command(words: list[str]) -> tuple[str, object]:
    command, path = get_command(app), "qcollect"
    for word in words[1:]:
        member = getattr(command, "commands", {}).get(word)
        if member is None:
            break
        command, path = member, f"{path} {word}"
    return path, command


def known_flags(command: object) -> set[str]:
    return {
        flag for parameter in getattr(command, "params", ()) for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def leaf_commands() -> set[str]:
    def walk(command: object, path: str) -> set[str]:
        members = getattr(command, "commands", {})
        return set().union(*(walk(m, f"{path} {name}") for name, m in members.items())) if members else {path}

    return walk(get_command(app), "qcollect")


def test_command_table_lists_every_command_and_no_other() -> None:
    section = README.split("## Commands\n")[1].split("\n## ")[0]
    listed = {
        find_command(shlex.split(call))[0]
        for call in re.findall(r"^\| `(qcollect [^`]*)`", section, flags=re.MULTILINE)
    }
    assert listed == leaf_commands()


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_commands_of_the_readme_exist_with_their_flags(words: list[str]) -> None:
    path, command = find_command(words)
    assert path in leaf_commands()
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= known_flags(command) | {"--help"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_relative_links_lead_to_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_script_of_the_shell_folder_is_named() -> None:
    scripts = {f"shell/{p.name}" for p in (REPOSITORY / "shell").iterdir() if not p.name.startswith("_")}
    assert scripts <= set(re.findall(r"shell/[\w.]+", README))


def refusals() -> list[tuple[list[str], str, int]]:
    """The rows under "What it refuses": arguments, message, exit code."""
    section = README.split("## What it refuses\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `qcollect ([^`]*)` \| `([^`]*)` \| (\d+) \|$", section, flags=re.MULTILINE)
    return [(shlex.split(call), message, int(code)) for call, message, code in rows]


@pytest.mark.parametrize(("arguments", "message", "code"), refusals())
def test_what_it_refuses_is_refused_in_those_words(
    arguments: list[str], message: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-m", "qcollect", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_refusals_are_listed() -> None:
    assert len(refusals()) >= 8


def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    section = README.split("## Python\n")[1].split("\n## ")[0]
    program = "".join(re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL))
    values = re.findall(r"^(qcollect\.fake_quantize\(.*\)) +# \[\[(.*?)\]\]", section, flags=re.MULTILINE)
    program += "".join(f"assert {call}.tolist() == [[{numbers}]]\n" for call, numbers in values)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(values) == 2
    assert len(list((tmp_path / "logs").glob("*.pt"))) == 10
