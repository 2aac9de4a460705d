# ruff: noqa: E402
"""Whether a long training that captures now and then grows: memory, threads, file handles, device memory.

    python tests/bench/soak.py                                  10,000 iterations, some ten minutes
    python tests/bench/soak.py --iterations 1000 --json FILE    a short form
    python tests/bench/soak.py --device cuda

The model of the recipe ``tiny`` trains on random tokens inside ``collect``. Every tenth iteration captures 26
tensors of its first layer, the only one that is quantized, and the files are removed as they come. Shown is what
there is from ``--mark`` (500, or a fifth of the iterations if that is less) and up to the end, over ten samples,
one every tenth iteration: the median of the resident set, which may be 5 % larger at the end, and the largest of the
rest, which may not grow. Every capture must be listed. The exit code is 1 if it is not so.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("RANK", "0")

import psutil
import torch

import qcollect
from qcollect.paths import RunPaths
from qcollect.recipe.load import load_recipe
from qcollect.store.files import count_lines
from qcollect.worker.model import build_model

EVERY = 10
WINDOW = 10  # samples
SITES: dict[str, Any] = {"layers": [0], "modules": ["*.self_attn", "*.q_proj", "*.up_proj", "*.down_proj"]}
NUM_CAPTURES = 8 + 3 * 6
LIMITS = {"rss_bytes": 1.05, "num_threads": 1.0, "num_handles": 1.0, "device_bytes": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the process holds after an iteration."""

    iteration: int
    rss_bytes: int
    num_threads: int  # of Python and of others
    num_handles: int
    device_bytes: int


def least_handles(process: psutil.Process) -> int:
    """The fewest of a second: while a writer is at a file that is one more."""
    found = []
    for _ in range(100):
        found.append(process.num_fds())
        time.sleep(0.01)
    return min(found)


def sample(process: psutil.Process, iteration: int, device: str) -> Sample:
    return Sample(
        iteration=iteration,
        rss_bytes=process.memory_info().rss,
        num_threads=process.num_threads(),
        num_handles=least_handles(process),
        device_bytes=torch.cuda.memory_reserved() if device == "cuda" else 0,
    )


def soak(folder: Path, arguments: argparse.Namespace) -> tuple[list[Sample], int]:
    """The samples, and how many captures are listed in the end."""
    recipe = load_recipe("tiny")
    model = build_model(recipe.model, device=arguments.device)
    shape = (1, arguments.tokens)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    process, samples, paths = psutil.Process(), list[Sample](), RunPaths(folder / "run")
    target = NUM_CAPTURES * len(range(0, arguments.iterations, EVERY))
    collector = qcollect.collect(
        model,
        quant_type=arguments.quant_type,
        out_dir=paths.run_dir,
        target=target,
        iterations=f"every:{EVERY}",
        num_iterations=arguments.iterations,
        exclude=["model.layers.[1-9]*"],
        **SITES,
    )
    started_s = time.monotonic()
    with collector as run:
        for iteration in range(arguments.iterations):
            tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator).to(arguments.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=float(loss.detach()))
            remove_captures(paths.run_dir)
            if iteration % EVERY == EVERY - 1:
                samples.append(sample(process, iteration + 1, arguments.device))
            if (iteration + 1) % max(arguments.iterations // 20, EVERY) == 0:
                print(f"{time.monotonic() - started_s:6.0f} s  {text_of(samples[-1])}", file=sys.stderr, flush=True)
    remove_captures(paths.run_dir)
    gc.collect()
    print(f"after the exit: {text_of(sample(process, arguments.iterations, arguments.device))}", file=sys.stderr)
    print(f"Python's threads: {', '.join(thread.name for thread in threading.enumerate())}", file=sys.stderr)
    num_lines = count_lines(paths.manifest_path(0))
    return samples, num_lines


def remove_captures(folder: Path) -> None:
    """Whole ones; what is being written has a name that this does not match."""
    for path in folder.glob("*.pt"):
        path.unlink()


def text_of(found: Sample) -> str:
    return (
        f"iteration {found.iteration:6}: {found.rss_bytes / 2**20:8.1f} MiB resident, {found.num_threads} threads, "
        f"{found.num_handles} handles, {found.device_bytes / 2**20:.1f} MiB on the device"
    )


def compare(samples: Sequence[Sample], mark: int) -> dict[str, dict[str, float]]:
    """By field, what it is after ``mark`` iterations and at the end, and their ratio."""
    before = [each for each in samples if each.iteration >= mark][:WINDOW]
    after = samples[-WINDOW:]
    rows = {}
    for field in LIMITS:
        # a thread that comes and goes is in some samples and not in others
        reduce = statistics.median if field == "rss_bytes" else max
        first, last = (reduce(getattr(each, field) for each in window) for window in (before, after))
        rows[field] = {"mark": first, "end": last, "ratio": last / first if first else 1.0 + last}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--mark", type=int, help="iterations after which the first look is taken")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="an iteration")
    parser.add_argument("--quant-type", default="mxfp8")
    parser.add_argument("--dir", type=Path, help="a folder of the disk to write to (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    mark = min(500, arguments.iterations // 5) if arguments.mark is None else arguments.mark
    with tempfile.TemporaryDirectory(prefix="qcollect-soak-", dir=arguments.dir) as folder, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        samples, num_lines = soak(Path(folder), arguments)
    rows = compare(samples, mark)
    num_expected = NUM_CAPTURES * len(range(0, arguments.iterations, EVERY))
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.iterations} iterations, {num_lines} captures")
    for field, row in rows.items():
        limit = LIMITS[field]
        verdict = "ok" if row["ratio"] <= limit else "GREW"
        print(
            f"{field:14} {row['mark']:15,.0f} at {mark}  {row['end']:15,.0f} at the end  "
            f"{row['ratio']:.3f} (at most {limit})  {verdict}"
        )
    if num_lines != num_expected:
        print(f"the manifest has {num_lines} lines, and {num_expected} captures were asked for")
    if arguments.json:
        facts = {
            "torch": torch.__version__,
            "device": arguments.device,
            "iterations": arguments.iterations,
            "mark": mark,
        }
        facts |= {"rows": rows, "limits": LIMITS, "lines": num_lines, "samples": [asdict(each) for each in samples]}
        arguments.json.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return int(num_lines != num_expected or any(row["ratio"] > LIMITS[field] for field, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
