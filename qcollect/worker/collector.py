"""The collector: taps on a model, a schedule, a saver, and the ranks' common decision when to stop."""

import ctypes
import os
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils._pytree import tree_leaves

from qcollect.errors import CaptureError, OutputError, UsageError
from qcollect.paths import RunPaths
from qcollect.plan.devices import RankDevice
from qcollect.plan.schedule import FILE_OVERHEAD_BYTES, Cut, Schedule
from qcollect.plan.stop import StopCause, read_stop, request_stop
from qcollect.vocab import RankInfo
from qcollect.worker.engine import CaptureEngine, EngineSettings
from qcollect.worker.frame import Frame, Moment, TakenCapture, Wanted, want_key
from qcollect.worker.packing import Packing
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.progress import ProgressReporter, append_metrics
from qcollect.worker.resume import Kept, keep, key_of
from qcollect.worker.saver import Observation, Saver, Source, fix_value
from qcollect.worker.shortfall import Place, Shortfall
from qcollect.worker.sites import Taps, install, unwrap
from qcollect.worker.staging import held_bytes
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
    packing: Packing = field(default_factory=Packing)
    by_iteration: bool = False
    is_planned: bool = False
    enabled: bool = True
    max_bytes: int | None = None
    device: RankDevice | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)


class Collector:
    """Quantizes a model's gemms and captures what the schedule wants, between ``__enter__`` and ``__exit__``.

    Call ``step`` once an optimizer step; it is true once every rank has its share or a stop was asked for.
    """

    def __init__(self, model: nn.Module, settings: CollectorSettings, vote_group: Any = None) -> None:
        self.model = unwrap(model)
        self.settings = settings
        self.rank = settings.rank
        self.seat = seat(settings.rank)
        self.cuts = settings.schedule.cuts[self.seat] if settings.enabled else ()
        self.saver = Saver(
            settings.run_dir,
            run_id=settings.run_id,
            by_iteration=settings.by_iteration,
            device=settings.device,
            durability=settings.engine.durability,
            packing=settings.packing,
        )
        self.engine: CaptureEngine | None = None
        self.paths = RunPaths(settings.run_dir.absolute())
        self.share = sum(cut.count for cut in self.cuts)
        # under the launcher a folder with captures is one whose run is resumed
        self.kept = keep(self.paths, self.rank.rank) if settings.is_planned else Kept.of(self.paths.run_dir, ())
        self._refuse_surplus()
        STATE.tracked.clear()  # what an earlier collector of this process tracked
        self.first_iteration, self._first_sample = STATE.iteration(), STATE.sample_idx()
        self.iteration = self.first_iteration
        self.micro_batch = -1
        self.frame: Frame | None = None
        self._num_sequences = 0
        self._num_taken = 0
        self._num_taken_before = 0
        self._num_bytes_taken = 0
        self._held: list[tuple[torch.Tensor, Observation, int, Source]] = []
        self._shortfall = Shortfall(
            rank=self.rank.rank,
            captures=settings.schedule.captures,
            next_position=max((cut.count for cut in self.cuts), default=0),
            is_planned=settings.is_planned,
        )
        self._is_stopped = False
        self._frames: list[Frame] = []
        self._moment: Moment = (self.iteration, self.micro_batch)
        self._taps = Taps()
        self._hooks: list[Any] = []
        self._step_started = time.monotonic()
        self._vote_group = vote_group
        device = next((str(p.device) for p in self.model.parameters()), "cpu")
        self.progress = ProgressReporter(
            paths=self.paths, rank=self.rank, share=self.share, device=device, enabled=self._leaves_files
        )

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        refuse_compiled(self.model)
        parameter = next(self.model.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            self.settings.policy.prepare(parameter.dtype)
        if not self.is_complete and self.settings.enabled:
            self._start_engine(torch.device("cpu") if parameter is None else parameter.device)
        self._taps = install(self.model, self.settings.policy, lambda: self.frame, lambda: self._moment)
        begin = torch.compiler.disable(self._begin_micro_batch)  # type: ignore[no-untyped-call]
        watch = torch.compiler.disable(self._watch_backward)  # type: ignore[no-untyped-call]
        self._hooks = [
            self.model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(watch),
        ]
        self._report_deduped()
        self.progress.update(state="training", captured=self.num_captured, force=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        self._taps.remove()
        self._frames.clear()
        self._finish_engine(raises=kind is None)
        if kind is None:
            if self.settings.is_planned and not self._is_stopped:
                self._announce_end()
            self.progress.update(state="done" if self._is_stopped else "left", force=True)
            self._report_shortfall()

    def _remove_hooks(self) -> None:
        self.frame = None
        while self._hooks:
            self._hooks.pop().remove()

    def _leave_capturing(self) -> None:
        """The target is reached: what only captures is taken off the model, what quantizes stays."""
        self._taps.remove_idle()
        if not self.settings.policy.is_stochastic:  # whose draws follow the micro-batch
            self._remove_hooks()

    def _start_engine(self, device: torch.device) -> None:
        self.engine = CaptureEngine(
            self.saver,
            self.settings.engine,
            device=device,
            needed_bytes=self._most_bytes_of_an_iteration(),
            num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    def _finish_engine(self, *, raises: bool) -> None:
        """Write what is taken; then neither threads nor memory are held any longer."""
        engine, self.engine = self.engine, None
        if engine is None:
            return
        engine.close()
        self._report_deduped()
        self.progress.update(
            captured=self._num_written, num_bytes=self.saver.num_bytes, waited_s=engine.waited_s, force=True
        )
        if engine.num_missing:
            warnings.warn(
                f"qcollect: rank {self.rank.rank}: {engine.num_missing} captures could not be written; the first: "
                f"{engine.first_missing}",
                stacklevel=4,
            )
        if raises:
            engine.check()

    def _most_bytes_of_an_iteration(self) -> int:
        """In host memory; 0: not known."""
        sizes = [capture.num_bytes for capture in self.settings.schedule.captures]
        if not all(sizes):
            return 0
        of_iteration: Counter[int] = Counter()
        for cut in self.cuts:
            of_iteration[cut.iteration] += sum(held_bytes(size) for size in sizes[: cut.count])
        return max(of_iteration.values(), default=0)

    def _refuse_surplus(self) -> None:
        if len(self.kept) > self.share and self.settings.enabled:
            raise CaptureError(
                f"rank {self.rank.rank}: {self.paths.manifest_path(self.rank.rank)} lists {len(self.kept)} captures, "
                f"and the rank's share is {self.share}; see 'qcollect verify {self.paths.run_dir}'"
            )

    def _announce_end(self) -> None:
        """This rank's training is over and nobody asked for it: the others are to end with it."""
        with suppress(OSError):
            request_stop(self.paths, StopCause.DATA_END)

    def _report_shortfall(self) -> None:
        """Where nobody else judges the run: nothing captured is an error, less than the share a warning."""
        num_iterations = self.iteration - self.first_iteration
        if self.settings.is_planned or self.is_complete or self._is_stopped or not num_iterations:
            return
        text = f"rank {self.rank.rank}: {self.num_captured} of {self.share} captures in {num_iterations} iteration(s)"
        if not self.num_captured:
            raise CaptureError(
                f"{text}; the model's own forward did not run in training mode (a compiled copy may have)"
            )
        warnings.warn(f"qcollect: {text}; train longer, or lower the target", stacklevel=3)

    # ---- micro-batches -------------------------------------------------------------------------

    def _begin_micro_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.model.training and torch.is_grad_enabled()):
            self.frame = None  # an evaluation pass: quantized, not recorded
            return
        self.micro_batch += 1
        self._moment = self.iteration, self.micro_batch
        if self._is_stopped:
            return
        if self.engine is not None:
            self.engine.forget()
        tokens = _tokens(args, kwargs)
        num_samples = tokens.shape[0] if tokens is not None and tokens.dim() > 1 else 1
        tracked_sample = self._first_sample + self._num_sequences * self.rank.world_size + self.seat * num_samples
        self._num_sequences += num_samples
        STATE.track(
            iteration=self.iteration,
            micro_batch=self.micro_batch,
            sample_idx=tracked_sample,
            sequence_idx=tracked_sample,
            batch_idx=tracked_sample // max(num_samples, 1),
            num_samples=num_samples,
        )
        self.progress.update(num_micro_batches=self.micro_batch + 1)
        wanted = self._wanted()
        if not wanted:
            self.frame = None
            return
        frame = Frame(
            iteration=self.iteration,
            micro_batch=self.micro_batch,
            sample_idx=STATE.sample_idx(),
            num_samples=num_samples,
            token_hash=_hash(tokens) if tokens is not None else None,
            wanted=wanted,
            sink=self._save,
            with_scales=self.settings.packing.needs_scales,
        )
        if self.kept:
            self._drop_kept(frame)
        self._frames.append(frame)
        self.frame = frame

    def _watch_backward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Backward may run forwards again, after those of other micro-batches: they are of this one."""
        frame, moment = self.frame, self._moment

        def enter(grad: torch.Tensor) -> None:
            if moment[0] == self.iteration:
                self.frame, self._moment = frame, moment

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]

    def _drop_kept(self, frame: Frame) -> None:
        for want, (_, planned) in list(frame.wanted.items()):
            if not self.kept.wants(key_of(planned, frame, self.rank.rank)):
                del frame.wanted[want]

    def _wanted(self) -> Wanted:
        wanted = {
            want_key(capture): (counter, capture)
            for cut in self._cuts_of_iteration()
            if cut.micro_batch == self.micro_batch
            for counter, capture in self._places(cut)
        }
        if self.micro_batch == 0:
            wanted |= self._shortfall.collect(scheduled=wanted)
        return wanted

    def _cuts_of_iteration(self) -> list[Cut]:
        # a schedule counts from the run's first iteration, TENSOR_SAVER_ITERATION may set another number for it
        return [cut for cut in self.cuts if cut.iteration == self.iteration - self.first_iteration]

    def _places(self, cut: Cut) -> list[Place]:
        captures = self.settings.schedule.captures[: cut.count]
        return [(cut.start + position, capture) for position, capture in enumerate(captures, start=1)]

    def _save(self, taken: TakenCapture) -> None:
        planned, frame = taken.planned, taken.frame
        key = key_of(planned, frame, self.rank.rank)
        if key in self.kept.to_compare:
            self.kept.compare(key, taken.tensor)
            self._submit_held()
            return
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
            block_scales=taken.block_scales,
            sharding=taken.sharding,
        )
        if self.kept.is_proven(frame.iteration):
            self._submit(taken.tensor, seen, taken.counter, Source.of(taken.tensor))
        else:  # the few that a killed run had not finished before the one that is compared
            self._held.append((fix_value(taken.tensor), seen, taken.counter, Source.of(taken.tensor)))

    def _submit_held(self) -> None:
        held, self._held = self._held, []
        for tensor, seen, counter, source in held:
            self._submit(tensor, seen, counter, source)

    def _submit(self, tensor: torch.Tensor, seen: Observation, counter: int, source: Source) -> None:
        assert self.engine is not None  # there is something to capture
        self.engine.submit(tensor, seen, counter, source=source)
        self._num_taken, self._num_bytes_taken = self.engine.num_taken, self.engine.num_bytes_taken
        self._report_deduped()
        self.progress.update(captured=self._num_written, num_bytes=self.saver.num_bytes)

    def _report_deduped(self) -> None:
        """With the next update of the progress, how many captures refer to others, and what that saved."""
        self.progress.num_deduped = self.kept.num_deduped + self.saver.num_deduped
        self.progress.deduped_bytes = self.kept.deduped_bytes + self.saver.deduped_bytes

    # ---- iterations ----------------------------------------------------------------------------

    @property
    def _leaves_files(self) -> bool:
        return self.settings.enabled or self.settings.is_planned

    @property
    def num_captured(self) -> int:
        """Captures taken; the last of them may not be on disk yet."""
        return len(self.kept) + self._num_taken

    @property
    def _num_written(self) -> int:
        return len(self.kept) + self.saver.num_saved

    @property
    def is_complete(self) -> bool:
        """Whether this rank has its share."""
        return self.num_captured >= self.share

    def step(self, **metrics: float) -> bool:
        """End an iteration; all ranks call it together.

        Args:
            metrics: of the iteration (``loss``, ``grad_norm``, ``num_tokens``, ``learning_rate``, ...), appended to
                ``metrics.jsonl`` by rank 0; ``num_tokens`` also as ``tokens_per_s``.

        Returns:
            True when training may end: every rank has its share, or a stop was asked for. The answer is
            the same on all ranks, and from then on nothing is captured. With saving off nothing is waited for, and
            training goes on.

        Raises:
            CaptureError: a planned capture did not come.
        """
        now = time.monotonic()
        duration_s, self._step_started = now - self._step_started, now
        if self.seat == 0 and metrics and self._leaves_files:
            self._write_metrics(metrics, duration_s)
        if self._is_stopped:
            self._advance(metrics.get("loss"))
            return True
        num_taken = self._num_taken - self._num_taken_before
        unstarted = [c for c in self._cuts_of_iteration() if c.micro_batch > self.micro_batch]
        self._shortfall.settle(
            self._frames,
            unstarted=[place for cut in unstarted for place in self._places(cut)],
            iteration=self.iteration,
            num_taken=num_taken,
        )
        self._num_taken_before = self._num_taken
        self._advance(metrics.get("loss"))
        if self.engine is not None:
            self.engine.forget()
            self.engine.check()
            if self.is_complete:  # the others may not be
                self._finish_engine(raises=True)
        stop = self._vote(stop=self.paths.stop_path.exists())
        if stop:
            self._is_stopped = True
            self._leave_capturing()
            self.progress.update(state="draining", force=True)
            self._finish_engine(raises=True)
        return stop

    def _advance(self, loss: float | None) -> None:
        self.iteration += 1
        self.micro_batch = -1
        self._moment = self.iteration, self.micro_batch
        self.frame = None
        for frame in self._frames:
            frame.wanted.clear()  # what a later backward gives was settled as missing
        self._frames.clear()
        STATE.track(iteration=self.iteration, micro_batch=0)
        self.progress.update(iteration=self.iteration, num_micro_batches=0, loss=loss)

    def _write_metrics(self, metrics: dict[str, float], duration_s: float) -> None:
        line: dict[str, Any] = {"iteration": self.iteration, **metrics, "time_s": duration_s}
        if "num_tokens" in metrics:
            line["tokens_per_s"] = metrics["num_tokens"] / duration_s if duration_s else None
        self.paths.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        append_metrics(self.paths, line)

    def _vote(self, *, stop: bool) -> bool:
        """Whether all ranks end now: one wants to or has, all have their share, or the next captures are too large."""
        is_unfinished = not (self.is_complete and self.settings.enabled)
        counts = torch.tensor([int(stop), int(is_unfinished), self._bytes_ahead()], dtype=torch.int64)
        if self._vote_group is not None:
            try:
                dist.all_reduce(counts, group=self._vote_group)
            except RuntimeError:
                if read_stop(self.paths) != StopCause.DATA_END:
                    raise
                return True  # a rank's training is over, and the rank gone
        num_asking, num_unfinished, bytes_ahead = counts.tolist()
        if num_asking or not num_unfinished:
            return True
        if self.settings.max_bytes is None or bytes_ahead <= self.settings.max_bytes:
            return False
        if self.seat == 0:
            request_stop(self.paths, StopCause.MAX_BYTES)
        return True

    def _bytes_ahead(self) -> int:
        """What this rank's files come to with the next iteration that captures."""
        sizes = [capture.num_bytes + FILE_OVERHEAD_BYTES for capture in self.settings.schedule.captures]
        ahead = [cut for cut in self.cuts if cut.iteration >= self.iteration - self.first_iteration]
        following = [cut for cut in ahead if cut.iteration == ahead[0].iteration]
        return self.kept.num_bytes + self._num_bytes_taken + sum(sum(sizes[: cut.count]) for cut in following)


def seat(rank: RankInfo) -> int:
    """This process's place among those that share the target; a process alone may well have a number above 0.

    Raises:
        UsageError: a rank beyond the world's size.
    """
    if rank.world_size == 1:
        return 0
    if rank.rank >= rank.world_size:
        raise UsageError(
            f"rank {rank.rank} ({rank.source}) is beyond WORLD_SIZE {rank.world_size}; set both or neither"
        )
    return rank.rank


def refuse_compiled(model: nn.Module) -> None:
    """Nothing, if neither the model nor a part of it is compiled.

    Raises:
        UsageError: it is; what was compiled before never calls what is put into the model afterwards.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"the model is compiled already ({name or type(module).__name__}) and its hooks would never fire; "
                "collect before torch.compile"
            )


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
