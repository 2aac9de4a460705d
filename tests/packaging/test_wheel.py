"""What the wheel holds, and what it says about itself."""

import re
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qcollect._version import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASE = re.compile(r"## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{dist_info()}/METADATA").decode())


def dist_info() -> str:
    return f"qcollect-{__version__}.dist-info"


def requirements(metadata: Message, extra: str | None) -> dict[str, str]:
    """Name -> specifier, of the core or of one extra."""
    parsed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    wanted = [r for r in parsed if (r.marker is None) == (extra is None)]
    if extra is not None:
        wanted = [r for r in wanted if r.marker is not None and r.marker.evaluate({"extra": extra})]
    return {r.name: str(r.specifier) for r in wanted}


def test_every_file_of_the_package_is_in_the_wheel(names: set[str]) -> None:
    sources = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "qcollect").rglob("*.py")}
    assert not sources - names
    assert "qcollect/py.typed" in names


def test_recipes_with_script_and_text_are_in_the_wheel(names: set[str]) -> None:
    folder = REPOSITORY / "recipes"
    files = {
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert {"tiny.yaml", "train.py", "text/encyclopedia.txt"} <= files
    assert not {f"qcollect/_recipes/{file}" for file in files} - names


def test_wheel_holds_nothing_else(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"qcollect", "qcollect_auto.pth", dist_info()}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".pt"))]


def test_licence_and_entry_point_are_in_the_wheel(wheel: Path, names: set[str], metadata: Message) -> None:
    assert f"{dist_info()}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{dist_info()}/entry_points.txt").decode()
    assert entry_points.split() == ["[console_scripts]", "qcollect", "=", "qcollect.cli:main"]


def test_core_dependencies_are_few(metadata: Message) -> None:
    core = requirements(metadata, None)
    assert sorted(core) == ["psutil", "pydantic", "pyyaml", "rich", "torch", "typer", "xxhash"]
    assert core["torch"] == ">=2.11"


def test_extras_bring_what_their_names_say(metadata: Message) -> None:
    assert sorted(metadata.get_all("Provides-Extra", [])) == ["all", "data", "gguf", "hf", "zstd"]
    hf = {"transformers", "safetensors", "tokenizers", "numpy"}
    assert set(requirements(metadata, "hf")) == hf
    assert set(requirements(metadata, "gguf")) == hf | {"gguf", "accelerate"}
    assert set(requirements(metadata, "data")) == hf | {"mwparserfromhell"}
    assert set(requirements(metadata, "zstd")) == {"zstandard"}
    assert set(requirements(metadata, "all")) == hf | {"gguf", "accelerate", "mwparserfromhell", "zstandard"}


def test_python_3_11_to_3_13_is_supported(metadata: Message) -> None:
    supported = SpecifierSet(metadata["Requires-Python"])
    versions = [f"3.{minor}.5" for minor in range(9, 16) if f"3.{minor}.5" in supported]
    assert versions == ["3.11.5", "3.12.5", "3.13.5"]
    classifiers = metadata.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)


def test_version_is_the_one_of_the_changelog() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## .*$", changelog, flags=re.MULTILINE)
    released = [match[1] for heading in headings if (match := RELEASE.fullmatch(heading))]
    assert headings[0] == "## [Unreleased]"
    assert len(released) == len(headings) - 1, "a release's heading is '## [X.Y.Z] - YYYY-MM-DD'"
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert not released or released[0] == __version__


def test_tested_versions_satisfy_the_declared_ranges(metadata: Message) -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {r.name.lower().replace("_", "-"): str(r.specifier).removeprefix("==") for r in tested}
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    declared = [*metadata.get_all("Requires-Dist", []), *groups["dev"]]
    for requirement in map(Requirement, declared):
        if requirement.name != "qcollect":
            assert versions[requirement.name.lower().replace("_", "-")] in requirement.specifier, requirement
