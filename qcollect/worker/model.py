"""The recipe's model: transformers' own causal LM, from a checkpoint folder or with seeded random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcollect.errors import CheckpointError, MissingExtraError
from qcollect.recipe.records import ModelSpec

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def load_config(spec: ModelSpec) -> Any:
    """transformers' config of the model.

    Raises:
        CheckpointError: no folder, no config.json, or one that transformers refuses.
        MissingExtraError: transformers is not installed.
    """
    transformers = _transformers()
    try:
        if spec.config is not None:
            return transformers.LlamaConfig(**spec.config)
        folder = Path(spec.checkpoint or "")
        if not (folder / "config.json").is_file():
            if folder.is_file():
                raise CheckpointError(
                    f"model.checkpoint {folder}: is a file; a folder is wanted (config.json, *.safetensors, "
                    "tokenizer.json). 'python recipes/convert_gguf.py FILE DIR' makes one from a GGUF"
                )
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise CheckpointError(
                f"model.checkpoint {folder}: {what}; put the model's folder (config.json, *.safetensors, "
                "tokenizer.json) there, or name another with --set model.checkpoint=DIR"
            )
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


def refuse_missing(checkpoint: str, missing: list[str]) -> None:
    """Nothing, if ``missing`` is empty.

    Raises:
        CheckpointError: names the weights the files lack.
    """
    if not missing:
        return
    tied = (
        "; if it is tied to the embedding, set tie_word_embeddings to true in config.json"
        if missing == ["lm_head.weight"]
        else ""
    )
    named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    raise CheckpointError(
        f"model.checkpoint {checkpoint}: the files hold no {named}; it would train from random values{tied}"
    )


def checkpoint_keys(folder: Path) -> set[str]:
    """The names of the tensors in a checkpoint's safetensors files, from their headers.

    Raises:
        CheckpointError: no safetensors, a shard is missing, or a file is damaged.
    """
    files = [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).is_file():
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        files = sorted({folder / name for name in index["weight_map"].values()})
    keys: set[str] = set()
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"model.checkpoint: {file} is missing; download the checkpoint again (safetensors only)"
            )
        keys |= _header_keys(file)
    return keys


def _header_keys(file: Path) -> set[str]:
    # 8 bytes little endian: the length of a JSON header that names every tensor
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise CheckpointError(
                f"model.checkpoint: {file} is a Git LFS pointer, the real file was not downloaded; run git lfs pull"
            )
        if len(start) < 8 or length > file.stat().st_size - 8:
            raise CheckpointError(f"model.checkpoint: {file} is no whole safetensors file; download it again")
        header = json.loads(stream.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if file.stat().st_size < 8 + length + end:
        raise CheckpointError(
            f"model.checkpoint: {file} is cut short "
            f"({file.stat().st_size:,} of {8 + length + end:,} bytes); download it again"
        )
    return set(header) - {"__metadata__"}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf", "a Llama recipe") from None
    return transformers
