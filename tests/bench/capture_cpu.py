"""What capturing every tensor of an iteration costs on a CPU: in ``torch.save`` loops, and beside msprobe.

    python tests/bench/capture_cpu.py                                        this package and the loop
    python tests/bench/capture_cpu.py --msprobe-python PYTHON --json FILE    msprobe (level L0) in the same rounds

PYTHON is that of an environment with transformers and mindstudio-probe, whose process waits while others work. The
model has 4 layers, 17.3 M weights in float32 and 2 x 512 tokens: 200 captures an iteration here, 324 files in msprobe.

    plain      forward and backward of the model as it is
    quantized  the same between ``collect``'s enter and exit, in an iteration that wants nothing
    thread     an iteration that captures everything, until ``step`` has returned
    closed     the same, until every file is there under its name
    loop       ``torch.save`` of the same tensors, each alone, into as many files of another folder of the same disk

The cost is ``closed`` less the bare iteration: ``plain`` for the type ``none``, which alters nothing, ``quantized``
for others. In every round each of them runs once, in turn, after ``sync``. A ratio is the median of the rounds' own
ratios. Files go into the page cache, here and in the loop and in msprobe: none of them waits for the disk, unless the
cache is so full that the kernel makes writers wait. Each finds the memory of the files that it wrote in the round
before, which are removed right before what is timed: the host of a virtual machine takes memory that was free for a
second back, and finding it anew would take several times as long as filling it, for whoever happens to come next.
Nothing fails because of a time. ``--host-memory-gb`` is what holds an iteration's captures, taken before the first
iteration; with 0 ``collect`` chooses, and the system finds the pages when they are first written to.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from room import make_room

ROOT = Path(__file__).resolve().parents[2]
NUM_CAPTURES = 200
CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
BOUNDS = {"cost / loop": 1.0, "thread / loop": 0.6, "seconds per GB / msprobe's": 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one round; msprobe's are None where it takes no part."""

    plain_s: float
    quantized_s: float
    thread_s: float
    closed_s: float
    loop_s: float
    num_bytes: int  # of the tensors
    is_over_plain: bool
    peer_plain_s: float | None = None
    peer_closed_s: float | None = None
    peer_num_files: int | None = None
    peer_num_bytes: int | None = None  # of its files, which hold a tensor each

    @property
    def bare_s(self) -> float:
        return self.plain_s if self.is_over_plain else self.quantized_s

    def ratios(self) -> dict[str, float]:
        cost_s = self.closed_s - self.bare_s
        ratios = {"cost / loop": cost_s / self.loop_s, "thread / loop": (self.thread_s - self.bare_s) / self.loop_s}
        ratios["seconds per GB"] = cost_s / self.num_bytes * 1e9
        if self.peer_closed_s is not None and self.peer_plain_s is not None and self.peer_num_bytes is not None:
            ratios["msprobe's seconds per GB"] = (self.peer_closed_s - self.peer_plain_s) / self.peer_num_bytes * 1e9
            ratios["seconds per GB / msprobe's"] = ratios["seconds per GB"] / ratios["msprobe's seconds per GB"]
        return ratios


def main() -> None:
    arguments = parse()
    if arguments.serve:
        serve(arguments)
        return
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("RANK", "0")
    with tempfile.TemporaryDirectory(prefix="qcollect-capture-", dir=arguments.dir) as temporary:
        peer = start_peer(arguments, Path(temporary))
        try:
            facts, rounds = measure(arguments, Path(temporary), peer)
        finally:
            if peer is not None:
                peer.close()
    ratios = summarize(rounds)
    print_summary(facts, rounds, ratios)
    if arguments.json:
        content = facts | {"ratios": ratios, "bounds": BOUNDS, "rounds": [asdict(each) for each in rounds]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="that count; one before them warms up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quant-type", default="none", help="of the training that is captured")
    parser.add_argument(
        "--host-memory-gb",
        type=float,
        default=0.6,
        help="capture.host_memory_gb, taken before the first iteration; 0: what collect takes, page by page",
    )
    parser.add_argument("--dir", type=Path, help="a folder of the disk to write to (the system's temporary folder)")
    parser.add_argument("--msprobe-python", type=Path, metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------
# The training, the same in both processes
# ---------------------------------------------------------------------------------------------


def make_iteration() -> tuple[Any, Callable[[], None]]:
    """A model, and forward and backward of it with gradients made anew."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 512))

    def iterate() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return model, iterate


def seconds_of(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


# ---------------------------------------------------------------------------------------------
# This package
# ---------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: Path, peer: "Peer | None") -> tuple[dict[str, Any], list[Round]]:
    import torch

    torch.set_num_threads(arguments.threads)
    model, iterate = make_iteration()
    iterate()
    tensors = load_tensors(model, iterate, folder / "tensors", arguments)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    facts = {
        "cpu": processor(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "quant_type": arguments.quant_type,
        "host_memory_gb": arguments.host_memory_gb,
        "num_files": len(tensors),
        "num_bytes": num_bytes,
        "disk": disk_of(folder),
        "msprobe": None if peer is None else peer.version,
    }
    is_over_plain = arguments.quant_type == "none"

    def plain() -> dict[str, Any]:
        os.sync()
        return {"plain_s": seconds_of(iterate)}

    def ours() -> dict[str, Any]:
        return capture(model, iterate, folder / "captured", arguments)

    def loop() -> dict[str, Any]:
        return {"loop_s": save(tensors, folder / "loop")}

    def theirs() -> dict[str, Any]:
        return {} if peer is None else peer.ask()

    steps = [plain, ours, loop, theirs]
    rounds = []
    for number in range(arguments.rounds + 1):
        found: dict[str, Any] = {"num_bytes": num_bytes, "is_over_plain": is_over_plain}
        for place in range(len(steps)):
            found |= steps[(place + number) % len(steps)]()
        rounds.append(Round(**found))
        texts = [f"{name} {ratio:.2f}" for name, ratio in rounds[-1].ratios().items()]
        print(f"round {number}: {', '.join(texts)}", file=sys.stderr, flush=True)
    return facts, rounds[1:]


def capture(model: Any, iterate: Callable[[], None], out_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One iteration that wants nothing, then one that captures everything into ``out_dir``, and another.

    The last is not timed: the end of a run waits for all files, an iteration on the way does not. The files stay, in
    another folder, until the next round's turn.
    """
    import qcollect

    stale = out_dir.with_suffix(".stale")
    collector = qcollect.collect(
        model,
        quant_type=arguments.quant_type,
        out_dir=out_dir,
        target=2 * NUM_CAPTURES,
        iterations=[1, 2],
        num_iterations=3,
        host_memory_gb=arguments.host_memory_gb or None,
    )
    with collector as run:
        os.sync()
        quantized_s = seconds_of(lambda: (iterate(), run.step()))
        make_room(stale)
        start_s = time.perf_counter()
        iterate()
        run.step()
        thread_s = time.perf_counter() - start_s
        while sum(name.endswith(".pt") for name in os.listdir(out_dir)) < NUM_CAPTURES:
            time.sleep(0.004)  # more often would take time from those that write
        closed_s = time.perf_counter() - start_s
        iterate()
        run.step()
    num_files = sum(1 for _ in out_dir.glob("*.pt"))
    assert num_files == 2 * NUM_CAPTURES, f"{num_files} files"
    out_dir.rename(stale)
    return {"quantized_s": quantized_s, "thread_s": thread_s, "closed_s": closed_s}


def load_tensors(model: Any, iterate: Callable[[], None], out_dir: Path, arguments: argparse.Namespace) -> list[Any]:
    """The tensors of an iteration."""
    import torch

    capture(model, iterate, out_dir, arguments)
    kept = out_dir.with_suffix(".stale")
    tensors = [torch.load(path, weights_only=True)["tensor"] for path in sorted(kept.glob("*_iter001_*.pt"))]
    shutil.rmtree(kept)
    return tensors


def save(tensors: Sequence[Any], out_dir: Path) -> float:
    """Seconds of the loop."""
    import torch

    make_room(out_dir)
    out_dir.mkdir()

    def loop() -> None:
        for number, tensor in enumerate(tensors):
            torch.save(tensor, out_dir / f"{number:06d}.pt")

    return seconds_of(loop)


# ---------------------------------------------------------------------------------------------
# msprobe, in a process of its own
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that answers a line with the JSON of one round."""

    process: "subprocess.Popen[str]"
    version: str

    def ask(self) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start_peer(arguments: argparse.Namespace, folder: Path) -> Peer | None:
    """msprobe, ready to be asked; None, and a line that says why, where it is not."""
    python = arguments.msprobe_python
    if python is None:
        print("msprobe: skipped, no --msprobe-python PYTHON", file=sys.stderr)
        return None
    command = [str(python), __file__, "--serve", str(folder / "msprobe"), "--threads", str(arguments.threads)]
    # its threads are not to spin while others are measured
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    environment.pop("PYTHONPATH", None)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
    except OSError as error:
        print(f"msprobe: skipped, {error}", file=sys.stderr)
        return None
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if not answer.startswith("ready "):
        process.kill()
        print(f"msprobe: skipped, {answer or 'it ended without a word'}", file=sys.stderr)
        return None
    return Peer(process, answer.removeprefix("ready "))


def serve(arguments: argparse.Namespace) -> None:
    """msprobe's side: until its input ends, a plain iteration and one it dumps for each line."""
    answers = os.fdopen(os.dup(1), "w")  # it prints to stdout as it likes
    os.dup2(2, 1)
    folder = arguments.serve
    folder.mkdir()
    config = {"task": "tensor", "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L0"}
    config["tensor"] = {"scope": [], "list": [], "data_mode": ["all"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        from importlib.metadata import version

        import torch
        from msprobe.pytorch import PrecisionDebugger

        torch.set_num_threads(arguments.threads)
        _, iterate_plain = make_iteration()  # a model it has put nothing into
        model, iterate = make_iteration()
        debugger = PrecisionDebugger(str(folder / "config.json"))
        iterate_plain()
    except Exception as error:  # whatever is wrong there is the reason to skip it
        answers.write(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}\n")
        return

    def dump() -> None:
        iterate()
        debugger.stop()
        debugger.step()

    answers.write(f"ready mindstudio-probe {version('mindstudio-probe')}, torch {torch.__version__}\n")
    answers.flush()
    for _ in sys.stdin:
        os.sync()
        found: dict[str, Any] = {"peer_plain_s": seconds_of(iterate_plain)}
        debugger.start(model)
        make_room(folder / "stale")
        found["peer_closed_s"] = seconds_of(dump)
        sizes = [path.stat().st_size for path in (folder / "dump").rglob("*.pt")]
        (folder / "dump").rename(folder / "stale")
        found |= {"peer_num_files": len(sizes), "peer_num_bytes": sum(sizes)}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


# ---------------------------------------------------------------------------------------------
# What is shown
# ---------------------------------------------------------------------------------------------


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By name of a ratio, its median, smallest and largest over the rounds."""
    names = rounds[0].ratios()
    columns = {name: [each.ratios()[name] for each in rounds] for name in names}
    return {name: {"median": statistics.median(c), "min": min(c), "max": max(c)} for name, c in columns.items()}


def print_summary(facts: dict[str, Any], rounds: Sequence[Round], ratios: dict[str, dict[str, float]]) -> None:
    print(f"{facts['cpu']}; {facts['threads']} threads, torch {facts['torch']}; {facts['disk']}")
    print(f"{facts['num_files']} files, {facts['num_bytes'] / 1e9:.3f} GB, type {facts['quant_type']}, page cache")
    fields = ("plain_s", "quantized_s", "thread_s", "closed_s", "loop_s", "peer_plain_s", "peer_closed_s")
    for field in fields:
        times = [value for each in rounds if (value := getattr(each, field)) is not None]
        if times:
            print(f"{field:28} {statistics.median(times):7.3f}  ({min(times):.3f} to {max(times):.3f})")
    if facts["msprobe"] is not None:
        num_files, num_bytes = rounds[0].peer_num_files, rounds[0].peer_num_bytes or 0
        print(f"{facts['msprobe']}: {num_files} files, {num_bytes / 1e9:.3f} GB")
    for name, ratio in ratios.items():
        bound = f"  at most {BOUNDS[name]}" if name in BOUNDS else ""
        print(f"{name:28} {ratio['median']:7.2f}  ({ratio['min']:.2f} to {ratio['max']:.2f}){bound}")


def disk_of(folder: Path) -> str:
    """The file system of a folder and its free space."""
    import psutil

    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    kind = "unknown file system" if mount is None else f"{mount.fstype} at {mount.mountpoint}"
    return f"{kind}, {shutil.disk_usage(folder).free / 2**30:.0f} GiB free"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, 'unknown')}, {os.cpu_count()} logical cores"


if __name__ == "__main__":
    main()
