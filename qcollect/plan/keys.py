"""The captures a schedule asks for, by the identity they have once they are taken."""

from collections.abc import Iterator

from qcollect.plan.schedule import PlannedCapture, Schedule
from qcollect.vocab import CaptureKey, Values


def planned_keys(schedule: Schedule, *, start: int = 0) -> frozenset[CaptureKey]:
    """Every capture of a schedule. ``sample_idx`` is 0 in all: which samples a rank sees is up to the script.

    Args:
        start: the iteration the schedule counts from.
    """
    return frozenset(_keys(schedule, start))


def _keys(schedule: Schedule, start: int) -> Iterator[CaptureKey]:
    for rank, cuts in enumerate(schedule.cuts):
        for cut in cuts:
            for capture in schedule.captures[: cut.count]:
                yield _key(capture, rank, start + cut.iteration, cut.micro_batch)


def _key(capture: PlannedCapture, rank: int, iteration: int, micro_batch: int) -> CaptureKey:
    return CaptureKey(
        rank=rank,
        iteration=iteration,
        micro_batch=micro_batch,
        sample_idx=0,
        module=capture.module,
        operation=str(capture.operation),
        phase=str(capture.phase),
        tensor_name=capture.tensor_name,
        gemm=None if capture.gemm is None or capture.values != Values.QUANTIZED else str(capture.gemm),
        values=str(capture.values),
    )
