"""A capture on its way to disk: value fixed, described, named, written, listed in the manifest."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qcollect.errors import CaptureError
from qcollect.formats.quantized import ScaleCodes
from qcollect.paths import RunPaths
from qcollect.plan.devices import RankDevice
from qcollect.store.capture import (
    METADATA_SCHEMA,
    StoredFile,
    plain,
    save_capture,
    write_failure,
)
from qcollect.store.files import LineFile, encode_line
from qcollect.store.reference import FORM, hash_payload, reference_entries
from qcollect.store.summary import describe, summarize
from qcollect.vocab import COMPONENTS, CaptureName, LayerType, RankInfo, Values
from qcollect.worker.dedupe import MIN_BYTES, Claim, Payloads
from qcollect.worker.packing import Packed, Packing, pack


class Observation(NamedTuple):
    """What is known of a tensor the moment it is seen. Given by name: the order is that of how often they change.

    ``tensor`` is the last field of the file name; ``consumers`` the gemms that read the operand, with
    all that their quantized value follows from; ``block_scales`` those of a quantized copy, where they are
    stored; ``trigger`` what began the captures of a run that waited; ``extra`` the caller's own metadata.
    """

    layer_type: str
    layer_idx: int | None
    operation: str
    phase: str
    component: str
    quant_type: str
    tensor_name: str
    tensor: str
    module: str
    rank: RankInfo
    iteration: int
    micro_batch: int
    sample_idx: int
    num_samples: int
    batch_idx: int = 0
    sequence_idx: int = 0
    loss_scale: float = 1.0
    token_hash: str | None = None
    trigger: dict[str, Any] | None = None
    values: Values = Values.ORIGINAL
    token_layout: str | None = None
    consumers: Sequence[dict[str, Any]] = ()
    sharding: dict[str, Any] | None = None
    block_scales: ScaleCodes | None = None
    extra: dict[str, Any] | None = None


def default_component(layer_type: str) -> str:
    return str(COMPONENTS[LayerType(layer_type)]) if layer_type in list(LayerType) else "unknown"


def fix_value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's value now: a dense CPU copy without grad in storage of its own, same dtype and shape."""
    value = plain_value(tensor)
    fixed = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return fixed.copy_(value)


def plain_value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without grad, layout and flags of its own; its memory, where nothing had to be computed for that."""
    value = tensor.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    # asked first: that takes less time than having nothing to do
    value = value.resolve_conj() if value.is_conj() else value
    return value.resolve_neg() if value.is_neg() else value


class Source(NamedTuple):
    """What is recorded of a tensor as the network holds it."""

    device: str
    requires_grad: bool
    is_leaf: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Source":
        return cls(_device_text(tensor.device), tensor.requires_grad, tensor.is_leaf)


_device_text = cache(str)


class Saver:
    """Writes this rank's captures below one run folder; any thread may.

    ``num_deduped`` of them refer to another file (``Packing.dedupe``), which left ``deduped_bytes`` unwritten: what
    the files that hold their tensors are larger than they.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str,
        by_iteration: bool = False,
        device: RankDevice | None = None,
        durability: str = "none",
        packing: Packing | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.settings: dict[str, Any] = {
            "run_dir": run_dir.absolute(),
            "run_id": run_id,
            "by_iteration": by_iteration,
            "device": device,
            "durability": durability,
            "packing": packing,
        }
        self.paths = RunPaths(run_dir.absolute())
        self.run_id = run_id
        self.by_iteration = by_iteration
        self.device = _describe_device(device)
        self.durability = durability
        self.packing = packing or Packing()
        self.clock = clock
        self.num_saved = 0
        self.num_bytes = 0
        self.num_deduped = 0
        self.deduped_bytes = 0
        self._payloads = Payloads()
        self._lock = threading.Lock()
        self._folders: dict[int | None, Path] = {}  # by iteration, where each has its own
        self._manifests: dict[int, LineFile] = {}

    def save(self, tensor: torch.Tensor, seen: Observation, counter: int | None = None) -> Path:
        """Write one capture and its manifest line, now.

        Args:
            tensor: any device; its value is copied before this returns.
            seen: what it is.
            counter: its position in the schedule, from 1; None takes the next free number.

        Returns:
            The absolute path of the file.

        Raises:
            CaptureError: it could not be written; nothing is left under its name.
        """
        value = fix_value(tensor)
        summary = summarize(value).tolist()
        return self.write(value, summary, Source.of(tensor), seen, counter, self.clock()).path

    def write(
        self,
        value: torch.Tensor,
        summary: Sequence[float],
        source: Source,
        seen: Observation,
        counter: int | None,
        now: datetime,
    ) -> StoredFile:
        """``save`` for a value that is fixed: dense, on the CPU, in storage of its own, with its statistics.

        Args:
            summary: as ``store.summary`` gives it.
            source: the tensor it is the value of.
            now: when it was seen.
        """
        tensor_info = describe(
            summary,
            shape=value.shape,
            dtype=value.dtype,
            device=source.device,
            requires_grad=source.requires_grad,
            is_leaf=source.is_leaf,
        )
        packed = pack(
            value,
            self.packing,
            values=seen.values,
            consumers=seen.consumers,
            token_layout=seen.token_layout,
            num_samples=seen.num_samples,
            block_scales=seen.block_scales,
        )
        packed, known = self._share(packed, seen)
        listed: StoredFile | None = None
        try:
            metadata = describe_capture(seen, self.run_id, self.device, now, packed.metadata)
            stored = self._write(packed.entries, tensor_info, metadata, seen, counter, now)
            if isinstance(known, StoredFile):
                stored = replace(stored, deduped_bytes=known.num_bytes - stored.num_bytes)
            self._list(stored, seen.rank.rank, tensor_info, metadata)
            listed = stored
        finally:
            if isinstance(known, Claim):
                known.settle(listed)
        if os.environ.get("QCOLLECT_LOG") == "debug":
            _print_save(stored.path, seen)
        return stored

    def _share(self, packed: Packed, seen: Observation) -> tuple[Packed, StoredFile | Claim | None]:
        """A reference to the file that stores the same, and that file; else ``packed``, and the claim to store it.

        None: it is not to be shared.
        """
        payload = hash_payload(packed.entries) if self.packing.dedupe else None
        if payload is None or payload.num_bytes < MIN_BYTES:
            return packed, None
        known = self._payloads.find_or_claim(seen.iteration, seen.rank.rank, payload.xxh3_128)
        if isinstance(known, Claim):
            return packed, known
        file = known.path.name
        entries = reference_entries(file, packed.entries, payload)
        return Packed(entries=entries, metadata={**packed.metadata, "storage": FORM, "stored_in": file}), known

    def _write(
        self,
        entries: dict[str, Any],
        tensor_info: dict[str, Any],
        metadata: dict[str, Any],
        seen: Observation,
        counter: int | None,
        now: datetime,
    ) -> StoredFile:
        number = self.num_saved + 1 if counter is None else counter
        folder = self._folder_of(seen.iteration)
        while True:
            path = folder / _name(seen, number, now)
            try:
                return save_capture(path, entries, tensor_info, metadata, durable=self.durability != "none")
            except FileExistsError:
                if counter is not None:
                    raise CaptureError(f"{path}: exists already; nothing was overwritten") from None
                number += 1  # another saver of this folder took the number

    def _list(
        self,
        stored: StoredFile,
        rank: int,
        tensor_info: dict[str, Any],
        metadata: dict[str, Any],
    ) -> None:
        """Append a file's manifest line, and count it."""
        path = stored.path
        line = encode_line(
            {
                "file": f"{path.parent.name}/{path.name}" if self.by_iteration else path.name,
                "bytes": stored.num_bytes,
                "xxh3_128": stored.xxh3_128,
                "metadata": metadata,
                "tensor_info": tensor_info,
            }
        )
        try:
            with self._lock:
                self._manifest(rank).append_encoded(line)
                self.num_saved += 1
                self.num_bytes += stored.num_bytes
                if stored.deduped_bytes is not None:
                    self.num_deduped += 1
                    self.deduped_bytes += stored.deduped_bytes
        except OSError as error:
            path.unlink(missing_ok=True)  # a capture is its file and its line, or nothing
            raise write_failure(self.paths.manifest_path(rank), error) from error

    def _manifest(self, rank: int) -> LineFile:
        manifest = self._manifests.get(rank)
        if manifest is None:
            path = self.paths.manifest_path(rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            manifest = self._manifests[rank] = LineFile(path, durable=self.durability == "all")
        return manifest

    def _folder_of(self, iteration: int) -> Path:
        """That of an iteration's captures, made once: one that is gone later is an error, and not to begin anew."""
        key = iteration if self.by_iteration else None
        folder = self._folders.get(key)
        if folder is None:
            folder = self.paths.capture_folder(iteration, by_iteration=self.by_iteration)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise write_failure(folder, error) from error
            self._folders[key] = folder
        return folder


def _name(seen: Observation, counter: int, now: datetime) -> str:
    return CaptureName(
        timestamp=now.strftime("%Y%m%d_%H%M%S"),
        counter=counter,
        iteration=seen.iteration,
        layer_type=seen.layer_type,
        layer_idx=seen.layer_idx,
        operation=seen.operation,
        phase=seen.phase,
        component=seen.component,
        quant_type=seen.quant_type,
        rank=seen.rank.rank,
        sample_idx=seen.sample_idx,
        tensor=seen.tensor,
    ).build()


def _describe_device(device: RankDevice | None) -> dict[str, Any]:
    """Which GPU a rank computes on, as far as the launcher knows: what ``tensor_info.device`` does not say."""
    names = ("visible_device", "gpu_name", "gpu_uuid", "gpu_index")
    return {name: None if device is None else getattr(device, name) for name in names}


def describe_capture(
    seen: Observation, run_id: str, device: dict[str, Any], now: datetime, packed: dict[str, Any]
) -> dict[str, Any]:
    """``metadata``; ``packed`` says how the tensor is stored."""
    known: dict[str, Any] = {
        "schema": METADATA_SCHEMA,
        "rank": seen.rank.rank,
        "local_rank": seen.rank.local_rank,
        "world_size": seen.rank.world_size,
        "sample_idx": seen.sample_idx,
        "num_samples": seen.num_samples,
        "batch_idx": seen.batch_idx,
        "sequence_idx": seen.sequence_idx,
        "iteration": seen.iteration,
        "micro_batch": seen.micro_batch,
        "layer_type": seen.layer_type,
        "layer_idx": seen.layer_idx,
        "operation": seen.operation,
        "phase": seen.phase,
        "component": seen.component,
        "quant_type": seen.quant_type,
        "tensor_name": seen.tensor_name,
        "module": seen.module,
        "values": seen.values,
        "token_layout": seen.token_layout,
        "loss_scale": seen.loss_scale,
        "token_hash": seen.token_hash,
        "save_time": now.strftime("%Y-%m-%d %H:%M:%S"),
        "run_id": run_id,
        "sharding": seen.sharding,
        "trigger": seen.trigger,
        **packed,
        **device,
    }
    converted: dict[str, Any] = plain({**(seen.extra or {}), **known})
    return converted


def _print_save(path: Path, seen: Observation) -> None:
    print(  # noqa: T201
        f"[TensorSaver] {path.name}: rank {seen.rank.rank} sample {seen.sample_idx} "
        f"layer {seen.layer_type} L{seen.layer_idx} {seen.operation} {seen.phase} {seen.tensor_name}",
        file=sys.stderr,
    )
