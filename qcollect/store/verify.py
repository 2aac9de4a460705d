"""Whether a run folder is what it says: every file whole and as it was written, listed once, and as planned.

Every finding is a line: where, what is wrong, what to do. ``repair`` does what can be done without taking a
capture again.
"""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Any

from qcollect.store.examine import RunFiles, examine_run, listed_records, manifest_rank, statistics_records
from qcollect.store.repair import Action, after_repair, find_repeats, repair_rank, repair_run
from qcollect.vocab import CaptureKey

__all__ = [
    "Action",
    "Finding",
    "Problem",
    "RunFiles",
    "after_repair",
    "count_planned",
    "describe_key",
    "examine_run",
    "judge",
    "repair_rank",
    "repair_run",
]


class Problem(StrEnum):
    """What can be wrong."""

    TORN = "torn"
    UNREADABLE = "unreadable"
    DIFFERENT = "different"  # its bytes are not those its line says
    UNLISTED = "unlisted"
    WRONG_LINE = "wrong_line"  # its bytes are, what the line says of them is not
    MISNAMED = "misnamed"
    DANGLING = "dangling"  # the file its tensor is in is gone, or another one
    REPEATED = "repeated"
    GONE = "gone"  # listed, and not there
    DAMAGED_LINE = "damaged_line"
    REPEATED_LINE = "repeated_line"
    MISPLACED_LINE = "misplaced_line"
    UNENDED_LINE = "unended_line"
    TEMPORARY = "temporary"
    MISSING = "missing"  # planned, and not there
    SURPLUS = "surplus"
    PLAN = "plan"  # it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: where, what, what to do."""

    path: Path
    problem: Problem
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path), "problem": str(self.problem)}


def judge(found: RunFiles, planned: Collection[CaptureKey] | None, *, is_active: bool = False) -> list[Finding]:
    """Everything that is wrong with a run folder, files first, then manifests, then the plan.

    Args:
        found: the folder, every file read.
        planned: the captures of the plan, their ``sample_idx`` 0 (which samples a rank sees is up to the
            training script); None: there is no plan.
        is_active: the run is going on, so what is not there yet, or not listed yet, is no finding.
    """
    return [
        *_judge_files(found, is_active),
        *_judge_repeats(found),
        *([] if is_active else _judge_leftovers(found)),
        *_judge_lines(found),
        *([] if planned is None else _judge_plan(found, planned, is_active)),
    ]


def _repair(found: RunFiles) -> str:
    return f"'qcollect verify {quote(str(found.paths.run_dir))} --repair'"


def _judge_files(found: RunFiles, is_active: bool) -> Iterator[Finding]:
    listed = listed_records(found.lines)
    moves = f"{_repair(found)} moves it to {found.paths.torn_dir}"
    # older captures in a folder of their own were never listed
    expects_lines = found.paths.state_dir.is_dir() and not is_active
    for file, report in found.files.items():
        path = found.paths.run_dir / file

        def of(problem: Problem, what: str, advice: str, path: Path = path) -> Finding:
            return Finding(path=path, problem=problem, what=what, advice=advice)

        if report.is_unreadable:
            yield of(Problem.UNREADABLE, str(report.problem), "make it readable, then verify again")
        elif report.is_torn:
            yield of(Problem.TORN, f"is torn or no capture ({report.problem})", moves)
        elif report.is_dangling:
            yield of(Problem.DANGLING, str(report.problem), f"{moves}; then 'qcollect run --resume' takes it again")
        elif report.problem is not None:
            yield of(Problem.DIFFERENT, f"is not the file that was written: it {report.problem}", moves)
        elif file not in listed:
            if report.key is not None and expects_lines:
                yield of(Problem.UNLISTED, "is whole and in no manifest", f"{_repair(found)} lists it")
        elif report.line is not None:
            what = "is not what its manifest line says it is"
            yield of(Problem.WRONG_LINE, what, f"{_repair(found)} writes the line anew from the file")
        if report.misnamed:
            what = f"its name disagrees with its metadata: {', '.join(report.misnamed)}"
            yield of(Problem.MISNAMED, what, "give it back its name, or move it away")


def _judge_repeats(found: RunFiles) -> Iterator[Finding]:
    for file, first in sorted(find_repeats(found).items()):
        yield Finding(
            path=found.paths.run_dir / file,
            problem=Problem.REPEATED,
            what=f"holds the same capture as {first}",
            advice=f"{_repair(found)} moves it to {found.paths.torn_dir}",
        )


def _judge_leftovers(found: RunFiles) -> Iterator[Finding]:
    for path in found.temporaries:
        what = "is a capture whose writer ended before it was whole"
        yield Finding(path=path, problem=Problem.TEMPORARY, what=what, advice=f"{_repair(found)} removes it")
    for path in found.tails:
        what = "its last line was not ended"
        yield Finding(path=path, problem=Problem.UNENDED_LINE, what=what, advice=f"{_repair(found)} drops that line")


def _judge_lines(found: RunFiles) -> Iterator[Finding]:
    seen: set[str] = set()
    first_of = statistics_records(found.lines)
    for line in found.lines:
        file, rank = (None, None) if line.record is None else (line.record.file, line.record.metadata.get("rank"))

        def of(problem: Problem, what: str, does: str, place: Path = line.place) -> Finding:
            return Finding(path=place, problem=problem, what=what, advice=f"{_repair(found)} {does}")

        if line.record is None:
            yield of(Problem.DAMAGED_LINE, f"is no manifest line ({line.problem})", "drops it and lists its file anew")
        elif file is None:
            if (key := line.record.key) is not None and first_of[key] is not line:
                yield of(Problem.REPEATED_LINE, f"lists the statistics of {describe_key(key)} once more", "drops it")
            elif rank != manifest_rank(line.manifest):
                yield of(Problem.MISPLACED_LINE, f"lists statistics of rank {rank}", "moves it")
        elif file in seen:
            yield of(Problem.REPEATED_LINE, f"lists {file} once more", "drops it")
        elif file not in found.files:
            yield of(
                Problem.GONE, f"lists {file}, which is gone", "drops it; then 'qcollect run --resume' takes it again"
            )
        elif isinstance(rank, int) and rank != manifest_rank(line.manifest):
            yield of(Problem.MISPLACED_LINE, f"lists {file}, which is rank {rank}'s", "moves it")
        seen |= set() if file is None else {file}


def _judge_plan(found: RunFiles, planned: Collection[CaptureKey], is_active: bool) -> Iterator[Finding]:
    held = {_without_sample(r.key): found.paths.run_dir / r.file for r in found.files.values() if r.key is not None}
    held |= {_without_sample(key): line.place for key, line in statistics_records(found.lines).items()}
    # what is listed and gone is a finding already
    listed = {key for line in found.lines if line.record and (key := _key(line.record.metadata)) is not None}
    for key in sorted(set(planned) - set(held) - listed, key=_order) if not is_active else ():
        yield Finding(
            path=found.paths.run_dir,
            problem=Problem.MISSING,
            what=f"is without {describe_key(key)}, which is planned",
            advice="'qcollect run --resume' takes it",
        )
    for key in sorted(set(held) - set(planned), key=_order):
        yield Finding(
            path=held[key],
            problem=Problem.SURPLUS,
            what=f"holds {describe_key(key)}, which is not planned",
            advice="move it away: it is no part of this run",
        )


def count_planned(found: RunFiles, planned: Collection[CaptureKey]) -> int:
    """How many of the planned captures are there whole."""
    keys = {_without_sample(r.key) for r in found.files.values() if r.key is not None and r.problem is None}
    keys |= {_without_sample(key) for key in statistics_records(found.lines)}
    return len(keys & set(planned))


def describe_key(key: CaptureKey) -> str:
    """``rank 0 iteration 0 micro-batch 0 model.layers.3.mlp.up_proj forward pre input (quantized for wgrad)``"""
    copy = f" (quantized for {key.gemm})" if key.gemm else ""
    place = f"rank {key.rank} iteration {key.iteration} micro-batch {key.micro_batch}"
    return f"{place} {key.module} {key.operation} {key.phase} {key.tensor_name}{copy}"


def _key(metadata: dict[str, Any]) -> CaptureKey | None:
    from qcollect.store.examine import key_of

    key = key_of(metadata)
    return None if key is None else _without_sample(key)


def _without_sample(key: CaptureKey) -> CaptureKey:
    return replace(key, sample_idx=0)


def _order(key: CaptureKey) -> tuple[Any, ...]:
    return (
        key.rank,
        key.iteration,
        key.micro_batch,
        key.module,
        key.operation,
        key.phase,
        key.tensor_name,
        str(key.gemm),
    )
