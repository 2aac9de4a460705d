import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcollect
from qcollect.paths import RunPaths
from qcollect.plan.build import build_plan
from qcollect.plan.inspection import Inspection
from qcollect.recipe.records import CaptureSpec, DataSpec, LaunchSpec, ModelSpec, QuantSpec, Recipe, TrainSpec
from qcollect.store.capture import load_capture
from qcollect.worker import state
from qcollect.worker.inspection import meta_model, meta_sites

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "CUSTOM_QUANT_TYPE",
    "TENSOR_SAVE_DIR",
    "TENSOR_SAVE_ENABLED",
    "TENSOR_SAVER_ITERATION",
    "CURRENT_SAMPLE_IDX",
    "QCOLLECT_PLAN",
    "QCOLLECT_LOG",
)
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch):
    """One process, one thread, nothing set by hand or from outside, the warning about rank 0 given already."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(state, "_warned_default_rank", True)
    state.STATE.clear()
    torch.set_num_threads(1)
    yield
    state.STATE.clear()


@pytest.fixture(scope="session")
def llama_config() -> dict[str, Any]:
    return dict(LLAMA)


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., nn.Module]:
    def make(dtype: torch.dtype = torch.float32, attention: str = "sdpa", seed: int = 0, **config: Any) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**(LLAMA | config)), dtype=dtype, attn_implementation=attention
        )
        model.config.use_cache = False
        return model.train()

    return make


@pytest.fixture(scope="session")
def tokens() -> Callable[..., torch.Tensor]:
    def make(batch: int = 1, length: int = 5, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture(scope="session")
def train_llama() -> Callable[..., Any]:
    """One micro-batch an iteration through a causal LM, until ``step`` says so; gives back the collector."""

    def train(model: nn.Module, ids: torch.Tensor, *arguments: Any, max_iterations: int = 20, **settings: Any) -> Any:
        with qcollect.collect(model, *arguments, **settings) as run:
            for _ in range(max_iterations):
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad()
                if run.step():
                    break
        return run

    return train


@pytest.fixture(scope="session")
def train_plain() -> Callable[..., Any]:
    """As ``train_llama`` for any module whose output is a tensor."""

    def train(model: nn.Module, x: torch.Tensor, *arguments: Any, max_iterations: int = 20, **settings: Any) -> Any:
        with qcollect.collect(model, *arguments, **settings) as run:
            for _ in range(max_iterations):
                model(x).square().sum().backward()
                model.zero_grad()
                if run.step():
                    break
        return run

    return train


@pytest.fixture(scope="session")
def read_files() -> Callable[[Path], dict[tuple[Any, ...], dict[str, Any]]]:
    """The files of a run by (module, tensor name, gemm of a quantized copy, iteration, micro-batch, rank)."""

    def read(run_dir: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
        paths = sorted(Path(run_dir).rglob("*.pt"))
        files = {}
        for path in paths:
            content = load_capture(path)
            m = content["metadata"]
            gemm = m["consumers"][0]["gemm"] if m["values"] == "quantized" else None
            files[m["module"], m["tensor_name"], gemm, m["iteration"], m["micro_batch"], m["rank"]] = content
        assert len(files) == len(paths), "two files have one key"
        return files

    return read


@pytest.fixture(scope="session")
def read_first(read_files: Any) -> Callable[[Path], dict[tuple[Any, ...], dict[str, Any]]]:
    """The files of a run of one iteration, micro-batch and rank by (last part of the module, tensor name, gemm)."""

    def read(run_dir: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {
            (module.rsplit(".", 1)[-1], *rest[:2]): content for (module, *rest), content in read_files(run_dir).items()
        }

    return read


@pytest.fixture
def recipe(llama_config):
    """Two small layers in fp32, every capture of an iteration."""
    return Recipe(
        name="r",
        path="r.yaml",
        script="train.py",
        model=ModelSpec(config=llama_config | {"num_hidden_layers": 2}),
        data=DataSpec(path=(), sequence_length=6),
        train=TrainSpec(compute="fp32", micro_batch_size=2, iterations=3),
        quant=QuantSpec(exclude=("*.o_proj",)),
        capture=CaptureSpec(target=100),
        launch=LaunchSpec(),
    )


@pytest.fixture
def plan(recipe, tmp_path, monkeypatch):
    """Writes a plan where a worker finds it; gives it back."""

    def write(recipe=recipe, quant_type="mxfp8", sites=None):
        sites = meta_sites(meta_model(recipe), recipe) if sites is None else sites
        inspection = Inspection(
            modules=tuple(sites), excluded=(), vocab_size=64, num_parameters=1, device="cpu", device_names=()
        )
        planned = build_plan(
            recipe, quant_type, inspection, out_dir=tmp_path, script_args=(), python="python", num_cores=1,
            loopback=None, run_id="planned", run_token="t",
        )  # fmt: skip
        paths = RunPaths(planned.run_dir)
        paths.state_dir.mkdir(parents=True)
        paths.plan_path.write_text(json.dumps(planned.to_dict()))
        monkeypatch.setenv("QCOLLECT_PLAN", str(paths.plan_path))
        return planned

    return write
