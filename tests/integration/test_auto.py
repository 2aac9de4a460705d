"""Training scripts that do not know qcollect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qcollect
from qcollect.worker import auto

pytestmark = pytest.mark.integration
TIMEOUT_S = 120

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, use_cache=False,
)
model = DistributedDataParallel(LlamaForCausalLM(config))
optimizer = torch.optim.AdamW(model.parameters())
for iteration in range(4):
    tokens = torch.randint(0, 320, (2, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write(f"iteration {iteration} {sys.argv[1:]}\\n")
dist.destroy_process_group()
"""
LEAVES_THINGS_BEHIND = """
import atexit, sys, threading, time

class Freed:
    def __del__(self):
        sys.stdout.write("freed ")

def work():
    time.sleep(0.2)
    sys.stdout.write("thread ")

def main():
    of_a_frame = Freed()
    file.write("all of it")
    threading.Thread(target=work).start()
    if sys.argv[1] == "exits":
        sys.exit()
    globals()["of_a_frame"] = of_a_frame

atexit.register(sys.stdout.write, "handler ")
of_the_module = Freed()
file = open(sys.argv[1], "w")
main()
"""
MODEL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QCOLLECT_", "TENSOR_", "CUSTOM_"))}
    environment = kept | {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_script_without_collect_is_captured_by_the_launcher_and_ends_at_the_target(script, tmp_path):
    settings = [f"--set=model.config.{key}={value}" for key, value in MODEL.items()]
    command = [sys.executable, "-m", "qcollect", "run", "mxfp4", "--recipe", "tiny", "--nproc", "2", *settings]
    options = ["--set", f"script={script}", "--set", "data.sequence_length=32", "--target", "20", "--out", "out"]
    result = run([*command, *options], tmp_path)
    assert result.returncode == 0, result.stderr
    captures = qcollect.open_run(tmp_path / "out" / "mxfp4")
    assert [len(captures.select(rank=rank)) for rank in (0, 1)] == [10, 10]
    log = (tmp_path / "out" / "mxfp4" / ".qcollect" / "logs" / "rank00000.log").read_text()
    assert "iteration 1" not in log, "training went on after the target"


def test_script_without_collect_is_captured_under_plain_torchrun_and_goes_on(script, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "qcollect.worker.auto", str(script), "a b", ""]
    result = run(command, tmp_path, CUSTOM_QUANT_TYPE="mxfp8", TENSOR_SAVE_DIR="logs")
    assert result.returncode == 0, result.stderr
    captures = qcollect.open_run(tmp_path / "logs")
    assert len(captures) == 50 and {c.metadata["quant_type"] for c in captures} == {"mxfp8"}
    assert {c.metadata["iteration"] for c in captures} == {0}
    assert result.stdout.count("iteration 3 ['a b', '']") == 2


def test_script_ends_with_what_it_left_open_written_out_and_nothing_freed(tmp_path):
    """A model in DistributedDataParallel that is freed can wait for ever for gloo's threads."""
    script = tmp_path / "mine.py"
    script.write_text(LEAVES_THINGS_BEHIND)
    for argument in ("returns", "exits"):
        result = run([sys.executable, "-m", "qcollect.worker.auto", str(script), argument], tmp_path)
        assert (result.returncode, result.stdout.split()) == (0, ["thread", "handler"]), result
        assert (tmp_path / argument).read_text() == "all of it"


def test_script_that_exits_with_a_code_ends_with_it(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import sys; sys.exit(3)")
    assert run([sys.executable, "-m", "qcollect.worker.auto", str(script)], tmp_path).returncode == 3


def test_script_that_is_not_there_is_named(tmp_path):
    result = run([sys.executable, "-m", "qcollect.worker.auto", "mine.py"], tmp_path)
    assert (result.returncode, result.stderr) == (1, f"error: there is no training script {tmp_path / 'mine.py'}\n")


@pytest.mark.parametrize(
    ("variables", "watches"),
    [({"QCOLLECT_AUTO": "1", "RANK": "0"}, True), ({"QCOLLECT_AUTO": "1"}, False), ({"RANK": "0"}, False)],
)
def test_installed_line_watches_in_torchrun_workers_that_ask_for_it(tmp_path, variables, watches):
    folder = Path(auto.__file__).parent
    code = (
        f"import site, sys; site.addsitedir({str(folder)!r}); loaded = 'torch' in sys.modules\n"
        "from torch import nn; print(loaded, nn.Module.__call__ is not nn.Module._wrapped_call_impl)"
    )
    result = run([sys.executable, "-c", code], tmp_path, **variables)
    assert result.stdout.split() == [str(watches), str(watches)], result.stderr
