"""The captures of a run, read from its manifests, selected by any metadata field."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcollect.errors import CaptureError, OutputError
from qcollect.paths import RunPaths
from qcollect.store.manifest import ManifestRecord, read_manifests
from qcollect.vocab import CaptureKey

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One capture of a run: what the manifest says, and the file behind it (None: statistics alone)."""

    path: Path | None
    record: ManifestRecord

    @property
    def metadata(self) -> dict[str, Any]:
        return self.record.metadata

    @property
    def tensor_info(self) -> dict[str, Any]:
        return self.record.tensor_info

    @property
    def errors(self) -> dict[str, Any]:
        """By quant type, what quantization does to the operand of a gemm; empty where nothing measured it."""
        return self.record.errors

    @property
    def key(self) -> CaptureKey:
        return CaptureKey.from_metadata(self.metadata)

    def load(self) -> "torch.Tensor":
        """The tensor, as ``qcollect.load`` gives it.

        Raises:
            CaptureError: the file is missing or torn, or there is none: the run kept statistics only.
            MissingExtraError: it is compressed, and zstandard is not installed.
        """
        from qcollect.store.capture import load

        if self.path is None:
            m = self.metadata
            raise CaptureError(
                f"rank {m['rank']} iteration {m['iteration']} {m['module']} {m['tensor_name']}: statistics only, there "
                "is no tensor (capture.mode stats); see .tensor_info and .errors, or capture with capture.mode tensors"
            )
        return load(self.path)


@dataclass(frozen=True, slots=True)
class Run(Sequence[Capture]):
    """The captures of one run folder, by rank and then in the order they were saved."""

    captures: tuple[Capture, ...]

    def __len__(self) -> int:
        return len(self.captures)

    def __getitem__(self, item: Any) -> Any:
        return self.captures[item]

    def __iter__(self) -> Iterator[Capture]:
        return iter(self.captures)

    def select(self, **fields: Any) -> "Run":
        """The captures whose metadata has these values; a list, tuple or set means any of them.

        A field no capture has raises, so that a misspelt name does not look like an empty run.

        Raises:
            KeyError: no capture of the run has the field.
        """
        known = {name for capture in self.captures for name in capture.metadata}
        for name in fields:
            if self.captures and name not in known:
                raise KeyError(f"no capture has the field {name!r}; fields: {', '.join(sorted(known))}")
        return Run(tuple(c for c in self.captures if all(_matches(c.metadata.get(k), v) for k, v in fields.items())))


def _matches(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list | tuple | set | frozenset) else bool(value == wanted)


def open_run(run_dir: str | os.PathLike[str]) -> Run:
    """The captures of a run folder, from its manifests; no tensor is read.

    Raises:
        OutputError: the folder holds no run.
    """
    paths = RunPaths(Path(run_dir))
    if not paths.manifest_dir.is_dir():
        raise OutputError(f"{paths.run_dir} holds no run (no {paths.manifest_dir}); give the folder of one quant type")
    records = read_manifests(paths)
    return Run(tuple(Capture(path=None if r.file is None else paths.run_dir / r.file, record=r) for r in records))
