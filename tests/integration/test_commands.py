"""Commands that only tell: what they print, as text off a terminal and as JSON, and what they do not import."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qcollect._version import __version__

pytestmark = pytest.mark.integration

RECIPES = ["llama32_1b_random", "llama32_1b_wikipedia", "smollm2_135m_wikipedia", "tiny"]


def test_version(qcollect_process):
    result = qcollect_process("--version")
    assert (result.exit_code, result.out, result.err) == (0, f"{__version__}\n", "")


def test_recipes_are_listed_a_line_each(qcollect_here):
    lines = qcollect_here("recipes", "ls", env={"COLUMNS": "40"}).out.splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", *RECIPES]
    described = {r["name"]: r["description"] for r in qcollect_here("recipes", "ls", "--json").json}
    assert list(described) == RECIPES
    assert all(line.endswith(described[line.split()[0]]) for line in lines[1:])


def test_a_recipe_is_shown_with_every_default_and_what_is_shown_is_a_recipe(qcollect_here, tmp_path):
    args = ("recipes", "show", "tiny", "--set", "capture.values=both", "--set", "quant.exclude=[lm_head]")
    shown = qcollect_here(*args)
    values = yaml.safe_load(shown.out)
    assert values == qcollect_here(*args, "--json").json
    assert (values["capture"]["values"], values["train"]["weight_decay"]) == ("both", 0.1)
    assert Path(values["script"]).is_file() and Path(values["data"]["path"][0]).is_file()


def test_a_valid_recipe_is_said_to_be(qcollect_here, small_recipe):
    assert qcollect_here("recipes", "validate", str(small_recipe)).out == f"{small_recipe}: valid\n"
    assert qcollect_here("recipes", "validate", "tiny").out.endswith("tiny.yaml: valid\n")


def test_every_fault_of_a_recipe_is_named_with_its_line(qcollect_here, tmp_path):
    recipe = tmp_path / "[bold]wrong.yaml"
    recipe.write_text("model: {config: null}\ndata:\n  path: x.txt\n  sequence_length: long\ntrain:\n  iteration: 3\n")
    result = qcollect_here("recipes", "validate", str(recipe))
    assert (result.exit_code, result.out) == (2, "")
    first, *others = result.err.splitlines()
    assert first.startswith(f"error: {recipe}:1: model needs one of checkpoint")
    assert [other.removeprefix(str(recipe))[:3] for other in others] == [":4:", ":6:"]
    assert "'iterations'" in others[-1]


def test_formats_are_a_table_of_whole_lines(qcollect_here):
    from qcollect.formats.catalog import QUANT_TYPES

    result = qcollect_here("formats", env={"COLUMNS": "40"})
    table, sources = result.out.split("\n\nsources:\n")
    assert [line.split()[0] for line in table.splitlines()] == ["type", *QUANT_TYPES]
    assert [line.split(":")[0].strip() for line in sources.splitlines()] == list(QUANT_TYPES)
    mxfp4 = next(line for line in table.splitlines() if line.startswith("mxfp4 "))
    assert mxfp4.split() == [
        "mxfp4",
        "E2M1",
        "1/2/1",
        "4.25",
        "32",
        "E8M0",
        "6",
        "1",
        "0.5",
        "-0",
        "floor",
        "nearest_even",
    ]


def test_formats_as_json_hold_numbers(qcollect_here):
    formats = {f["name"]: f for f in qcollect_here("formats", "--json").json}
    assert (formats["mxfp8"]["max"], formats["mxfp8"]["block_size"]) == (448.0, 32)
    assert formats["hifp8"]["min_subnormal"] == 2.0**-22
    assert formats["none"]["element"] is None


def test_formats_fit_a_terminal_of_80_columns(tmp_path):
    shown = _in_terminal(["formats"], columns=80)
    assert "mxfp8_e5m2  E5M2     1/5/2       8.25   32     E8M0" in shown
    assert "hif4        S1P2     1/1/2       4.5    64     E6M2 + 8 x 1 bit + 4 x 1 bit" in shown
    assert "mxfp8_e5m2  57344        2^-14   2^-16      Inf, NaN, -0  floor    nearest_even" in shown


def test_env_tells_versions_devices_and_the_rank_a_saver_would_take(qcollect_here, qcollect_process):
    import torch

    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "CUSTOM_QUANT_TYPE": "mxfp4"}
    report = qcollect_process("env", "--json", env=env).json
    assert (report["qcollect"], report["packages"]["torch"]) == (__version__, torch.__version__)
    assert report["rank"] == {"rank": 3, "local_rank": 1, "world_size": 8, "source": "RANK"}
    assert report["variables"]["CUSTOM_QUANT_TYPE"] == "mxfp4"
    assert report["device"] == ("cpu" if not torch.accelerator.is_available() else report["device"])
    assert isinstance(report["devices"], list)


def test_env_as_text_has_a_line_a_fact(qcollect_here, monkeypatch):
    devices = {"device": "cpu", "devices": []}
    monkeypatch.setattr("qcollect.launch.inspect.describe_devices", lambda: devices)
    lines = qcollect_here("env").out.splitlines()
    assert lines[0] == f"qcollect: {__version__}"
    assert "  source: default" in lines
    assert lines[-2:] == ["device: cpu", "devices: none"]


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "run --help",
        "sweep --help",
        "status --help",
        "recipes --help",
        "data prepare --help",
        "formats",
        "formats --json",
        "recipes ls",
        "recipes show tiny",
        "recipes validate tiny",
        "status nowhere",
        "run mxfp9",
        "run mxfp8 --recipe tiny --out setup.py/x",
    ],
)
def test_what_starts_no_worker_imports_no_torch(command, tmp_path):
    (tmp_path / "setup.py").write_text("")
    script = (
        "import sys\n"
        "from qcollect.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'qcollect.worker' not in sys.modules\n"
    )
    command_line = [sys.executable, "-c", script, *command.split()]
    done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_closes_early_makes_no_noise():
    command = f"{sys.executable} -m qcollect formats --json | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[\n", "")
    assert done.returncode in (0, 1, 141)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_name_stdout_cannot_encode_is_escaped(encoding, tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff\xc3\xa9.yaml"
    Path(os.fsdecode(folder)).write_text("model:\n")
    command = [sys.executable, "-m", "qcollect", "recipes", "show", "tiny", "--set", b"script=" + folder]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(b'"%s"' % done.stdout.split(b"script: ")[1].splitlines()[0].strip(b'"')).endswith(".yaml")


def _in_terminal(arguments: list[str], *, columns: int) -> str:
    """What a command prints on a terminal of that width."""
    main, side = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "qcollect", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=side, stderr=side, env=environment) as process:
        os.close(side)
        parts = []
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(main)
    assert process.returncode == 0
    return b"".join(parts).decode()
