"""Text -> token ids: built-in bytes, or a Hugging Face tokenizer from a folder.

A tokenizer is used as it is: no token is added to it (none for padding either), so its vocabulary and with it
the shape of a model's embedding stay what they were.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from qcollect.errors import DatasetError, MissingExtraError

BYTES = "bytes"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Tokenizer(Protocol):
    """``encode`` gives what the tokenizer gives a text by default, so with its begin token where it has that habit."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def bos_id(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """The UTF-8 bytes of a text are its ids; 256 ends a document. Needs nothing installed."""

    name: str = BYTES
    vocab_size: int = 257
    eos_id: int | None = 256
    bos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTokenizer:
    """A Hugging Face tokenizer. Special tokens spelled out in a text are text, not tokens."""

    name: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    _tokenizer: Any = field(repr=False)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, split_special_tokens=True, verbose=False)
        return ids


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer ``spec`` names: "bytes", or a folder with a tokenizer's files. Nothing is downloaded.

    Raises:
        DatasetError: no such folder, no tokenizer in it, or files that cannot be loaded.
        MissingExtraError: transformers is not installed.
    """
    if spec == BYTES:
        return ByteTokenizer()
    folder = Path(spec)
    _check_folder(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "hf", f"the tokenizer in {folder}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes of its parser
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DatasetError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    return FolderTokenizer(
        name=str(folder),
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        bos_id=tokenizer.bos_token_id,
        _tokenizer=tokenizer,
    )


def encode_document(tokenizer: Tokenizer, text: str, *, append_eos: bool) -> list[int]:
    """The ids of one document, ended by exactly one end token if asked (some tokenizers add it themselves)."""
    ids = tokenizer.encode(text)
    if append_eos and tokenizer.eos_id is not None and (not ids or ids[-1] != tokenizer.eos_id):
        ids.append(tokenizer.eos_id)
    return ids


def require_eos(tokenizer: Tokenizer) -> None:
    """Nothing, if the tokenizer has an end token.

    Raises:
        DatasetError: it has none.
    """
    if tokenizer.eos_id is None:
        raise DatasetError(f"{tokenizer.name}: the tokenizer has no end token to append; set append_eos to false")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DatasetError(f"{folder}: no such tokenizer folder; give a folder with tokenizer.json, or 'bytes'")
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise DatasetError(f"{folder}: no tokenizer in this folder; looked for {', '.join(TOKENIZER_FILES)}")
    for path in present:
        with path.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise DatasetError(f"{path}: is a Git LFS pointer, the real file was not downloaded: git lfs pull")
