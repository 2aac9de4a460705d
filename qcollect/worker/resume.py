"""What an interrupted run of this rank has left: not taken again, and proof that training repeats itself.

A resumed run trains from its first iteration again. Captures whose keys are in the manifest are not
wanted; of each iteration the one that was saved last is computed again and compared bit for bit, so
that captures of two different trainings never end up in one folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import torch

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths
from qcollect.plan.schedule import PlannedCapture
from qcollect.store.capture import load_capture
from qcollect.store.compact import bytes_of, is_same, stored_part
from qcollect.store.manifest import ManifestRecord, read_manifest
from qcollect.vocab import CaptureKey, Values
from qcollect.worker.frame import Frame
from qcollect.worker.saver import fix_value


@dataclass(frozen=True, slots=True)
class Kept:
    """The captures that are there, by key, and those to be compared.

    ``num_deduped`` of them refer to others, and take ``deduped_bytes`` less than these.
    """

    run_dir: Path
    files: dict[CaptureKey, str]
    to_compare: frozenset[CaptureKey]
    num_bytes: int
    num_deduped: int = 0
    deduped_bytes: int = 0
    compared: set[CaptureKey] = field(default_factory=set)

    @classmethod
    def of(cls, run_dir: Path, records: Sequence[ManifestRecord]) -> "Kept":
        """``records`` in the order they were saved."""
        keys = {CaptureKey.from_metadata(record.metadata): record.file for record in records}
        last_of = {key.iteration: key for key in keys}
        num_bytes = sum(record.bytes for record in records)
        size_of = {PurePosixPath(record.file).name: record.bytes for record in records}
        saved = [
            size_of[target] - record.bytes
            for record in records
            if (target := record.metadata.get("stored_in")) in size_of
        ]
        return cls(
            run_dir=run_dir,
            files=keys,
            to_compare=frozenset(last_of.values()),
            num_bytes=num_bytes,
            num_deduped=len(saved),
            deduped_bytes=sum(saved),
        )

    def __len__(self) -> int:
        return len(self.files)

    def wants(self, key: CaptureKey) -> bool:
        """Whether a capture is still to be seen: it is not there, or is to be compared."""
        return key not in self.files or key in self.to_compare

    def is_proven(self, iteration: int) -> bool:
        """Whether no comparison of an iteration is outstanding."""
        return not any(key.iteration == iteration for key in self.to_compare - self.compared)

    def compare(self, key: CaptureKey, tensor: torch.Tensor) -> None:
        """Nothing, if ``tensor`` (any device) is what the file of ``key`` holds, bit for bit.

        Raises:
            CaptureError: it is not, or the file cannot be read.
        """
        path = self.run_dir / self.files[key]
        content = load_capture(path)
        stored, computed = content["tensor"], stored_part(content, fix_value(tensor))
        if is_same(stored, computed):
            self.compared.add(key)
            return
        raise CaptureError(
            f"rank {key.rank}, iteration {key.iteration}: {key.module} {key.tensor_name}, computed again to resume the "
            f"run, is not what {path} holds ({_difference(stored, computed)}); this machine, its devices or its "
            "versions do not repeat that training. Nothing was added to the run in this iteration or after it: "
            "resume where it began, or begin anew with --overwrite"
        )


def keep(paths: RunPaths, rank: int) -> Kept:
    """What the folder holds of this rank, whole files that a killed writer had not listed yet included.

    Raises:
        CaptureError: the manifest is damaged.
    """
    from qcollect.store.verify import repair_rank

    if not paths.run_dir.is_dir():
        return Kept.of(paths.run_dir, ())
    repair_rank(paths, rank)
    return Kept.of(paths.run_dir, read_manifest(paths.manifest_path(rank)))


def key_of(planned: PlannedCapture, frame: Frame, rank: int) -> CaptureKey:
    """The identity a wanted capture will have."""
    return CaptureKey(
        rank=rank,
        iteration=frame.iteration,
        micro_batch=frame.micro_batch,
        sample_idx=frame.sample_idx,
        module=planned.module,
        operation=planned.operation,
        phase=planned.phase,
        tensor_name=planned.tensor_name,
        gemm=planned.gemm if planned.values == Values.QUANTIZED else None,
        values=planned.values,
    )


def _difference(stored: torch.Tensor, computed: torch.Tensor) -> str:
    if stored.shape != computed.shape or stored.dtype != computed.dtype:
        return f"{list(stored.shape)} {stored.dtype} there, {list(computed.shape)} {computed.dtype} now"
    differing = (bytes_of(stored) != bytes_of(computed)).view(-1, stored.element_size()).any(dim=1)
    return f"{int(differing.sum()):,} of {stored.numel():,} elements differ"
