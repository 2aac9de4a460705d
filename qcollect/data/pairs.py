"""Megatron's indexed dataset on disk: its layout, how a path names one, and whether it is whole.

A dataset is the pair ``{prefix}.bin``, ``{prefix}.idx`` (little endian, nothing aligned):

    .bin   the token ids of all sequences, one after the other
    .idx   magic "MMIDIDX\\0\\0"   version u64 = 1   token dtype code u8
           sequences u64 = S   document boundaries u64 = D
           lengths i32[S]   byte offsets into .bin i64[S]   boundaries i64[D]   (multimodal: modes i8[S])

Imports no torch: preflight asks here before anything is launched.

**Source:** NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from qcollect.errors import DatasetError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
UINT16_VOCAB_LIMIT = 65500  # Megatron's cut: smaller vocabularies are uint16, all others int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDtype:
    """How token ids are stored: the code in the .idx, torch's name, the type code of ``array``."""

    code: int
    name: str
    typecode: str
    itemsize: int


TOKEN_DTYPES = {
    code: TokenDtype(code=code, name=name, typecode=typecode, itemsize=itemsize)
    for code, name, typecode, itemsize in (
        (1, "uint8", "B", 1),
        (2, "int8", "b", 1),
        (3, "int16", "h", 2),
        (4, "int32", "i", 4),
        (5, "int64", "q", 8),
        (8, "uint16", "H", 2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The counts at the front of an .idx, and where its tables lie (byte offsets)."""

    dtype: TokenDtype
    num_sequences: int
    num_boundaries: int

    @property
    def lengths_offset(self) -> int:
        return HEADER.size

    @property
    def pointers_offset(self) -> int:
        return HEADER.size + 4 * self.num_sequences

    @property
    def num_bytes(self) -> int:
        """Bytes of the .idx without modes."""
        return self.pointers_offset + 8 * self.num_sequences + 8 * self.num_boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInfo:
    """What an .idx says of its pair, checked against the sizes of both files."""

    prefix: Path
    dtype: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    num_bytes: int


def bin_path(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> TokenDtype:
    """The dtype Megatron stores ids of such a vocabulary in: uint16 below 65500, else int32."""
    return TOKEN_DTYPES[8 if vocab_size < UINT16_VOCAB_LIMIT else 4]


def resolve_prefix(path: str | Path) -> Path:
    """The prefix that ``path`` names: a prefix, its .bin or .idx, or a folder that holds one pair.

    Names are taken as they are: spaces, dots and glob characters mean nothing special. In a folder, files
    without a partner are passed over as long as exactly one pair is there.

    Raises:
        DatasetError: nothing there, half of a pair missing, or a folder with several pairs.
    """
    path = Path(path)
    try:
        return _resolve(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be looked up: {error.strerror}") from error


def read_header(prefix: Path) -> IndexHeader:
    """The header of ``{prefix}.idx``, once its magic, version, dtype code and size are found right.

    Raises:
        DatasetError: not an index, of an unknown version or dtype, or cut short.
    """
    path = idx_path(prefix)
    try:
        with path.open("rb") as stream:
            head = stream.read(HEADER.size)
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}. {_PREPARE}") from error
    if not head.startswith(MAGIC):
        raise DatasetError(f"{path}: not an index of Megatron's (starts with {head[:9]!r}, not {MAGIC!r}). {_PREPARE}")
    if len(head) < HEADER.size:
        raise DatasetError(f"{path}: cut short, its {len(head)} bytes are less than a header. {_PREPARE}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise DatasetError(f"{path}: index version {version}; known: {VERSION}. {_PREPARE}")
    if code not in TOKEN_DTYPES:
        known = ", ".join(f"{d.code} ({d.name})" for d in TOKEN_DTYPES.values())
        raise DatasetError(f"{path}: token dtype code {code}; known: {known}. {_PREPARE}")
    header = IndexHeader(dtype=TOKEN_DTYPES[code], num_sequences=num_sequences, num_boundaries=num_boundaries)
    if num_bytes not in (header.num_bytes, header.num_bytes + num_sequences):
        raise DatasetError(
            f"{path}: {num_bytes} bytes, but {num_sequences} sequences and {num_boundaries} document boundaries "
            f"make {header.num_bytes}. {_PREPARE}"
        )
    return header


def check_pair(prefix: Path) -> PairInfo:
    """What the pair holds, once header and sizes are found right; reads the lengths, never the tokens.

    Args:
        prefix: as ``resolve_prefix`` gives it.

    Raises:
        DatasetError: a bad index, or one that needs more bytes than the .bin holds.
    """
    header = read_header(prefix)
    lengths = array("i")
    with idx_path(prefix).open("rb") as stream:
        stream.seek(header.lengths_offset)
        lengths.fromfile(stream, header.num_sequences)
    num_tokens = sum(lengths)
    check_size(prefix, needed=num_tokens * header.dtype.itemsize, shortest=min(lengths, default=0))
    return PairInfo(
        prefix=prefix,
        dtype=header.dtype.name,
        num_sequences=header.num_sequences,
        num_documents=max(0, header.num_boundaries - 1),
        num_tokens=num_tokens,
        num_bytes=bin_path(prefix).stat().st_size,
    )


def check_size(prefix: Path, *, needed: int, shortest: int) -> None:
    """Nothing, if the .bin holds the ``needed`` bytes and the ``shortest`` length is not negative."""
    path = bin_path(prefix)
    try:
        held = path.stat().st_size
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}. {_PREPARE}") from error
    if shortest < 0:
        raise DatasetError(f"{idx_path(prefix)}: holds a negative length ({shortest}). {_PREPARE}")
    if needed > held:
        raise DatasetError(f"{path}: {held} bytes, but {idx_path(prefix)} needs {needed}: cut short. {_PREPARE}")


_PREPARE = "'qcollect data prepare' writes a dataset."


def _has_pair(prefix: Path) -> bool:
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


def _resolve(path: Path) -> Path:
    if _has_pair(path):
        return path
    if path.is_dir():
        return _only_pair_in(path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if _has_pair(prefix):
        return prefix
    for missing, present in ((idx_path(prefix), bin_path(prefix)), (bin_path(prefix), idx_path(prefix))):
        if present.is_file():
            raise DatasetError(f"{missing}: missing, although {present} is there. {_PREPARE}")
    raise DatasetError(f"{path}: no dataset there; looked for {bin_path(prefix)} and {idx_path(prefix)}. {_PREPARE}")


def _only_pair_in(folder: Path) -> Path:
    halves = sorted(p for p in folder.iterdir() if p.suffix in (".bin", ".idx") and p.is_file())
    pairs = sorted({p.with_suffix("") for p in halves if _has_pair(p.with_suffix(""))})
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        listed = ", ".join(str(p) for p in pairs)
        raise DatasetError(f"{folder}: holds {len(pairs)} datasets; name one of: {listed}")
    for half in halves:
        missing = half.with_suffix(".idx" if half.suffix == ".bin" else ".bin")
        raise DatasetError(f"{missing}: missing, although {half} is there. {_PREPARE}")
    raise DatasetError(f"{folder}: no dataset in this folder; looked for one pair *.bin, *.idx. {_PREPARE}")
