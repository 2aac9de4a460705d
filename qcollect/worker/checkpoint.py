"""A checkpoint folder looked at without its weights: what is missing, damaged or of another model."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qcollect.plan.finding import Finding
from qcollect.worker.file_checks import AGAIN, find_pointer, read_header, read_object, unreadable

CHECK = "checkpoint"
CONFIG_NAME, INDEX_NAME, SINGLE_NAME = "config.json", "model.safetensors.index.json", "model.safetensors"

_NUM_NAMED = 4
# what older versions of transformers stored and this one computes
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """What the weight files of a folder say of themselves; ``shapes`` has the tensors of those that are whole."""

    findings: tuple[Finding, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0


def find_config_problem(folder: Path) -> Finding | None:
    """Why there is no configuration to be read in a model's folder; None if there is."""
    try:
        return _find_config_problem(folder)
    except OSError as error:  # a folder that may not be entered
        return unreadable(CHECK, folder, error)


def _find_config_problem(folder: Path) -> Finding | None:
    named = f"model.checkpoint {folder}"
    if folder.is_file():
        return Finding.problem(
            CHECK,
            f"{named}: is a file",
            "a folder is wanted (config.json, *.safetensors, tokenizer.json). 'python recipes/convert_gguf.py FILE "
            "DIR' makes one from a GGUF",
        )
    path = folder / CONFIG_NAME
    if not path.is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        return Finding.problem(
            CHECK,
            f"{named}: {what}",
            "put the model's folder (config.json, *.safetensors, tokenizer.json) there, or name another with "
            "--set model.checkpoint=DIR (--recipe tiny needs none)",
        )
    pointer = find_pointer(CHECK, path)
    if pointer is not None:
        return pointer
    config = read_object(CHECK, path)
    return config if isinstance(config, Finding) else _find_quantization(path, config)


def _find_quantization(path: Path, config: dict[str, Any]) -> Finding | None:
    stored = config.get("quantization_config")
    if not isinstance(stored, dict):
        return None
    method = stored.get("quant_method", "?")
    return Finding.problem(
        CHECK,
        f"{path}: the weights are stored quantized (quantization_config, method {method!r})",
        "take the model's unquantized checkpoint: qcollect quantizes by itself",
    )


# ---------------------------------------------------------------------------------------------
# Weight files
# ---------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> CheckpointFiles:
    """The weight files of a folder, their headers read and checked; finds problems, raises nothing."""
    try:
        return _read_checkpoint(folder)
    except OSError as error:  # a folder that may not be entered
        return CheckpointFiles(findings=(unreadable(CHECK, folder, error),))


def _read_checkpoint(folder: Path) -> CheckpointFiles:
    files = _list_files(folder)
    if isinstance(files, Finding):
        return CheckpointFiles(findings=(files,))
    missing = [file for file in files if not file.is_file()]
    findings: list[Finding] = []
    if missing:
        findings.append(
            Finding.problem(
                CHECK,
                f"{folder / INDEX_NAME} names {len(files)} files, and {len(missing)} of them are missing: "
                f"{_listed([file.name for file in missing], len(missing))}",
                f"download them into {folder}",
            )
        )
    shapes: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    for file in (f for f in files if f not in missing):
        header = read_header(CHECK, file)
        if isinstance(header, Finding):
            findings.append(header)
        else:
            shapes |= header
            num_bytes += file.stat().st_size
    return CheckpointFiles(findings=tuple(findings), shapes=shapes, num_files=len(files), num_bytes=num_bytes)


def _list_files(folder: Path) -> list[Path] | Finding:
    """The safetensors files of the model, as transformers chooses them: the single one before an index."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    index = folder / INDEX_NAME
    if not index.is_file():
        return _without_safetensors(folder)
    pointer = find_pointer(CHECK, index)
    if pointer is not None:
        return pointer
    content = read_object(CHECK, index)
    if isinstance(content, Finding):
        return content
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        return Finding.problem(CHECK, f"{index}: has no weight_map of tensor and file names", AGAIN)
    return sorted({folder / name for name in weight_map.values()})


def _without_safetensors(folder: Path) -> Finding:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return unreadable(CHECK, folder, error)
    parts = [name for name in names if name.startswith("model-") and name.endswith(".safetensors")]
    if parts:
        return Finding.problem(
            CHECK, f"{folder / INDEX_NAME}: missing, although {parts[0]} is there", "download the index too"
        )
    for suffix, kind in ((".gguf", "GGUF"), (".bin", "pickled"), (".pth", "pickled"), (".pt", "pickled")):
        other = [name for name in names if name.endswith(suffix) and not name.startswith(("training_args", "optim"))]
        if other:
            return Finding.problem(
                CHECK,
                f"{folder}: holds {_listed(other, 2)}, and weights are read from safetensors only",
                _convert(folder, other[0], kind),
            )
    return Finding.problem(
        CHECK,
        f"{folder}: holds no weights; looked for {SINGLE_NAME} and {INDEX_NAME}",
        "download the model's *.safetensors into it",
    )


def _convert(folder: Path, name: str, kind: str) -> str:
    if kind == "GGUF":
        return f"'python recipes/convert_gguf.py {folder / name} DIR' makes a folder of it"
    script = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(folder)!r})"
    return (
        "download the model's *.safetensors; or, if you trust the file (it is unpickled), convert it and copy the "
        f'tokenizer: python -c "{script}.save_pretrained({f"{folder}-safetensors"!r})"'
    )


# ---------------------------------------------------------------------------------------------
# Files against model
# ---------------------------------------------------------------------------------------------


def compare_tensors(
    folder: Path,
    held: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    tied: Mapping[str, str],
    prefix: str,
    config: Mapping[str, Any],
) -> list[Finding]:
    """Whether the files' tensors are the model's.

    Args:
        folder: for the messages.
        held: shapes in the files.
        wanted: shapes in the model.
        tied: weights that are another one's (``lm_head.weight``), by that one's name.
        prefix: of the model without its head (``model``): files saved from it lack it in their names.
        config: config.json's fields, for the messages.
    """
    held = {name if name in wanted else _with_prefix(name, wanted, prefix): shape for name, shape in held.items()}
    stand_ins = {source: target for target, source in tied.items() if target in held}
    missing = [name for name in wanted if name not in held and name not in tied and name not in stand_ins]
    findings = [describe_missing(str(folder), sorted(missing))] if missing else []
    mismatches = [
        f"{name} is {list(held[name])} in the files and {list(shape)} by config.json{_sizes(name, config)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape and name not in tied
    ]
    if mismatches:
        findings.append(
            Finding.problem(
                CHECK,
                f"model.checkpoint {folder}: {_listed(mismatches, 2)}",
                "config.json and the weights are of different models, or one of them was changed: download both again",
            )
        )
    unused = [name for name in held if name not in wanted and name not in tied and not _COMPUTED.search(name)]
    if unused:
        findings.append(
            Finding.warning(
                CHECK,
                f"model.checkpoint {folder}: the model has no place for {len(unused)} tensors of the files: "
                f"{_listed(unused)}",
                "they are left out; compare num_hidden_layers, architectures and model_type in config.json",
            )
        )
    return findings


def describe_missing(checkpoint: str, missing: Sequence[str]) -> Finding:
    """The problem of weights that the files lack and that would keep their random values."""
    tied = (
        "if it is tied to the embedding, set tie_word_embeddings to true in config.json"
        if list(missing) == ["lm_head.weight"]
        else "download the checkpoint again, or see whether config.json belongs to it"
    )
    return Finding.problem(
        CHECK,
        f"model.checkpoint {checkpoint}: the files hold no {_listed(missing)}, which would train from random values",
        tied,
    )


def _with_prefix(name: str, wanted: Collection[str], prefix: str) -> str:
    return f"{prefix}.{name}" if f"{prefix}.{name}" in wanted else name


def _sizes(name: str, config: Mapping[str, Any]) -> str:
    """What in config.json gives the shape of the embedding and the output head."""
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return ""
    return f" (vocab_size {config.get('vocab_size')}, hidden_size {config.get('hidden_size')})"


def _listed(names: Sequence[str], most: int = _NUM_NAMED) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
