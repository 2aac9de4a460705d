from collections.abc import Callable, Sequence

import pytest

from qcollect.plan.inspection import Inspection
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.records import (
    CaptureSpec,
    DataSpec,
    LaunchSpec,
    ModelSpec,
    QuantSpec,
    Recipe,
    TrainSpec,
)
from qcollect.vocab import LayerType

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def _linear(name: str, layer_idx: int | None, **fields: object) -> ModuleSites:
    shapes = dict.fromkeys(("input", "output", "grad_output", "grad_input"), (1, 4, 8))
    shapes |= dict.fromkeys(("weight", "grad_weight"), (8, 8))
    return ModuleSites(module=name, layer_type=LayerType.LINEAR, layer_idx=layer_idx, shapes=shapes, **fields)


def _llama_sites(num_layers: int) -> list[ModuleSites]:
    sites = []
    for i in range(num_layers):
        # named_modules() gives the parent, and so the kernel, before its projections
        attention = f"model.layers.{i}.self_attn"
        heads = dict.fromkeys(("query", "key", "value", "grad_query", "grad_key", "grad_value"), (1, 2, 4, 4))
        shapes = heads | {"output": (1, 4, 2, 4), "grad_output": (1, 4, 2, 4)}
        sites.append(ModuleSites(module=attention, layer_type=LayerType.ATTENTION, layer_idx=i, shapes=shapes))
        for part, names in PROJECTIONS.items():
            sites += [_linear(f"model.layers.{i}.{part}.{name}", i) for name in names]
    return [*sites, _linear("lm_head", None, excluded=True, on_request=True)]


@pytest.fixture
def llama_sites() -> Callable[[int], list[ModuleSites]]:
    return _llama_sites


@pytest.fixture
def linear_site() -> Callable[..., ModuleSites]:
    return _linear


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    def make(
        quant: QuantSpec | None = None,
        capture: CaptureSpec | None = None,
        train: TrainSpec | None = None,
        launch: LaunchSpec | None = None,
    ) -> Recipe:
        return Recipe(
            name="tiny",
            path="/recipes/tiny.yaml",
            script="/recipes/train.py",
            model=ModelSpec(config={"hidden_size": 8}),
            data=DataSpec(path=("/data/a.txt",), sequence_length=4),
            train=train or TrainSpec(),
            quant=quant or QuantSpec(),
            capture=capture or CaptureSpec(),
            launch=launch or LaunchSpec(),
        )

    return make


@pytest.fixture
def make_inspection() -> Callable[..., Inspection]:
    def make(num_layers: int = 2, device: str = "cpu", device_names: Sequence[str] = ()) -> Inspection:
        return Inspection(
            modules=tuple(_llama_sites(num_layers)),
            excluded=("model.embed_tokens", "model.norm", "lm_head"),
            vocab_size=320,
            num_parameters=1000,
            device=device,
            device_names=tuple(device_names),
        )

    return make
