"""The generated documents: what is checked, and how it is told."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from qcollect.errors import ExitCode

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", Path(__file__).with_name("generate.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(generate: ModuleType, tmp_path: Path) -> Path:
    """A checkout in which every generated document is up to date."""
    for path in (generate.CLI_REFERENCE, generate.FORMATS):
        (tmp_path / path).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / generate.FORMATS, tmp_path / generate.FORMATS)
    assert generate.main([], tmp_path) == 0
    return tmp_path


def test_what_was_written_passes_the_check(
    generate: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert generate.main(["--check"], root) == 0
    assert capsys.readouterr() == ("", "")


def test_out_of_date_document_is_shown_and_left_alone(
    generate: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = root / generate.CLI_REFERENCE
    reference.write_text(reference.read_text(encoding="utf-8").replace("--target N", "--goal N"), encoding="utf-8")
    assert generate.main(["--check"], root) == 1
    shown = capsys.readouterr()
    assert "+  --target N" in shown.out
    assert shown.err == "qcollect/cli/README.md is out of date; 'python tests/docs/generate.py' writes it\n"
    assert "--goal N" in reference.read_text(encoding="utf-8")


def test_missing_markers_are_refused(generate: ModuleType, root: Path) -> None:
    (root / generate.FORMATS).write_text("no table here\n", encoding="utf-8")
    with pytest.raises(ValueError, match="qcollect/formats/README.md: needs the lines <!-- formats:begin -->"):
        generate.main(["--check"], root)


def test_unknown_argument_is_refused(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--chekc"]) == 2
    assert capsys.readouterr().err == "unknown arguments ['--chekc']; known: --check\n"


def test_reference_names_every_command_and_exit_code(generate: ModuleType) -> None:
    reference = generate.cli_reference()
    for path in generate.commands():
        assert f"\n## {' '.join(('qcollect', *path))}\n" in reference
    codes = {
        code.strip()
        for line in reference.splitlines()
        if line.startswith("| ")
        for code in line[2:].split(" |")[0].split(",")
    }
    assert {str(int(code)) for code in ExitCode} <= codes
