"""The command line for the tests here: as a process of its own, and inside this one.

A command inside this process differs in one thing, that the model is looked at in this process too,
where torch is imported once for all tests. Runs are real in both: torchrun, ranks, files.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 300
SMALL_RECIPE = """
model:
  config:
    {vocab_size: 320, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 2,
     num_key_value_heads: 1, head_dim: 32, tie_word_embeddings: true}
  tokenizer: bytes
data: {path: $BUNDLED_DIR/text/encyclopedia.txt, sequence_length: 32}
train: {iterations: 20, learning_rate: 1e-3}
quant: {types: [mxfp8, mxfp4, hifp8]}
capture: {target: 8}
launch: {device: cpu, nproc: 2}
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended, and what it printed."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture(scope="session")
def qcollect_process() -> Command:
    """``qcollect ARGS`` as a process of its own."""

    def run(*args: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "qcollect", *args],
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Result(exit_code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture(scope="session")
def qcollect_here() -> Iterator[Command]:
    """``qcollect ARGS`` inside this process."""
    cli = importlib.import_module("qcollect.cli")
    inspect = importlib.import_module("qcollect.launch.inspect")

    def run(*args: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> Result:
        out, err = io.StringIO(), io.StringIO()
        before = signal.getsignal(signal.SIGTERM)
        with (
            contextlib.chdir(cwd or Path.cwd()),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            patch.setattr(inspect, "_ask", _ask_here)
            cli.main(list(args))
        signal.signal(signal.SIGTERM, before)
        return Result(exit_code=int(ended.value.code or 0), out=out.getvalue(), err=err.getvalue())

    return run


def _ask_here(arguments: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    from qcollect.worker.process import answer

    assert answer(arguments)
    return subprocess.CompletedProcess(list(arguments), 0, stdout="", stderr="")


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose runs take as little time as a run can: two small layers, two ranks on the CPU."""
    path = tmp_path_factory.mktemp("recipes") / "small.yaml"
    path.write_text(SMALL_RECIPE)
    return path


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch in this process fails the test; an agent that only waits for orders is not started either."""
    prepared, supervisor = (importlib.import_module(f"qcollect.launch.{name}") for name in ("prepared", "supervisor"))

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("a worker was about to be started")

    monkeypatch.setattr(prepared.PreparedAgent, "__enter__", lambda self: self)
    monkeypatch.setattr(supervisor.subprocess, "Popen", refuse)


def tree_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder with its size and time of change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def list_tree() -> Callable[[Path], dict[str, tuple[int, int]]]:
    return tree_of


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama checkpoint whose output head is its embedding: its file holds no ``lm_head.weight``."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("models") / 'été "x" $HOME;ls' / "tied"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    return folder
