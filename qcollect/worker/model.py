"""The recipe's model: transformers' own causal LM, from a checkpoint folder or with seeded random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcollect.errors import CheckpointError, MissingExtraError
from qcollect.recipe.records import ModelSpec
from qcollect.worker.checkpoint import describe_missing, find_config_problem


def load_config(spec: ModelSpec) -> Any:
    """transformers' config of the model.

    Raises:
        CheckpointError: no folder, no config.json, one that cannot be read, or that transformers refuses.
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    try:
        if spec.config is not None:
            return transformers.LlamaConfig(**spec.config)
        folder = Path(spec.checkpoint or "")
        problem = find_config_problem(folder)
        if problem is not None:
            raise CheckpointError(problem.text)
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError) as error:
        where = f"model.checkpoint {spec.checkpoint}" if spec.config is None else "model.config"
        raise CheckpointError(f"{where}: transformers refuses its configuration: {error}") from error


def build_model(spec: ModelSpec, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The causal LM in training mode, weights in ``dtype`` on ``device``.

    Random weights are drawn on the device from ``spec.seed``; the same device type gives the same weights.

    Raises:
        CheckpointError: weights are missing; none is ever left at a random value.
    """
    transformers = _transformers()
    config = load_config(spec)
    if spec.config is not None:
        torch.manual_seed(spec.seed)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            spec.checkpoint,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        refuse_missing(str(spec.checkpoint), sorted(info["missing_keys"]))
        model = model.to(device)
    model.config.use_cache = False
    result: nn.Module = model.train()
    return result


def build_empty(config: Any, dtype: torch.dtype, checkpoint: str | None) -> nn.Module:
    """The causal LM of a configuration on the meta device: shapes and names, no values.

    Raises:
        CheckpointError: transformers has no causal LM of that kind, or its sizes do not fit each other.
    """
    try:
        with torch.device("meta"):
            model: nn.Module = _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"model.checkpoint {checkpoint}: no causal language model can be built of its config.json "
            f"(model_type {config.model_type!r}): {reason}"
        ) from error
    return model


def refuse_missing(checkpoint: str, missing: list[str]) -> None:
    """Nothing, if ``missing`` is empty.

    Raises:
        CheckpointError: names the weights the files lack.
    """
    if missing:
        raise CheckpointError(describe_missing(checkpoint, missing).text)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a Llama recipe") from None
    return transformers
