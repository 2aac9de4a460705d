"""The shell scripts: what they call, with which arguments, and what they refuse."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# stands for qcollect, or for the Python of an environment: writes down how it was called
RECORDER = """#!/usr/bin/env bash
printf '%s' "$(basename "$0")" >>"{log}"
for word in "$@"; do printf '|%s' "$word" >>"{log}"; done
echo >>"{log}"
if [[ " $* " == *" --dry-run "* ]]; then echo "bf16 (tiny)"; echo "in total: 4 run(s), 200 files"; fi
[[ " $* " != *" broken "* ]] || exit 3
"""


class Checkout:
    """A copy of the scripts, with stand-ins for what they call; its path has a space."""

    def __init__(self, folder: Path) -> None:
        self.home, self.cwd, self.log = folder / "a checkout", folder / "elsewhere", folder / "calls"
        self.bin = self.home / ".venv" / "bin"
        self.cwd.mkdir()
        self.bin.mkdir(parents=True)
        shutil.copytree(REPOSITORY / "shell", self.home / "shell")
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.home)

    def add_stand_in(self, name: str) -> None:
        program = self.bin / name
        program.write_text(RECORDER.format(log=self.log), encoding="utf-8")
        program.chmod(0o755)

    def call(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if key not in ("TENSOR_SAVE_DIR", "PYTHON")}
        argv = ["bash", "-eu", "-o", "pipefail", str(self.home / "shell" / script), *arguments]
        path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "qcollect").exists())
        environment = inherited | {"PATH": path} | env
        return subprocess.run(argv, cwd=self.cwd, env=environment, capture_output=True, text=True, check=False)

    def calls(self, program: str) -> list[list[str]]:
        lines = [line.split("|") for line in self.log.read_text(encoding="utf-8").splitlines()]
        return [words[1:] for words in lines if words[0] == program]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.add_stand_in("qcollect")
    return made


def test_single_type_passes_its_flags_on(checkout: Checkout) -> None:
    done = checkout.call("run_single_quant_type.sh", "mxfp8", "--target", "9", "--set", "data.path=my text")
    assert done.returncode == 0, done.stderr
    expected = "run mxfp8 --out enhanced_tensor_logs --target 9 --set".split()
    assert checkout.calls("qcollect") == [[*expected, "data.path=my text"]]
    assert done.stderr.startswith("==> Capturing mxfp8 into enhanced_tensor_logs/mxfp8")


@pytest.mark.parametrize("arguments", [(), ("--recipe", "tiny")])
def test_single_type_without_a_type_is_a_usage_error(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    done = checkout.call("run_single_quant_type.sh", *arguments)
    assert done.returncode == 2
    assert "shell/run_single_quant_type.sh TYPE" in done.stderr
    assert "error: the quant type comes first, like mxfp8, mxfp4, hifp8, bf16 or fp16\n" in done.stderr
    assert not checkout.log.exists()


def test_tensor_save_dir_is_where_captures_go_unless_out_is_given(checkout: Checkout) -> None:
    checkout.call("quick_tensor_collection.sh", TENSOR_SAVE_DIR="my logs")
    done = checkout.call("quick_tensor_collection.sh", "--out=here", TENSOR_SAVE_DIR="my logs")
    expected = ["sweep", "--all", "--out", "my logs"]
    assert checkout.calls("qcollect") == [expected, [*expected, "--out=here"]]
    assert done.stderr.startswith("==> Capturing into here, a folder a quant type")


def test_wikipedia_collection_checks_captures_and_shows(checkout: Checkout) -> None:
    done = checkout.call("run_wikipedia_tensor_collection.sh", "--out", "here", "--", "--out", "of-the-script")
    assert done.returncode == 0, done.stderr
    rest = ["--out", "enhanced_tensor_logs", "--out", "here", "--", "--out", "of-the-script"]
    assert checkout.calls("qcollect") == [
        ["sweep", "--all", "--baseline", "--dry-run", *rest],
        ["sweep", "--all", "--baseline", *rest],
        ["status", "here", "--once"],
    ]
    assert "in total: 4 run(s), 200 files\n" in done.stderr
    assert "bf16 (tiny)" not in done.stderr


def test_wikipedia_collection_ends_with_the_code_of_a_failed_check(checkout: Checkout) -> None:
    done = checkout.call("run_wikipedia_tensor_collection.sh", "--recipe", "broken")
    assert done.returncode == 3
    assert len(checkout.calls("qcollect")) == 1


@pytest.mark.parametrize(
    "script",
    [
        "quickstart",
        "check",
        "run_single_quant_type.sh",
        "quick_tensor_collection.sh",
        "run_wikipedia_tensor_collection.sh",
    ],
)
def test_help_is_the_comment_at_the_head(checkout: Checkout, script: str) -> None:
    done = checkout.call(script, "--help")
    assert done.returncode == 0, done.stderr
    assert f"  shell/{script}" in done.stdout
    assert "set -e" not in done.stdout
    assert not checkout.log.exists()


def test_missing_qcollect_is_told(checkout: Checkout) -> None:
    (checkout.bin / "qcollect").unlink()
    done = checkout.call("quick_tensor_collection.sh")
    assert done.returncode == 3
    expected = (
        f"error: qcollect is not installed: neither on PATH nor in {checkout.home}/.venv. Call {checkout.home}/shell"
    )
    assert done.stderr.startswith(expected)


def test_quickstart_installs_once_and_sweeps_every_time(checkout: Checkout) -> None:
    checkout.add_stand_in("python")
    for flags in (("--target", "9"), ()):
        done = checkout.call("quickstart", *flags)
        assert done.returncode == 0, done.stderr
    installs = [words for words in checkout.calls("python") if "install" in words]
    assert installs[-1][-4:] == ["-c", "constraints.txt", "-e", ".[hf]"]
    assert len(installs) == 2  # pip itself, the project
    sweep = "sweep --all --recipe tiny --out enhanced_tensor_logs".split()
    assert checkout.calls("qcollect") == [[*sweep, "--target", "9"], sweep]
    assert "up to date" in done.stderr


def test_changed_constraints_are_installed(checkout: Checkout) -> None:
    checkout.add_stand_in("python")
    checkout.call("quickstart")
    (checkout.home / "constraints.txt").write_text("torch==2.12.0\n", encoding="utf-8")
    assert "installing" in checkout.call("quickstart").stderr


def test_unfit_python_is_refused(checkout: Checkout) -> None:
    shutil.rmtree(checkout.home / ".venv")
    done = checkout.call("quickstart", PYTHON="/bin/false")
    assert done.returncode == 3
    assert done.stderr == "error: PYTHON is '/bin/false', which is no Python 3.11, 3.12 or 3.13\n"


def test_folder_of_the_user_is_left_alone(checkout: Checkout) -> None:
    done = checkout.call("quickstart", PYTHON=sys.executable)
    assert done.returncode == 3
    assert "has no working Python 3.11 to 3.13, and this script did not make it; move it away" in done.stderr
    assert (checkout.bin / "qcollect").exists()


def test_check_refuses_unknown_arguments(checkout: Checkout) -> None:
    done = checkout.call("check", "quick")
    assert done.returncode == 2
    assert done.stderr.endswith("error: 'quick' is not an argument of shell/check; known: fast, --real\n")
