"""The collector: taps on a model, a schedule, a saver, and a vote of the ranks when to stop."""

import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from qcollect.errors import CaptureError, UsageError
from qcollect.formats.checks import DTYPES
from qcollect.paths import RunPaths
from qcollect.plan.devices import RankDevice
from qcollect.plan.schedule import Cut, Schedule
from qcollect.plan.stop import StopCause, request_stop
from qcollect.plan.trigger import TriggerEvent
from qcollect.recipe.records import TriggerSpec
from qcollect.store.summary_compiled import prepare as prepare_summary
from qcollect.vocab import RankInfo
from qcollect.worker.engine import EngineSettings
from qcollect.worker.frame import Frame, Moment, Wanted, want_key
from qcollect.worker.garbage import Frozen
from qcollect.worker.measured_sites import Shadows
from qcollect.worker.packing import Packing
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.progress import ProgressReporter, append_metrics
from qcollect.worker.resume import Kept, keep, key_of
from qcollect.worker.saver import Saver, plain_value
from qcollect.worker.sharding import local_of
from qcollect.worker.shortfall import Place, Shortfall
from qcollect.worker.sink import Observer, Sink
from qcollect.worker.sites import Taps, install, linear_widths, unwrap
from qcollect.worker.staging import held_bytes
from qcollect.worker.start import Start
from qcollect.worker.state import STATE
from qcollect.worker.statistics import StatisticsSink
from qcollect.worker.tensors import TensorSink
from qcollect.worker.vote import Ballot, Vote


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
    trigger: TriggerSpec | None = None
    shadows: Shadows = field(default_factory=dict)


class Collector:
    """Quantizes a model's gemms and captures what the schedule wants, between ``__enter__`` and ``__exit__``.

    Call ``step`` once an optimizer step; it is true once every rank has its share or a stop was asked for.
    With a trigger the schedule begins in the iteration after the one that gives it, on all ranks; until then
    nothing is captured.
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
        self.paths = RunPaths(settings.run_dir.absolute())
        self.share = sum(cut.count for cut in self.cuts)
        self._keys = [want_key(capture) for capture in settings.schedule.captures]
        self._cuts_by_iteration: dict[int, list[Cut]] = {}
        for cut in self.cuts:
            self._cuts_by_iteration.setdefault(cut.iteration, []).append(cut)
        # under the launcher a folder with captures is one whose run is resumed
        self.kept = keep(self.paths, self.rank.rank) if settings.is_planned else Kept.of(self.paths.run_dir, ())
        self._refuse_surplus()
        self.sink = self._make_sink()
        STATE.tracked.clear()  # what an earlier collector of this process tracked
        self.first_iteration, self._first_sample = STATE.iteration(), STATE.sample_idx()
        self.iteration = self.first_iteration
        self.start = Start(
            settings.trigger if settings.enabled else None,
            self.paths,
            rank=self.rank.rank,
            first_iteration=self.first_iteration,
            is_planned=settings.is_planned,
            has_captures=bool(self.kept),
        )
        self.micro_batch = -1
        self.frame: Frame | None = None
        self._num_sequences = 0
        self._num_taken_before = 0
        self._shortfall = Shortfall(
            rank=self.rank.rank,
            captures=settings.schedule.captures,
            next_position=max((cut.count for cut in self.cuts), default=0),
            is_planned=settings.is_planned,
            replaces=settings.schedule.leaves_files,
        )
        self._is_stopped = False
        self._frames: list[Frame] = []
        self._moment: Moment = (self.iteration, self.micro_batch)
        self._taps = Taps()
        self._frozen = Frozen()
        self._hooks: list[Any] = []
        self._step_started = time.monotonic()
        self._vote = Vote(vote_group, self.paths, is_first=self.seat == 0, max_bytes=settings.max_bytes)
        device = next((str(p.device) for p in self.model.parameters()), "cpu")
        self.progress = ProgressReporter(
            paths=self.paths, rank=self.rank, share=self.share, device=device, enabled=self._leaves_files
        )

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        refuse_compiled(self.model)
        self.start.__enter__()
        self._prepare()
        self._taps = install(self.model, self.settings.policy, lambda: self.frame, lambda: self._moment)
        begin = torch.compiler.disable(self._begin_micro_batch)  # type: ignore[no-untyped-call]
        watch = torch.compiler.disable(self._watch_backward)  # type: ignore[no-untyped-call]
        self._hooks = [
            self.model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(watch),
        ]
        self._report_deduped()
        self.progress.update(state="training", captured=self.num_captured, trigger=self.start.report(), force=True)
        if self.sink.is_open:
            self._frozen.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.start.__exit__(kind, error, trace)
        self._remove_hooks()
        self._taps.remove()
        self._frames.clear()
        self._finish_sink(raises=kind is None)
        if kind is None:
            if self.settings.is_planned and not self._is_stopped:
                self._announce_end()
            self.progress.update(state="done" if self._is_stopped else "left", force=True)
            self._report_shortfall()

    def _prepare(self) -> None:
        """Compile what is known to be needed, and open the sink; its memory and processes take a while to be there."""
        policy, parameters = self.settings.policy, list(self.model.parameters())
        device = parameters[0].device if parameters else torch.device("cpu")
        if parameters and device.type == "cpu":
            policy.prepare(parameters[0].dtype)
            prepare_summary()
        if self.is_complete or not self.settings.enabled:
            return
        dtypes = [dtype for dtype in dict.fromkeys(parameter.dtype for parameter in parameters) if dtype in DTYPES]
        self.sink.open(device, dtypes)
        if device.type == "cuda" and self.sink.describes_consumers:
            policy.prepare_counts(device, dtypes, linear_widths(self.model))

    def _remove_hooks(self) -> None:
        self.frame = None
        while self._hooks:
            self._hooks.pop().remove()

    def _leave_capturing(self) -> None:
        """The target is reached: what only captures is taken off the model, what quantizes stays."""
        self._taps.remove_idle()
        if not self.settings.policy.is_stochastic:  # whose draws follow the micro-batch
            self._remove_hooks()

    def _make_sink(self) -> Sink:
        settings, schedule = self.settings, self.settings.schedule
        observer = Observer(
            quant_type=settings.quant_type,
            rank=self.rank,
            loss_scale=settings.loss_scale,
            trigger=lambda: None if self.start.event is None else self.start.event.to_dict(),
        )
        common = (self.saver, settings.engine, observer, self.kept)
        if schedule.leaves_files:
            needed_bytes = self._most_bytes_of_an_iteration()
            return TensorSink(*common, needed_bytes=needed_bytes, on_written=self._tell_progress)
        return StatisticsSink(
            *common, captures=schedule.captures, shadows=settings.shadows, on_written=self._tell_progress
        )

    def _tell_progress(self) -> None:
        self._report_deduped()
        self.progress.update(captured=self._num_written, num_bytes=self.sink.counts.num_bytes)

    def _finish_sink(self, *, raises: bool) -> None:
        """Write what is taken; then neither threads nor memory are held any longer."""
        self._frozen.thaw()
        sink = self.sink
        if not sink.is_open:
            return
        sink.close()
        self._report_deduped()
        self.progress.update(
            captured=self._num_written, num_bytes=sink.counts.num_bytes, waited_s=sink.waited_s, force=True
        )
        if sink.counts.num_missing:
            warnings.warn(
                f"qcollect: rank {self.rank.rank}: {sink.counts.num_missing} captures could not be written; the first: "
                f"{sink.counts.first_missing}",
                stacklevel=4,
            )
        if raises:
            sink.check()

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
        if self.settings.is_planned or self.is_complete or self._is_stopped:
            return
        num_iterations = self.iteration - self.first_iteration
        if not num_iterations:
            return
        if self.start.iteration is None or self.iteration == self.start.iteration:
            text = f"rank {self.rank.rank}: training ended before it was captured: {self.start.describe()}"
            warnings.warn(f"qcollect: {text}", stacklevel=3)
            return
        text = f"rank {self.rank.rank}: {self.num_captured} of {self.share} captures in {num_iterations} iteration(s)"
        if not self.num_captured:
            raise CaptureError(
                f"{text}; the model's own forward did not run in training mode (a compiled copy may have)"
            )
        if self.settings.schedule.leaves_files:
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
        self.sink.forget()
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
            wanted=wanted,
            taker=self.sink,
        )
        if self.kept:
            self._drop_kept(frame)
        self.sink.begin(frame, None if tokens is None else plain_value(local_of(tokens)))
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
        wanted: Wanted = {}
        for cut in self._cuts_of_iteration():
            if cut.micro_batch == self.micro_batch:
                wanted.update(zip(self._keys, self._places(cut), strict=False))
        if self.micro_batch == 0:
            wanted |= self._shortfall.collect(scheduled=wanted)
        return wanted

    def _cuts_of_iteration(self) -> list[Cut]:
        # a schedule counts from the run's first iteration (TENSOR_SAVER_ITERATION may set another number for it), or
        # from the first after the trigger
        start = self.start.iteration
        return [] if start is None else self._cuts_by_iteration.get(self.iteration - start, [])

    def _places(self, cut: Cut) -> list[Place]:
        return list(enumerate(self.settings.schedule.captures[: cut.count], start=cut.start + 1))

    def _report_deduped(self) -> None:
        """With the next update of the progress, how many captures refer to others, and what that saved."""
        self.progress.num_deduped = self.kept.num_deduped + self.sink.counts.num_deduped
        self.progress.deduped_bytes = self.kept.deduped_bytes + self.sink.counts.deduped_bytes

    # ---- iterations ----------------------------------------------------------------------------

    @property
    def _leaves_files(self) -> bool:
        return self.settings.enabled or self.settings.is_planned

    @property
    def num_captured(self) -> int:
        """Captures taken; the last of them may not be on disk yet."""
        return len(self.kept) + self.sink.counts.num_taken

    @property
    def _num_written(self) -> int:
        return len(self.kept) + self.sink.counts.num_written

    @property
    def is_complete(self) -> bool:
        """Whether this rank has its share."""
        return self.num_captured >= self.share

    def step(self, **metrics: float) -> bool:
        """End an iteration; all ranks call it together.

        Args:
            metrics: of the iteration (``loss``, ``grad_norm``, ``num_tokens``, ``learning_rate``, ...), appended to
                ``metrics.jsonl`` by rank 0; ``num_tokens`` also as ``tokens_per_s``. A trigger looks at ``loss`` and
                ``grad_norm`` of every rank.

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
        num_taken = self.sink.counts.num_taken - self._num_taken_before
        unstarted = [c for c in self._cuts_of_iteration() if c.micro_batch > self.micro_batch]
        self.share -= self._shortfall.settle(
            self._frames,
            unstarted=[place for cut in unstarted for place in self._places(cut)],
            iteration=self.iteration,
            num_taken=num_taken,
        )
        self._num_taken_before = self.sink.counts.num_taken
        event = self.start.observe(self.iteration, metrics)
        self._advance(metrics.get("loss"))
        if self.sink.is_open:
            self.sink.end_iteration()
            self.sink.check()
            if self.is_complete:  # the others may not be
                self._finish_sink(raises=True)
        decision = self._vote.decide(self._ballot(event))
        if decision.event is not None:
            self.start.begin(decision.event)
            self.progress.update(trigger=None, force=True)
        if decision.ends:
            self._is_stopped = True
            self._leave_capturing()
            self.progress.update(state="draining", force=True)
            self._finish_sink(raises=True)
        return decision.ends

    def _advance(self, loss: float | None) -> None:
        self.iteration += 1
        self.micro_batch = -1
        self._moment = self.iteration, self.micro_batch
        self.frame = None
        for frame in self._frames:
            frame.wanted.clear()  # what a later backward gives was settled as missing
        self._frames.clear()
        STATE.track(iteration=self.iteration, micro_batch=0)
        self.progress.update(iteration=self.iteration, num_micro_batches=0, loss=loss, trigger=self.start.report())

    def _write_metrics(self, metrics: dict[str, float], duration_s: float) -> None:
        line: dict[str, Any] = {"iteration": self.iteration, **metrics, "time_s": duration_s}
        if "num_tokens" in metrics:
            line["tokens_per_s"] = metrics["num_tokens"] / duration_s if duration_s else None
        self.paths.metrics_path.parent.mkdir(parents=True, exist_ok=True)
        append_metrics(self.paths, line)

    def _ballot(self, event: TriggerEvent | None) -> Ballot:
        return Ballot(
            asks_to_stop=self.paths.stop_path.exists(),
            is_unfinished=not (self.is_complete and self.settings.enabled),
            bytes_ahead=self._bytes_ahead(),
            event=event,
        )

    def _bytes_ahead(self) -> int:
        """What this rank's files come to with the next iteration that captures."""
        sizes = self.settings.schedule.sizes
        num_over = 0 if self.start.iteration is None else self.iteration - self.start.iteration
        ahead = [cut for cut in self.cuts if cut.iteration >= num_over]
        following = [cut for cut in ahead if cut.iteration == ahead[0].iteration]
        return (
            self.kept.num_bytes + self.sink.counts.num_bytes_taken + sum(sum(sizes[: cut.count]) for cut in following)
        )


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


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    named = kwargs.get("input_ids")
    candidates = [named, *args, *kwargs.values()]
    return next((value for value in candidates if isinstance(value, torch.Tensor)), None)
