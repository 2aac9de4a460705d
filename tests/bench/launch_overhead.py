"""What a launch costs beyond its training: ``qcollect run`` against plain ``torchrun``, in alternating pairs.

    python tests/bench/launch_overhead.py
    python tests/bench/launch_overhead.py --quant bf16 --target 400 --set capture.iterations=0-19

One of a pair is ``qcollect run`` of the recipe ``tiny`` with two ranks until its target is on disk, the other the
same training under ``torchrun --standalone``: same recipe record, model, data, thread count and number of
iterations (as many as the run with capture trained), with neither number formats nor capture. Both are timed from
the start of the command to its end. A first pair is not counted; then the two take turns in going first. The
ratio of the medians holds everything that qcollect adds: looking at the model, planning, supervision, emulated
formats, capture. ``--quant bf16`` leaves the emulation out.

Of ``qcollect run``, the seconds from the last capture (the newest file's time) to the launcher's exit are told, too.
The bounds are told as met or not; the exit code depends on them with ``--check`` only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

NUM_RANKS = 2
MAX_RATIO = 1.3
MAX_END_S = 3.0
TIMEOUT_S = 900.0
BARE = "--bare"  # a rank of the training without qcollect


# ---------------------------------------------------------------------------------------------
# The training without qcollect (what it does not need is imported in the functions that do)
# ---------------------------------------------------------------------------------------------


def train_bare(plan_path: Path, num_iterations: int) -> None:
    """The training of ``recipes/train.py`` with a plan's recipe, and nothing attached to the model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
    import torch
    import torch.distributed as dist
    import train
    from train import Plan, build_model, make_batches

    plan = Plan.read(plan_path)
    recipe = plan.recipe
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    rank, world_size, device = train.init_ranks(plan.device)
    model = build_model(recipe.model, device=device)
    batches = make_batches(recipe, rank=rank, world_size=world_size, vocab_size=model.config.vocab_size)
    train.train(recipe, model, batches, world_size=world_size, num_iterations=num_iterations)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One ``qcollect run``: how long it took, how long after its last capture it ended, how far it trained."""

    seconds: float
    end_s: float
    num_iterations: int
    plan_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two commands, one after the other."""

    qcollect_s: float
    torchrun_s: float
    end_s: float

    @property
    def ratio(self) -> float:
        return self.qcollect_s / self.torchrun_s


def run_captured(folder: Path, arguments: argparse.Namespace) -> Captured:
    from kill_scenarios import last_capture_s, qcollect

    from qcollect.paths import RunPaths
    from qcollect.store.files import count_lines

    settings = [f"launch.device={arguments.device}", *arguments.settings]
    command = qcollect("run", arguments.quant, "--recipe", "tiny", "--nproc", str(NUM_RANKS), "--out", str(folder))
    command += ["--target", str(arguments.target), *(text for setting in settings for text in ("--set", setting))]
    seconds, ended_at = _time(command)
    paths = RunPaths(folder / arguments.quant)
    return Captured(
        seconds=seconds,
        end_s=ended_at - last_capture_s(paths),
        num_iterations=count_lines(paths.metrics_path),
        plan_path=paths.plan_path,
    )


def run_bare(captured: Captured) -> float:
    """Seconds of plain torchrun with the recipe and as many iterations as ``captured``."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    training = [__file__, BARE, str(captured.plan_path), str(captured.num_iterations)]
    planned = json.loads(captured.plan_path.read_bytes())["env"]
    same = {name: planned[name] for name in ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG") if name in planned}
    return _time([*torchrun, *training], env=same)[0]


def _time(command: Sequence[str], env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds from a command's start to its end, and when it ended (unix seconds).

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    started_s = time.monotonic()
    done = subprocess.run(
        command,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    seconds, ended_at = time.monotonic() - started_s, time.time()
    if done.returncode != 0:
        end = done.stdout.decode(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{end}")
    return seconds, ended_at


def measure(folder: Path, arguments: argparse.Namespace) -> list[Pair]:
    """The pairs that count; each is printed when it is there."""
    first = run_captured(folder / "first", arguments)
    run_bare(first)
    print(f"{first.num_iterations} iteration(s), {arguments.target} captures, {arguments.quant}, {NUM_RANKS} ranks")
    pairs = []
    for number in range(arguments.pairs):
        torchrun_s = run_bare(first) if number % 2 else None
        captured = run_captured(folder / f"pair{number}", arguments)
        assert captured.num_iterations == first.num_iterations, "the same run trains as far every time"
        if torchrun_s is None:
            torchrun_s = run_bare(first)
        pairs.append(Pair(qcollect_s=captured.seconds, torchrun_s=torchrun_s, end_s=captured.end_s))
        print_pair(number, pairs[-1])
    return pairs


# ---------------------------------------------------------------------------------------------
# Reporting
# ---------------------------------------------------------------------------------------------


def print_pair(number: int, pair: Pair) -> None:
    print(
        f"pair {number + 1}: qcollect run {pair.qcollect_s:.2f} s, torchrun {pair.torchrun_s:.2f} s, "
        f"ratio {pair.ratio:.2f}, last capture to exit {pair.end_s:.2f} s",
        flush=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The pairs in a few numbers; ``ratio`` is that of the medians."""

    qcollect_s: float
    torchrun_s: float
    ratio: float
    pair_ratios: tuple[float, ...]
    median_end_s: float
    worst_end_s: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Summary":
        qcollect_s, torchrun_s = (median(getattr(p, name) for p in pairs) for name in ("qcollect_s", "torchrun_s"))
        return cls(
            qcollect_s=qcollect_s,
            torchrun_s=torchrun_s,
            ratio=qcollect_s / torchrun_s,
            pair_ratios=tuple(pair.ratio for pair in pairs),
            median_end_s=median(pair.end_s for pair in pairs),
            worst_end_s=max(pair.end_s for pair in pairs),
        )

    @property
    def is_met(self) -> bool:
        return self.ratio <= MAX_RATIO and self.worst_end_s <= MAX_END_S

    def print(self) -> None:
        ratios = " ".join(f"{ratio:.2f}" for ratio in self.pair_ratios)
        print(f"qcollect run          median {self.qcollect_s:.2f} s")
        print(f"torchrun              median {self.torchrun_s:.2f} s")
        print(f"ratio of the medians  {self.ratio:.2f} (bound {MAX_RATIO:g}: {_met(self.ratio <= MAX_RATIO)})")
        print(f"ratio of each pair    {ratios}")
        print(
            f"last capture to exit  median {self.median_end_s:.2f} s, worst {self.worst_end_s:.2f} s "
            f"(bound {MAX_END_S:g} s: {_met(self.worst_end_s <= MAX_END_S)})"
        )


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs that count (default 5)")
    parser.add_argument("--quant", metavar="TYPE", default="mxfp8", help="quant type (default mxfp8)")
    parser.add_argument("--target", type=int, default=50, metavar="N", help="captures, summed over ranks (default 50)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu is gloo, cuda NCCL")
    parser.add_argument(
        "--set", dest="settings", metavar="KEY=VALUE", action="append", default=[], help="of the recipe"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the pairs and the summary")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is not met")
    return parser.parse_args()


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="qcollect-overhead-") as folder:
        pairs = measure(Path(folder), arguments)
    summary = Summary.of(pairs)
    summary.print()
    if arguments.json:
        result = {"pairs": [asdict(pair) for pair in pairs], "summary": asdict(summary)}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(arguments.check and not summary.is_met)


if __name__ == "__main__":
    if sys.argv[1:2] == [BARE]:
        train_bare(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
