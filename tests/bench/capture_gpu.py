# ruff: noqa: E402
"""What capture costs on one CUDA device, and whether it alters or loses anything, in Llama-3.2-1B's shape.

    python tests/bench/capture_gpu.py [--json FILE]              every part, some three minutes
    python tests/bench/capture_gpu.py --parts capture idle
    python tests/bench/capture_gpu.py --device cpu --recipe tiny --overwrites 8 --pairs 10    only to try the script

Parts:

    capture    all captures of one iteration of 1 x 2048 tokens (800, 9.6 GiB): ``returned`` and ``held``, how long
               the training waits, until ``step`` has returned and until the device is done too, each less a
               quantized iteration that captures nothing (``quiet``); ``closed``, from the iteration's begin until
               every file is closed; the most device memory, resident set and pinned memory, more than with
               quantization alone; ``first_held``, of the process's first captured iteration, which is in no median.
               Beside it the floors: as many files of the same sizes written by 8 threads from buffers of their own,
               and the rate of copies to pinned memory
    idle       iterations of ``collect`` that want nothing, against a copy of the model that has the same quantizing
               taps and nothing else of ``collect``: interleaved pairs, the models change places half way; the median
               ratio and its bootstrap interval (95 %)
    overwrite  a tensor of 64 MiB is filled with its number, captured and filled with -1 at once, on the current
               stream, on another, and freed instead so that another tensor gets its memory: file i must hold i
    identical  in deterministic mode, training under ``bf16`` with every tensor captured against training without
               qcollect: the bits of losses and weights

The captured iteration begins ten seconds after ``collect`` at the earliest: captures wait for the processes that
write. Files go into the page cache, here and for the floor: nothing waits for the disk. Each finds the memory of as
many files that were written before and are removed right before what is timed: the host of a virtual machine takes
memory that was free for a second back, and finding it anew takes several times as long as filling it. The exit code
is 1 if a file holds something else or bits differ, never because of a time.
"""

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("RANK", "0")

import psutil
import torch
from pairs import Pair, summarize_pairs, take_pairs
from room import make_room
from torch import nn

import qcollect
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import QuantSpec
from qcollect.vocab import RankInfo
from qcollect.worker.engine import CaptureEngine, EngineSettings
from qcollect.worker.model import build_model
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.saver import Observation, Saver
from qcollect.worker.sites import install

CAPTURES_A_LAYER = 50
NUM_QUIET = 3  # iterations before the captured one that want nothing
WRITERS_START_S = 10.0  # until the processes that write are there, at most; captures before that wait for them
NUM_WRITERS = 8
SIDE = 4096  # 4096 x 4096 float32 are 64 MiB
COPY_BYTES, NUM_COPIES = 1 << 28, 8
WAYS = ("current stream", "side stream", "freed")

# Prints the largest resident set of a process until its own input ends; in a process of its own, so that the
# one that is watched does not wait for it.
WATCH = """
import select, sys, psutil
process, peak = psutil.Process(int(sys.argv[1])), 0
print(flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    peak = max(peak, process.memory_info().rss)
print(peak)
"""


class OneLinear(nn.Module):
    """A linear in a module whose first input is small: that one is hashed by whoever captures."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, 1, bias=False, device=device)

    def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output


class Bench:
    """The model, its tokens, and what all parts need."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        recipe = load_recipe(arguments.recipe)
        self.arguments, self.folder = arguments, folder
        self.device, self.quant_type = arguments.device, arguments.quant_type
        self.is_cuda = self.device == "cuda"
        self.model: Any = build_model(recipe.model, device=self.device, dtype=torch.bfloat16)
        config: Any = self.model.config
        self.target = CAPTURES_A_LAYER * config.num_hidden_layers
        shape = (1, recipe.data.sequence_length)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(self.device)

    def iterate(self, model: Any) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss: torch.Tensor = model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        return loss.detach()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def collect(self, model: nn.Module, out_dir: Path, **settings: Any) -> Any:
        return qcollect.collect(model, **{"quant_type": self.quant_type, "out_dir": out_dir, **settings})

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds until ``work`` has returned, and until the device is done too."""
        self.synchronize()
        start_s = time.perf_counter()
        work()
        returned_s = time.perf_counter() - start_s
        self.synchronize()
        return returned_s, time.perf_counter() - start_s


# ---------------------------------------------------------------------------------------------
# Part: capture, and its floors
# ---------------------------------------------------------------------------------------------


def run_capture(bench: Bench) -> dict[str, Any]:
    # then kernels are compiled, and memory is there
    first, _ = capture_once(bench, "first")
    device_bytes = quantized_device_bytes(bench)
    rows, sizes = [], list[int]()
    for number in range(bench.arguments.repeats):
        row, sizes = capture_once(bench, f"capture{number}")
        row["extra_device_bytes"] = row.pop("device_bytes") - device_bytes
        rows.append(row)
        text = ", ".join(f"{name} {1e3 * row[name]:.1f} ms" for name in ("quiet_s", "held_s", "closed_s"))
        print(f"  {text}", flush=True)
    write_s = [write_floor(bench.folder, sizes) for _ in range(bench.arguments.repeats)]
    median = {name: statistics.median_low([row[name] for row in rows]) for name in rows[0]}
    facts = {"num_files": len(sizes), "num_bytes": sum(sizes), "write_floor_s": statistics.median(write_s), **median}
    facts["first_held_s"] = first["held_s"]
    if bench.is_cuda:
        facts["d2h_gb_per_s"] = d2h_floor() / 1e9
        facts["d2h_floor_s"] = facts["num_bytes"] / facts["d2h_gb_per_s"] / 1e9
        facts["held / d2h floor"] = median["held_s"] / facts["d2h_floor_s"]
    facts["closed / write floor"] = median["closed_s"] / facts["write_floor_s"]
    facts["held / quiet"] = median["held_s"] / median["quiet_s"]
    return facts | {"rows": rows, "write_floors_s": write_s}


def quantized_device_bytes(bench: Bench) -> int:
    """The most device memory of an iteration that is quantized, without ``collect``."""
    taps = install(bench.model, QuantPolicy.from_spec(QuantSpec(type=bench.quant_type)), lambda: None)
    try:
        bench.iterate(bench.model)
        reset_peaks(bench)
        bench.time(lambda: bench.iterate(bench.model))
        return peak_device_bytes(bench)
    finally:
        taps.remove()


def capture_once(bench: Bench, name: str) -> tuple[dict[str, float], list[int]]:
    """Times and memory of one captured iteration, and the sizes of its files, which stay until others are written."""
    out_dir, stale, target = bench.folder / name, bench.folder / "stale", bench.target
    # the next iteration has captures, too: the end of a run waits for all files, an iteration on the way does not
    iterations = [NUM_QUIET, NUM_QUIET + 1]
    settings = {"iterations": iterations, "num_iterations": NUM_QUIET + 2, "target": 2 * target}
    os.sync()  # what was written before is not to be written back meanwhile
    rss_bytes = psutil.Process().memory_info().rss
    reset_peaks(bench)
    with watched_rss() as peak:
        entering_s = time.perf_counter()
        with bench.collect(bench.model, out_dir, host_memory_gb=bench.arguments.host_memory_gb, **settings) as run:
            enter_s = time.perf_counter() - entering_s

            def work() -> None:
                bench.iterate(bench.model)
                run.step()

            quiet = [bench.time(work) for _ in range(NUM_QUIET)]
            if bench.is_cuda:
                time.sleep(max(WRITERS_START_S - (time.perf_counter() - entering_s), 0.0))
            make_room(stale)
            start_s = time.perf_counter()
            returned_s, done_s = bench.time(work)
            while len(files := [path for path in os.listdir(out_dir) if path.endswith(".pt")]) < target:
                time.sleep(0.001)
            closed_s = time.perf_counter() - start_s
            sizes = [(out_dir / file).stat().st_size for file in sorted(files)]
            work()
    assert len(sizes) == target, f"{len(sizes)} files"
    out_dir.rename(stale)
    quiet_returned_s, quiet_s = (statistics.median(times) for times in zip(*quiet, strict=True))
    row = {
        "enter_s": enter_s,
        "quiet_s": quiet_s,
        "returned_s": returned_s - quiet_returned_s,
        "held_s": done_s - quiet_s,
        "closed_s": closed_s,
        "device_bytes": peak_device_bytes(bench),
        "extra_rss_bytes": peak[0] - rss_bytes,
        "pinned_bytes": pinned_bytes(bench),
    }
    return row, sizes


@contextmanager
def watched_rss() -> Iterator[list[int]]:
    """A list that has the largest resident set of this process once the context is left."""
    found: list[int] = []
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield found
        process.stdin.close()
        found.append(int(process.stdout.read()))


def reset_peaks(bench: Bench) -> None:
    if bench.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
            torch.cuda.reset_peak_host_memory_stats()


def peak_device_bytes(bench: Bench) -> int:
    return torch.cuda.max_memory_allocated() if bench.is_cuda else 0


def pinned_bytes(bench: Bench) -> int:
    """The most that torch's own allocator of pinned memory has held; other pinned pages may count as resident."""
    stats = torch.cuda.host_memory_stats() if bench.is_cuda and hasattr(torch.cuda, "host_memory_stats") else {}
    return int(stats.get("allocated_bytes.peak", 0))


def write_floor(folder: Path, sizes: Sequence[int]) -> float:
    """Seconds in which threads write files of these sizes, each from a buffer of its own."""
    out_dir = folder / "stale"  # of the same sizes, whoever wrote them
    source = torch.randint(0, 256, (max(sizes),), dtype=torch.uint8)
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        buffers = list(pool.map(lambda size: source[:size].clone().numpy(), sizes))

        def write(number: int) -> None:
            with (out_dir / f"{number:06d}.pt").open("xb", buffering=0) as file:
                view = memoryview(buffers[number])
                while view:
                    view = view[file.write(view) :]

        make_room(out_dir)
        out_dir.mkdir()
        start_s = time.perf_counter()
        list(pool.map(write, range(len(sizes))))
        return time.perf_counter() - start_s


def d2h_floor() -> float:
    """Bytes a second from device memory to pinned memory, none of it copied twice in a row."""
    sources = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_() for _ in range(NUM_COPIES)]
    targets = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_COPIES)]
    rates = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(COPY_BYTES * NUM_COPIES / start.elapsed_time(end) * 1e3)
    del sources, targets, source, target
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):  # or it counts as what a saver takes
        torch._C._host_emptyCache()
    return float(statistics.median(rates[1:]))


# ---------------------------------------------------------------------------------------------
# Part: idle
# ---------------------------------------------------------------------------------------------


def run_idle(bench: Bench) -> dict[str, Any]:
    models = [bench.model, copy.deepcopy(bench.model)]
    half = bench.arguments.pairs // 2
    pairs = time_pairs(bench, models[0], models[1], half, "idle0") + time_pairs(
        bench, models[1], models[0], half, "idle1"
    )
    return summarize_pairs(pairs)


def time_pairs(bench: Bench, collected: nn.Module, bare: nn.Module, num_pairs: int, name: str) -> list[Pair]:
    """For each pair the times of an iteration in ``collect`` and of one with taps only; which is first alternates."""
    num_warm = 3
    # one capture in the first iteration, and one that is still to come when this ends: its warning is expected
    last = num_pairs + num_warm
    policy = QuantPolicy.from_spec(QuantSpec(type=bench.quant_type))
    taps = install(bare, policy, lambda: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = {"target": 2, "iterations": [0, last], "num_iterations": last + 1}
            with bench.collect(collected, bench.folder / name, **settings) as run:

                def work() -> None:
                    bench.iterate(collected)
                    run.step()

                pairs = take_pairs(bench.time, (work, lambda: bench.iterate(bare)), num_pairs, num_warm)
    finally:
        taps.remove()
    shutil.rmtree(bench.folder / name)
    return pairs


# ---------------------------------------------------------------------------------------------
# Part: overwrite
# ---------------------------------------------------------------------------------------------


def run_overwrite(bench: Bench) -> dict[str, Any]:
    cases: dict[str, Callable[[], None]] = {"collect, current stream": lambda: overwrite_in_collect(bench)}
    for way in WAYS if bench.is_cuda else ("current stream", "freed"):
        cases[f"saver, {way}"] = partial(overwrite_in_saver, bench, way)
    found: dict[str, Any] = {"num_wrong": 0}
    for name, work in cases.items():
        rss_bytes = psutil.Process().memory_info().rss
        reset_peaks(bench)
        with watched_rss() as peak:
            _, seconds = bench.time(work)
        row = {"seconds": seconds, "extra_rss_bytes": peak[0] - rss_bytes, "pinned_bytes": pinned_bytes(bench)}
        row["num_wrong"] = count_wrong(bench, bench.folder / "overwrite")
        found["num_wrong"] += row["num_wrong"]
        found[name] = row
        text = ", ".join(f"{row[field] / 2**20:,.0f} MiB {field}" for field in ("extra_rss_bytes", "pinned_bytes"))
        print(f"  {name:24} {row['num_wrong']} wrong, {seconds:.1f} s, {text}", flush=True)
    return found


def overwrite_in_collect(bench: Bench) -> None:
    """By ``collect``: what goes into a linear."""
    out_dir, num = bench.folder / "overwrite", bench.arguments.overwrites
    model, input_ids = OneLinear(bench.device), torch.zeros(1, 1, dtype=torch.int64)
    x = torch.empty(SIDE, SIDE, device=bench.device)
    with bench.collect(
        model, out_dir, quant_type="none", target=num, tensor_names=["input"], operations=["forward"],
        iterations="all", num_iterations=num,
    ) as run:  # fmt: skip
        for number in range(num):
            x.fill_(number)
            model(input_ids, x)
            x.fill_(-1)
            run.step()


def overwrite_in_saver(bench: Bench, way: str) -> None:
    """By the saving call that everything else goes through."""
    out_dir, num = bench.folder / "overwrite", bench.arguments.overwrites
    engine = CaptureEngine(
        Saver(out_dir, run_id="overwrite"),
        EngineSettings(host_memory_bytes=8 * SIDE * SIDE * 4),
        device=torch.device(bench.device),
    )
    with on_stream(bench, is_side=way == "side stream"):
        x = torch.empty(SIDE, SIDE, device=bench.device)
        for number in range(num):
            if way == "freed":
                x = torch.full((SIDE, SIDE), float(number), device=bench.device)
            else:
                x.fill_(number)
            engine.submit(x, observe(number), number + 1)
            if way == "freed":
                del x
                torch.full((SIDE, SIDE), -1.0, device=bench.device)
            else:
                x.fill_(-1)
        engine.drain()
        engine.close()


def on_stream(bench: Bench, *, is_side: bool) -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if is_side and bench.is_cuda else nullcontext()


def observe(number: int) -> Observation:
    return Observation(
        layer_type="linear",
        layer_idx=0,
        operation="forward",
        phase="pre",
        component="linear",
        quant_type="none",
        tensor_name="input",
        tensor="linear_input",
        module="linear",
        rank=RankInfo(rank=0, local_rank=0, world_size=1),
        iteration=number,
        micro_batch=0,
        sample_idx=number,
        num_samples=1,
    )


def count_wrong(bench: Bench, out_dir: Path) -> int:
    """How many of the files do not hold the number of their iteration, or are not there; all are removed."""

    def is_right(path: Path) -> bool:
        content = torch.load(path, weights_only=True)
        number = content["metadata"]["iteration"]
        is_all = bool((content["tensor"].to(bench.device) == number).all())
        info = content["tensor_info"]
        return is_all and info["min"] == info["max"] == number

    paths = sorted(out_dir.glob("*.pt"))
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        num_right = sum(pool.map(is_right, paths))
    shutil.rmtree(out_dir)
    return max(len(paths), bench.arguments.overwrites) - num_right


# ---------------------------------------------------------------------------------------------
# Part: identical
# ---------------------------------------------------------------------------------------------


def run_identical(bench: Bench) -> dict[str, Any]:
    before = {name: value.clone() for name, value in bench.model.state_dict().items()}
    out_dir = bench.folder / "identical"
    torch.use_deterministic_algorithms(True)
    try:
        bare_losses, bare = train(bench, None)
        bench.model.load_state_dict(before)
        settings = {"quant_type": "bf16", "target": bench.target, "iterations": [1], "num_iterations": 3}
        with bench.collect(bench.model, out_dir, **settings) as run:
            losses, captured = train(bench, run)
    finally:
        torch.use_deterministic_algorithms(False)
        bench.model.load_state_dict(before)
    num_files = sum(1 for _ in out_dir.glob("*.pt"))
    shutil.rmtree(out_dir)
    return {
        "num_files": num_files,
        "losses": losses,
        "num_losses_differ": sum(a != b for a, b in zip(losses, bare_losses, strict=True)),
        "num_weights_differ": sum(not torch.equal(captured[name], bare[name]) for name in bare),
        "num_weights": len(bare),
        "num_weights_trained": sum(not torch.equal(bare[name], before[name]) for name in bare),
    }


def train(bench: Bench, run: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three iterations, and the weights after them."""
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(float(bench.iterate(bench.model)))
        optimizer.step()
        if run is not None:
            run.step()
    return losses, {name: value.clone() for name, value in bench.model.state_dict().items()}


# ---------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------


def print_facts(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if isinstance(value, float):
            print(f"  {name:22} {value:14.4f}")
        elif isinstance(value, int) and name.endswith("bytes"):
            print(f"  {name:22} {value / 2**20:14,.1f} MiB")
        elif not isinstance(value, dict) and name not in ("rows", "write_floors_s"):
            print(f"  {name:22} {value!s:>14}")


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "capture": run_capture,
    "idle": run_idle,
    "overwrite": run_overwrite,
    "identical": run_identical,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--quant-type", default="mxfp8", help="of parts capture and idle")
    parser.add_argument("--recipe", default="llama32_1b_random", help="with random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="captured iterations, and floors")
    parser.add_argument("--host-memory-gb", type=float, default=12.0, help="of part capture")
    parser.add_argument("--pairs", type=int, default=200, help="of part idle")
    parser.add_argument("--overwrites", type=int, default=200)
    parser.add_argument("--dir", type=Path, help="a folder of the disk to write to (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "quant_type": arguments.quant_type,
        "recipe": arguments.recipe,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="qcollect-capture-", dir=arguments.dir) as folder:
        bench = Bench(arguments, Path(folder))
        for part in arguments.parts:
            part_s = time.monotonic()
            print(f"{part}:", flush=True)
            facts[part] = PARTS[part](bench)
            print_facts(facts[part])
            print(f"  took {time.monotonic() - part_s:.1f} s, {time.monotonic() - started_s:.1f} s in all", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    identical = facts.get("identical", {})
    num_wrong = facts.get("overwrite", {}).get("num_wrong", 0)
    num_wrong += identical.get("num_losses_differ", 0) + identical.get("num_weights_differ", 0)
    print("all bits are right" if not num_wrong else f"WRONG: {num_wrong} files, losses or weights")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
