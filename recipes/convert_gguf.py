"""Turn a GGUF file of a Llama (SmolLM2, Llama 3, ...) into a checkpoint folder that a recipe can train.

    python recipes/convert_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf model/smollm2-135m

The folder holds what ``model.checkpoint`` and ``data prepare --tokenizer`` ask for: config.json, model.safetensors
and the tokenizer. Nothing is downloaded. Needs ``pip install 'qcollect[gguf]'``.

The weights are what the file holds: a 4-bit file gives weights that lie on a 4-bit grid, in whatever dtype they are
stored. fp32 keeps every value as it is; bf16 is half the size and rounds values that have more than 8 bits.
"""

import argparse
import os
import secrets
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qcollect.errors import CheckpointError, MissingExtraError, OutputError, QcollectError
from qcollect.paths import temporary_path

MAGIC = b"GGUF"
ARCHITECTURE = "llama"
PACKAGES = ("gguf", "transformers", "accelerate")  # transformers refuses a GGUF without accelerate


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufInfo:
    """What a GGUF says of itself; ``stored_as`` counts tensors by their GGUF type."""

    architecture: str
    pre_tokenizer: str
    stored_as: dict[str, int]


def convert(gguf_path: Path, out_dir: Path, *, dtype: str = "fp32") -> tuple[GgufInfo, int]:
    """Write the checkpoint folder of ``gguf_path``, whole or not at all; what was read, and the parameters' number.

    Args:
        gguf_path: a GGUF file of architecture llama.
        out_dir: a folder that is not there yet, or empty.
        dtype: of the weights on disk, fp32 or bf16.

    Raises:
        CheckpointError: not a GGUF file, of another architecture, or without some of the weights.
        OutputError: ``out_dir`` holds something, or cannot be written.
        MissingExtraError: a package of the extra ``gguf`` is not installed.
    """
    check_paths(gguf_path, out_dir)
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "gguf", f"reading {gguf_path}")
    info = read_info(gguf_path)
    if info.architecture != ARCHITECTURE:
        raise CheckpointError(f"{gguf_path}: its architecture is {info.architecture!r}; only {ARCHITECTURE!r} is read")
    model, tokenizer = load(gguf_path, info, dtype)
    temporary = temporary_path(out_dir.absolute(), secrets.token_hex(4))
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.replace(out_dir)  # an empty folder is replaced, a filled one is not
    except OSError as error:
        raise OutputError(f"{out_dir}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return info, sum(p.numel() for p in model.parameters())


def check_paths(gguf_path: Path, out_dir: Path) -> None:
    """Nothing, if the one can be read and the other be made.

    Raises:
        CheckpointError, OutputError: not so.
    """
    try:
        with gguf_path.open("rb") as stream:
            start = stream.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{gguf_path}: cannot be read: {error.strerror}") from error
    if start != MAGIC:
        raise CheckpointError(f"{gguf_path}: is no GGUF file (it begins with {start!r}); download it again")
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise OutputError(f"{out_dir}: exists; name a folder that is not there yet")


def read_info(gguf_path: Path) -> GgufInfo:
    """Architecture, pre-tokenizer and tensor types of a GGUF file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{gguf_path}: is damaged or cut short ({error}); download it again") from error
    names = ("general.architecture", "tokenizer.ggml.pre")
    texts = [field.contents() if (field := reader.get_field(name)) is not None else "" for name in names]
    stored_as = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return GgufInfo(architecture=str(texts[0]), pre_tokenizer=str(texts[1]), stored_as=dict(stored_as.most_common()))


def load(gguf_path: Path, info: GgufInfo, dtype: str) -> tuple[Any, Any]:
    """transformers' model, its weights dense, and tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from qcollect.worker.model import refuse_missing

    source = {"gguf_file": gguf_path.name, "local_files_only": True}
    folder = str(gguf_path.absolute().parent)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        quantization_config=GgufConfig(dequantize=True),  # else weights stay packed where a kernel is installed
        output_loading_info=True,
        **source,
    )
    refuse_missing(str(gguf_path), sorted(loading["missing_keys"]))
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    if info.pre_tokenizer == "smollm":
        _split_digits(tokenizer)
    return model, tokenizer


def _split_digits(tokenizer: Any) -> None:
    """Each digit by itself, ahead of all else: as SmolLM's merges were learned, and transformers does not read it.

    Without it white space before a number would be cut otherwise. **Source:** llama.cpp, src/llama-vocab.cpp,
    LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="convert_gguf.py"
    )
    parser.add_argument("gguf_path", metavar="FILE.gguf", type=Path)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights on disk")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported, which torch does
    try:
        info, num_parameters = convert(arguments.gguf_path, arguments.out_dir, dtype=arguments.dtype)
    except QcollectError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    stored_as = ", ".join(f"{count} {name}" for name, count in info.stored_as.items())
    print(f"{num_parameters:,} parameters, in the file as tensors of {stored_as}; written as {arguments.dtype}")
    print(arguments.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
