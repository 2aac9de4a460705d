"""The collector: taps on a model, a schedule, a saver, and the ranks' common decision when to stop."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from qcollect.errors import OutputError, UsageError
from qcollect.paths import RunPaths
from qcollect.plan.schedule import Schedule
from qcollect.vocab import RankInfo
from qcollect.worker.frame import Frame, TakenCapture, Wanted, want_key
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.progress import ProgressReporter, append_metrics
from qcollect.worker.saver import Observation, Saver
from qcollect.worker.shortfall import Shortfall
from qcollect.worker.sites import install, unwrap
from qcollect.worker.state import STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """What a collector is made from; a plan gives it, or the arguments of ``collect``.

    ``is_planned`` schedules were checked against the recipe's model before the launch: a capture that
    does not come is an error. Others take the next captures of the list in the next iteration instead.
    """

    quant_type: str
    policy: QuantPolicy
    schedule: Schedule
    run_dir: Path
    run_id: str
    rank: RankInfo
    loss_scale: float = 1.0
    by_iteration: bool = False
    is_planned: bool = False
    enabled: bool = True


class Collector:
    """Quantizes a model's gemms and captures what the schedule wants, between ``__enter__`` and ``__exit__``.

    Call ``step`` once an optimizer step; it is true once every rank has its share or a stop was asked for.
    """

    def __init__(self, model: nn.Module, settings: CollectorSettings, vote_group: Any = None) -> None:
        self.model = unwrap(model)
        self.settings = settings
        self.rank = settings.rank
        self.saver = Saver(settings.run_dir, run_id=settings.run_id, by_iteration=settings.by_iteration)
        self.paths = RunPaths(settings.run_dir.absolute())
        self.share = settings.schedule.share(self.rank.rank) if settings.enabled else 0
        STATE.tracked.clear()  # what an earlier collector of this process tracked
        self.iteration = STATE.iteration()
        self.micro_batch = -1
        self.frame: Frame | None = None
        self._num_sequences = 0
        self._num_saved_before = 0
        self._shortfall = Shortfall(
            rank=self.rank.rank,
            captures=settings.schedule.captures,
            next_position=max((c.count for c in settings.schedule.cuts[self.rank.rank]), default=0),
            is_planned=settings.is_planned,
        )
        self._frames: list[Frame] = []
        self._undo: list[Callable[[], None]] = []
        self._step_started = time.monotonic()
        self._vote_group = vote_group
        device = next((str(p.device) for p in self.model.parameters()), "cpu")
        self.progress = ProgressReporter(paths=self.paths, rank=self.rank, share=self.share, device=device)

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if hasattr(self.model, "_orig_mod"):
            raise UsageError(
                "the model is compiled already and its hooks would never fire; collect before torch.compile"
            )
        self._undo.append(install(self.model, self.settings.policy, lambda: self.frame))
        handle = self.model.register_forward_pre_hook(self._begin_micro_batch, with_kwargs=True, prepend=True)
        self._undo.append(handle.remove)
        self.progress.update(state="training", force=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        self.frame = None
        if kind is None:
            self.progress.update(state="done", force=True)

    # ---- micro-batches -------------------------------------------------------------------------

    def _begin_micro_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.model.training and torch.is_grad_enabled()):
            self.frame = None  # an evaluation pass: quantized, not recorded
            return
        self.micro_batch += 1
        tokens = _tokens(args, kwargs)
        num_samples = tokens.shape[0] if tokens is not None and tokens.dim() > 1 else 1
        tracked_sample = self._num_sequences * self.rank.world_size + self.rank.rank * num_samples
        self._num_sequences += num_samples
        STATE.track(
            iteration=self.iteration,
            micro_batch=self.micro_batch,
            sample_idx=tracked_sample,
            sequence_idx=tracked_sample,
            batch_idx=tracked_sample // num_samples,
            num_samples=num_samples,
        )
        wanted = self._wanted()
        self.frame = Frame(
            iteration=self.iteration,
            micro_batch=self.micro_batch,
            sample_idx=STATE.sample_idx(),
            num_samples=num_samples,
            token_hash=_hash(tokens) if wanted and tokens is not None else None,
            wanted=wanted,
            sink=self._save,
        )
        if wanted:
            self._frames.append(self.frame)

    def _wanted(self) -> Wanted:
        if not self.settings.enabled:
            return {}
        schedule = self.settings.schedule
        wanted = {
            want_key(capture): (cut.start + position + 1, capture)
            for cut in schedule.cuts[self.rank.rank]
            if (cut.iteration, cut.micro_batch) == (self.iteration, self.micro_batch)
            for position, capture in enumerate(schedule.captures[: cut.count])
        }
        if self.micro_batch == 0:
            wanted |= self._shortfall.collect()
        return wanted

    def _save(self, taken: TakenCapture) -> None:
        planned, frame = taken.planned, taken.frame
        seen = Observation(
            layer_type=planned.layer_type,
            layer_idx=planned.layer_idx,
            operation=planned.operation,
            phase=planned.phase,
            component=planned.component,
            quant_type=self.settings.quant_type,
            tensor_name=planned.tensor_name,
            tensor=planned.tensor,
            module=planned.module,
            rank=self.rank,
            iteration=frame.iteration,
            micro_batch=frame.micro_batch,
            sample_idx=frame.sample_idx,
            num_samples=frame.num_samples,
            batch_idx=STATE.batch(),
            sequence_idx=STATE.sequence(),
            values=planned.values,
            consumers=taken.consumers,
            token_layout=taken.token_layout,
            loss_scale=self.settings.loss_scale,
            token_hash=frame.token_hash,
        )
        self.saver.save(taken.tensor, seen, taken.counter)
        self.progress.update(captured=self.saver.num_saved, num_bytes=self.saver.num_bytes)

    # ---- iterations ----------------------------------------------------------------------------

    @property
    def num_captured(self) -> int:
        return self.saver.num_saved

    @property
    def is_complete(self) -> bool:
        """Whether this rank has its share."""
        return self.saver.num_saved >= self.share

    def step(self, **metrics: float) -> bool:
        """End an iteration; all ranks call it together.

        Args:
            metrics: of the iteration (``loss``, ``grad_norm``, ``num_tokens``, ``learning_rate``, ...), appended to
                ``metrics.jsonl`` by rank 0; ``num_tokens`` also as ``tokens_per_s``.

        Returns:
            True when training may end: every rank has its share, or a stop was asked for. The answer is
            the same on all ranks.

        Raises:
            CaptureError: a planned capture did not come.
        """
        now = time.monotonic()
        duration_s, self._step_started = now - self._step_started, now
        if self.rank.rank == 0 and metrics:
            self._write_metrics(metrics, duration_s)
        num_taken = self.saver.num_saved - self._num_saved_before
        self._shortfall.settle(self._frames, iteration=self.iteration, num_taken=num_taken)
        self._num_saved_before = self.saver.num_saved
        self.iteration += 1
        self.micro_batch = -1
        self.frame = None
        self._frames.clear()
        STATE.track(iteration=self.iteration, micro_batch=0)
        self.progress.update(iteration=self.iteration, loss=metrics.get("loss"))
        stop = self._vote(stop=self.paths.stop_path.exists(), unfinished=not self.is_complete)
        if stop:
            self.progress.update(state="draining", force=True)
        return stop

    def _write_metrics(self, metrics: dict[str, float], duration_s: float) -> None:
        line: dict[str, Any] = {"iteration": self.iteration, **metrics, "time_s": duration_s}
        if "num_tokens" in metrics:
            line["tokens_per_s"] = metrics["num_tokens"] / duration_s if duration_s else None
        self.paths.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        append_metrics(self.paths, line)

    def _vote(self, *, stop: bool, unfinished: bool) -> bool:
        flags = torch.tensor([int(stop), int(unfinished)], dtype=torch.int32)
        if self._vote_group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._vote_group)
        stop_asked, any_unfinished = flags.tolist()
        return bool(stop_asked) or not any_unfinished


def make_vote_group() -> Any:
    """A gloo group of all ranks: the vote never touches the accelerator's communicator. None without ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    named = kwargs.get("input_ids")
    candidates = [named, *args, *kwargs.values()]
    return next((value for value in candidates if isinstance(value, torch.Tensor)), None)


def _hash(tokens: torch.Tensor) -> str:
    """xxh3-64 of the micro-batch's first input, so that runs can prove they saw the same tokens."""
    data = tokens.detach().cpu().contiguous()
    num_bytes = data.numel() * data.element_size()
    return xxhash.xxh3_64(ctypes.string_at(data.data_ptr(), num_bytes) if num_bytes else b"").hexdigest()


def claim_directory(run_dir: Path, group: Any) -> None:
    """Take ``run_dir`` for one run of ``collect``, exclusively, once for all ranks of ``group``.

    Raises:
        OutputError: it holds a run, or cannot be written. On every rank alike.
    """
    is_first = group is None or dist.get_rank() == 0
    problem = _claim(run_dir) if is_first else None
    failed = torch.tensor([int(problem is not None)], dtype=torch.int32)
    if group is not None:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if failed.item():
        raise OutputError(problem or f"{run_dir} could not be taken; rank 0 says why")


def _claim(run_dir: Path) -> str | None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        RunPaths(run_dir).state_dir.mkdir()
    except FileExistsError:
        return f"{run_dir} holds a run already; give another out_dir, or remove that run"
    except OSError as error:
        return f"{run_dir} cannot be written: {os.strerror(error.errno or 0)}"
    return None
