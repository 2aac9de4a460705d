"""Saving tensors from one's own training code: the names and signatures the first users wrote against.

Used bare the saver takes its settings from the environment: ``CUSTOM_QUANT_TYPE`` (``hifp8``),
``TENSOR_SAVE_DIR`` (``./tensor_logs``, as it stands), ``TENSOR_SAVE_ENABLED`` (``true``). Rank: set by
hand, ``torch.distributed``, ``RANK``, ``LOCAL_RANK``, the tensor's device index, 0 with one warning.
Sample: set by hand, ``CURRENT_SAMPLE_IDX``, 0.

Examples
--------
Save what goes into an attention kernel and into a linear, forward and backward::

    from qcollect.tensor_saver import initialize_tensor_collection, save_attention_tensors, save_linear_tensors

    initialize_tensor_collection(rank=0, sample_idx=0, iteration=0)
    save_attention_tensors(query, key, value, quant_type="hifp8", operation="forward", layer_idx=0)
    save_linear_tensors(x, weight, quant_type="mxfp8", operation="forward", layer_idx=0)
    save_linear_tensors(grad_output, weight, quant_type="mxfp8", operation="backward", layer_idx=0)

Save one tensor and move the state on in a training loop::

    from qcollect.tensor_saver import get_tensor_saver, set_global_iteration, set_global_sample_idx

    saver = get_tensor_saver()
    for iteration in range(3):
        set_global_iteration(iteration)
        set_global_sample_idx(0)
        path = saver.save_tensor(
            tensor=output, layer_type="linear", operation="forward", tensor_name="output", layer_idx=0, phase="post"
        )

A capture without ``metadata["module"]`` is told from others like it by its place in the iteration: the
second ``save_linear_tensors`` of a layer is not a repeat of the first. With a module name the first
save of an iteration and micro-batch wins and repeats are dropped.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from qcollect.errors import UsageError
from qcollect.formats.catalog import get_quant_type
from qcollect.vocab import Operation, Phase, RankInfo, Values
from qcollect.worker.collect import saving_enabled
from qcollect.worker.saver import Observation, Saver, default_component
from qcollect.worker.sharding import describe_sharding, local_of
from qcollect.worker.state import STATE, TensorCollectionState, detect_rank, find_rank

__all__ = [
    "TensorCollectionState",
    "TensorSaver",
    "get_current_rank_and_sample",
    "get_tensor_saver",
    "initialize_tensor_collection",
    "save_attention_tensors",
    "save_linear_tensors",
    "save_tensor",
    "set_global_batch_idx",
    "set_global_iteration",
    "set_global_rank",
    "set_global_sample_idx",
    "set_global_sequence_idx",
]


class TensorSaver:
    """Saves tensors one call at a time, each to one self-describing ``.pt``.

    Args:
        save_dir: None: ``TENSOR_SAVE_DIR``, else ``./tensor_logs``.
        enabled: None: ``TENSOR_SAVE_ENABLED``.
        quant_type: a name, or a YAML file of one's own; None: ``CUSTOM_QUANT_TYPE``, else ``hifp8``.

    Raises:
        FormatError: the quant type is unknown.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None = None, enabled: bool | None = None, quant_type: str | None = None
    ) -> None:
        self.save_dir = Path(save_dir or os.environ.get("TENSOR_SAVE_DIR") or "tensor_logs").absolute()
        self.enabled = saving_enabled() if enabled is None else enabled
        self.quant_type = quant_type or os.environ.get("CUSTOM_QUANT_TYPE") or "hifp8"
        if quant_type is not None or "QCOLLECT_PLAN" not in os.environ:  # a planned run's type was checked before
            self.quant_type = get_quant_type(self.quant_type).name
        self._saver = Saver(self.save_dir, run_id=f"bare-{os.getpid()}")
        self._iteration: int | None = None
        self._saved: dict[tuple[Any, ...], str] = {}
        self._occurrences: Counter[tuple[Any, ...]] = Counter()

    def save_tensor(
        self,
        tensor: torch.Tensor | None,
        layer_type: str,
        operation: str,
        quant_type: str | None = None,
        tensor_name: str = "tensor",
        layer_idx: int | None = None,
        phase: str = Phase.PRE,
        component: str | None = None,
        rank: int | None = None,
        sample_idx: int | None = None,
        metadata: dict[str, Any] | None = None,
        iteration: int | None = None,
    ) -> str | None:
        """Save one tensor's value as it is now.

        Args:
            tensor: any dtype, device and strides, of a DTensor this rank's part; None is skipped.
            layer_type: ``attention`` or ``linear``.
            operation: ``forward`` or ``backward``.
            quant_type: None: the saver's.
            tensor_name: ``query``, ``input``, ``grad_output``, ...
            layer_idx: transformer layer from 0, None without one.
            phase: ``pre`` or ``post``.
            component: ``FA`` or ``linear``; None: by layer type.
            rank, sample_idx, iteration: None: as the module's docstring says.
            metadata: the caller's own; ``module`` (FQN) makes repeats recognizable.

        Returns:
            The file's path; that of the first save for a repeat; None when saving is off.

        Raises:
            UsageError: a word that no file name can hold.
            CaptureError: it could not be written.
        """
        if tensor is None or not self.enabled:
            return None
        extra = dict(metadata or {})
        _check("operation", operation, Operation)
        _check("phase", phase, (*Phase, "unknown"))
        values = extra.get("values", Values.ORIGINAL)
        _check("metadata['values']", values, Values)
        by_hand = STATE.current_rank if rank is None else rank
        info = detect_rank(tensor) if by_hand is None else _rank_info(by_hand)
        iteration = STATE.iteration() if iteration is None else iteration
        sample_idx = STATE.sample_idx() if sample_idx is None else sample_idx
        micro_batch = int(extra.get("micro_batch", STATE.micro_batch()))
        self._begin(iteration)
        place = (info.rank, iteration, micro_batch, sample_idx, layer_type, layer_idx, operation, phase, tensor_name)
        module = extra.get("module")
        if module is None:
            layer = "" if layer_idx is None else f".L{layer_idx}"
            module = f"{layer_type}{layer}#{self._occurrences[place]}"
            self._occurrences[place] += 1
        key = (*place, module)
        if key in self._saved:
            return self._saved[key]
        seen = Observation(
            layer_type=layer_type,
            layer_idx=layer_idx,
            operation=operation,
            phase=phase,
            component=component or default_component(layer_type),
            quant_type=quant_type or self.quant_type,
            tensor_name=tensor_name,
            tensor=tensor_name,
            module=str(module),
            rank=info,
            iteration=iteration,
            micro_batch=micro_batch,
            sample_idx=sample_idx,
            num_samples=STATE.num_samples(),
            batch_idx=STATE.batch(),
            sequence_idx=STATE.sequence(),
            values=Values(values),
            consumers=extra.get("consumers", ()),
            token_layout=extra.get("token_layout"),
            loss_scale=float(extra.get("loss_scale", 1.0)),
            token_hash=extra.get("token_hash"),
            sharding=extra.get("sharding", describe_sharding(tensor)),
            extra=extra,
        )
        self._saved[key] = str(self._saver.save(local_of(tensor), seen))
        return self._saved[key]

    def save_attention_tensors(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        quant_type: str | None = None,
        operation: str = Operation.FORWARD,
        layer_idx: int | None = None,
        metadata: dict[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, str | None]:
        """Save query, key and value (in backward: their gradients); the paths by tensor name.

        ``settings`` are further arguments of ``save_tensor``: ``phase``, ``component``, ``rank``, ...
        """
        prefix = "grad_" if operation == Operation.BACKWARD else ""
        tensors = {f"{prefix}query": query, f"{prefix}key": key, f"{prefix}value": value}
        return self._save_all(tensors, "attention", operation, quant_type, layer_idx, metadata, **settings)

    def save_linear_tensors(
        self,
        input_tensor: torch.Tensor,
        weight: torch.Tensor | None,
        quant_type: str | None = None,
        operation: str = Operation.FORWARD,
        layer_idx: int | None = None,
        metadata: dict[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, str | None]:
        """Save what a linear's gemm reads; the paths by tensor name.

        In backward ``input_tensor`` is the gradient of the output and is saved as ``grad_output``.
        ``settings`` are further arguments of ``save_tensor``.
        """
        name = "grad_output" if operation == Operation.BACKWARD else "input"
        tensors = {name: input_tensor, "weight": weight}
        return self._save_all(tensors, "linear", operation, quant_type, layer_idx, metadata, **settings)

    def _save_all(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        layer_type: str,
        operation: str,
        quant_type: str | None,
        layer_idx: int | None,
        metadata: dict[str, Any] | None,
        **settings: Any,
    ) -> dict[str, str | None]:
        return {
            name: self.save_tensor(
                tensor, layer_type, operation, quant_type, name, layer_idx, metadata=metadata, **settings
            )
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def _begin(self, iteration: int) -> None:
        if iteration != self._iteration:  # repeats are of one iteration; forget the ones before
            self._iteration = iteration
            self._saved.clear()
            self._occurrences.clear()


def _check(name: str, value: Any, known: Iterable[str]) -> None:
    names = [str(word) for word in known]
    if value not in names:
        raise UsageError(f"{name} is {value!r}; known: {', '.join(names)}")


def _rank_info(rank: int) -> RankInfo:
    """A rank set by hand; what else is known of this process goes with it."""
    found = find_rank()
    return RankInfo(
        rank=rank,
        local_rank=found.local_rank if found else rank,
        world_size=found.world_size if found else 1,
        source="hand",
    )


_saver: TensorSaver | None = None


def get_tensor_saver() -> TensorSaver:
    """The process's saver, made from the environment at the first call."""
    global _saver
    if _saver is None:
        _saver = TensorSaver()
    return _saver


def save_tensor(*args: Any, **kwargs: Any) -> str | None:
    """``TensorSaver.save_tensor`` of the process's saver."""
    return get_tensor_saver().save_tensor(*args, **kwargs)


def save_attention_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """``TensorSaver.save_attention_tensors`` of the process's saver."""
    return get_tensor_saver().save_attention_tensors(*args, **kwargs)


def save_linear_tensors(*args: Any, **kwargs: Any) -> dict[str, str | None]:
    """``TensorSaver.save_linear_tensors`` of the process's saver."""
    return get_tensor_saver().save_linear_tensors(*args, **kwargs)


def initialize_tensor_collection(
    rank: int | None = None,
    sample_idx: int | None = None,
    iteration: int = 0,
    batch_idx: int = 0,
    sequence_idx: int = 0,
) -> None:
    """Set the whole state by hand; None leaves a value to detection."""
    STATE.current_rank = rank
    STATE.current_sample_idx = sample_idx
    STATE.current_iteration = iteration
    STATE.batch_idx = batch_idx
    STATE.sequence_idx = sequence_idx


def set_global_rank(rank: int) -> None:
    """Set this process's global rank by hand."""
    STATE.current_rank = rank


def set_global_sample_idx(sample_idx: int) -> None:
    """Set the global index of the current sample by hand."""
    STATE.current_sample_idx = sample_idx


def set_global_iteration(iteration: int) -> None:
    """Set the current iteration by hand."""
    STATE.current_iteration = iteration


def set_global_batch_idx(batch_idx: int) -> None:
    """Set the current batch index by hand."""
    STATE.batch_idx = batch_idx


def set_global_sequence_idx(sequence_idx: int) -> None:
    """Set the current sequence index by hand."""
    STATE.sequence_idx = sequence_idx


def get_current_rank_and_sample() -> tuple[int | None, int | None]:
    """The rank and sample a save would take now."""
    return STATE.rank(), STATE.sample_idx()
