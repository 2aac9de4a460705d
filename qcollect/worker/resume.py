"""What an interrupted run of this rank has left: not taken again, and proof that training repeats itself.

A resumed run trains from its first iteration again. Captures whose keys are in the manifest are not
wanted; of each iteration the one that was saved last is computed again and compared bit for bit, so
that captures of two different trainings never end up in one folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    files: dict[CaptureKey, str | None]
    to_compare: frozenset[CaptureKey]
    num_bytes: int
    statistics: dict[CaptureKey, ManifestRecord] = field(default_factory=dict)  # of those to be compared without a file
    num_deduped: int = 0
    deduped_bytes: int = 0
    compared: set[CaptureKey] = field(default_factory=set)

    @classmethod
    def of(cls, run_dir: Path, records: Sequence[ManifestRecord]) -> "Kept":
        """``records`` in the order they were saved."""
        keyed = [(CaptureKey.from_metadata(record.metadata), record) for record in records]
        last_of = {key.iteration: (key, record) for key, record in keyed}
        size_of = {PurePosixPath(record.file).name: record.bytes or 0 for record in records if record.file is not None}
        saved = [
            size_of[target] - (record.bytes or 0)
            for record in records
            if (target := record.metadata.get("stored_in")) in size_of
        ]
        return cls(
            run_dir=run_dir,
            files={key: record.file for key, record in keyed},
            to_compare=frozenset(key for key, _ in last_of.values()),
            num_bytes=sum(record.bytes or 0 for record in records),
            num_deduped=len(saved),
            deduped_bytes=sum(saved),
            statistics={key: record for key, record in last_of.values() if record.is_statistics},
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
        file = self.files[key]
        assert file is not None
        path = self.run_dir / file
        content = load_capture(path)
        stored, computed = content["tensor"], stored_part(content, fix_value(tensor))
        if not is_same(stored, computed):
            raise _not_repeated(key, f"{path} holds ({_difference(stored, computed)})")
        self.compared.add(key)

    def compare_statistics(self, key: CaptureKey, computed: ManifestRecord) -> None:
        """Nothing, if the statistics of ``key`` are those its line has.

        Raises:
            CaptureError: they are not.
        """
        stored = self.statistics[key]
        if (stored.tensor_info, stored.errors) != (computed.tensor_info, computed.errors):
            raise _not_repeated(key, "its line in the manifest says")
        self.compared.add(key)


def _not_repeated(key: CaptureKey, what: str) -> CaptureError:
    return CaptureError(
        f"rank {key.rank}, iteration {key.iteration}: {key.module} {key.tensor_name}, computed again to resume the "
        f"run, is not what {what}; this machine, its devices or its versions do not repeat that training. Nothing was "
        "added to the run in this iteration or after it: resume where it began, or begin anew with --overwrite"
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
    kept = Kept.of(paths.run_dir, read_manifest(paths.manifest_path(rank)))
    return replace(kept, num_bytes=paths.manifest_path(rank).stat().st_size) if kept.statistics else kept


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
