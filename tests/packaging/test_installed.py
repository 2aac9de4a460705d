"""The installed wheel, called from a folder that has nothing to do with the checkout."""

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy")
# ends the program as the command does, and tells on stderr what of HEAVY was imported
TELL_IMPORTS = f"""
import atexit, sys
atexit.register(lambda: print("imported:", [m for m in {HEAVY} if m in sys.modules], file=sys.stderr))
"""


def call(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    argv = [str(argument) for argument in arguments]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_package_comes_from_the_environment_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    printed = call(installed / "python", "-c", "import qcollect; print(qcollect.__file__)", cwd=tmp_path).stdout
    assert Path(printed.strip()).is_relative_to(installed.parent)


def test_all_bundled_recipes_are_listed(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(call(installed / "qcollect", "recipes", "ls", "--json", cwd=tmp_path).stdout)
    assert [recipe["name"] for recipe in listed] == sorted(p.stem for p in (REPOSITORY / "recipes").glob("*.yaml"))


def test_tiny_points_into_the_installed_package(installed: Path, tmp_path: Path) -> None:
    recipe = json.loads(call(installed / "qcollect", "recipes", "show", "tiny", "--json", cwd=tmp_path).stdout)
    for path in map(Path, (recipe["script"], *recipe["data"]["path"])):
        assert path.is_relative_to(installed.parent)
        assert path.is_file()


@pytest.mark.parametrize(
    "program",
    [
        "import qcollect",
        "from qcollect.cli import main; main(['--help'])",
        "from qcollect.cli import main; main(['recipes', 'show', 'tiny'])",
        "from qcollect.cli import main; main(['formats'])",
    ],
)
def test_nothing_heavy_is_imported(installed: Path, tmp_path: Path, program: str) -> None:
    done = call(installed / "python", "-c", TELL_IMPORTS + program, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "imported: []"


@pytest.mark.integration
def test_installed_wheel_captures(installed: Path, tmp_path: Path) -> None:
    done = call(
        installed / "qcollect", "run", "mxfp4", "--recipe", "tiny", "--target", "9", "--nproc", "1", cwd=tmp_path
    )
    assert done.stdout == f"{tmp_path}/enhanced_tensor_logs/mxfp4\n"
    assert len(list((tmp_path / "enhanced_tensor_logs" / "mxfp4").glob("*.pt"))) == 9
