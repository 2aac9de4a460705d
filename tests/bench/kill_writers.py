# ruff: noqa: E402
"""A process that captures is killed while it writes, at a random moment, again and again: what is left and repaired.

    python tests/bench/kill_writers.py                              20 kills, some minutes
    python tests/bench/kill_writers.py --kills 3 --seed 7 --json FILE
    python tests/bench/kill_writers.py --device cuda

Each kill starts a process of its own that captures every tensor of a stack of linears inside ``collect``, in one folder
or a folder an iteration by turns. Once its first line is in the manifest, ``kill -9`` comes after a random delay. Then

    files, lines   under final names, and in the manifest, at once after the kill
    torn           files under a final name that do not load or are not the bytes of their line
    gone           lines without their file
    lost           whole lines cut in two or unreadable, but for the last one
    unlisted       whole files without a line: the repair is to list them
    tmp            files under a temporary name: the repair is to remove them

and after ``qcollect verify --repair`` the same again, when all of these must be 0, and no whole file may be missing
that was there before. ``torn``, ``gone`` and ``lost`` must be 0 before it, too. Of every four kills two are aimed:
after the delay they wait until a file is seen under a temporary name, and up to ``AIM_S`` longer. The files are
looked at here, without the package's own reader. The exit code is 1 if anything is not as it should be.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import xxhash

from qcollect.paths import TEMPORARY_SUFFIX, RunPaths

START_S = 180.0
AIM_S = 0.003
AIM_DEADLINE_S = 2.0
NUM_ITERATIONS = 500
WIDTHS = (64, 1024, 256, 512, 128, 768, 64)  # small and large files beside each other
NUM_ROWS = 512
COLUMNS = ("files", "lines", "torn", "gone", "lost", "unlisted", "tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a folder holds."""

    files: int
    lines: int
    torn: int
    gone: int
    lost: int
    unlisted: int
    tmp: int
    whole: frozenset[str]

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: when it came, what was left, what the repair made of it, what is wrong with that."""

    number: int
    layout: str
    delay_s: float
    is_aimed: bool
    before: dict[str, int]
    after: dict[str, int]
    repair_code: int
    problems: tuple[str, ...]


def capture_endlessly(out_dir: Path, layout: str, quant_type: str, device: str) -> None:
    """The process that is killed."""
    import qcollect

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linears = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    model = torch.nn.Sequential(*linears).to(device).train()
    x = torch.randn(NUM_ROWS, WIDTHS[0], device=device, requires_grad=True)
    collector = qcollect.collect(
        model,
        quant_type=quant_type,
        out_dir=out_dir,
        target=NUM_ITERATIONS * len(linears) * 6,
        iterations="all",
        num_iterations=NUM_ITERATIONS,
        layout=layout,
    )
    with collector as run:
        for _ in range(NUM_ITERATIONS):
            model(x).square().mean().backward()
            model.zero_grad()
            run.step()


def look(paths: RunPaths) -> Look:
    """Read every file and line; the last line may be cut, which is for the repair to drop."""
    listed: dict[str, dict[str, object]] = {}
    lost = tails = 0
    for manifest in sorted(paths.manifest_dir.glob("*.jsonl")):
        *raws, tail = manifest.read_bytes().split(b"\n")
        tails += bool(tail)
        for raw in raws:
            try:
                line = json.loads(raw)
                lost += line["file"] in listed
                listed[line["file"]] = line
            except (ValueError, KeyError, TypeError):
                lost += 1
    names = {p.relative_to(paths.run_dir).as_posix() for p in captures_in(paths)}
    whole = {name for name in names if is_whole(paths.run_dir / name, listed.get(name))}
    temporaries = [p for p in paths.run_dir.rglob(f"*{TEMPORARY_SUFFIX}") if paths.torn_dir not in p.parents]
    return Look(
        files=len(names),
        lines=len(listed),
        torn=len(names - whole),
        gone=len(listed.keys() - names),
        lost=lost,
        unlisted=len(whole - listed.keys()),
        tmp=len(temporaries) + tails,
        whole=frozenset(whole),
    )


def captures_in(paths: RunPaths) -> list[Path]:
    return [path for path in paths.run_dir.rglob("*.pt") if paths.state_dir not in path.parents]


def is_whole(path: Path, line: dict[str, object] | None) -> bool:
    """Whether torch loads it, and it is what its line says."""
    try:
        content = torch.load(path, weights_only=True)
        tensor = content["tensor"]
        is_loaded = list(tensor.shape) == content["tensor_info"]["shape"]
    except Exception:  # whatever it is, the file is no capture
        return False
    if line is None:
        return is_loaded
    data = path.read_bytes()
    return is_loaded and len(data) == line["bytes"] and xxhash.xxh3_128(data).hexdigest() == line["xxh3_128"]


def kill_one(number: int, folder: Path, delay_s: float, arguments: argparse.Namespace) -> Kill:
    paths = RunPaths(folder / f"run{number}")
    layout, is_aimed = "by_iteration" if number % 2 else "flat", number % 4 > 1
    command = [sys.executable, __file__, "--child", str(paths.run_dir), "--layout", layout]
    command += ["--quant-type", arguments.quant_type, "--device", arguments.device]
    output_path = folder / f"output{number}.txt"
    with output_path.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"RANK": "0"})
    try:
        wait_for_line(paths, process, output_path)
        time.sleep(delay_s)
        if is_aimed:
            wait_for_temporary(paths)
            time.sleep(delay_s % AIM_S)
        assert process.poll() is None, f"it ended by itself, with {process.poll()}: {output_path.read_text()[-2000:]}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = look(paths)
    repair = verify(paths, "--repair")
    after, again = look(paths), verify(paths)
    problems = [f"{name} {before.counts()[name]} before" for name in ("torn", "gone", "lost") if before.counts()[name]]
    problems += [f"{name} {after.counts()[name]} after" for name in COLUMNS[2:] if after.counts()[name]]
    missing = before.whole - after.whole
    problems += [f"{len(missing)} whole files missing after"] if missing else []
    problems += [f"verify finds after the repair: {again.stdout[-500:]}"] if again.returncode else []
    problems += [f"the repair ended with {repair.returncode}: {repair.stdout[-500:]}"] if repair.returncode else []
    for path in (*captures_in(paths), *paths.run_dir.rglob(f"*{TEMPORARY_SUFFIX}")):
        path.unlink()
    return Kill(
        number=number,
        layout=layout,
        delay_s=delay_s,
        is_aimed=is_aimed,
        before=before.counts(),
        after=after.counts(),
        repair_code=repair.returncode,
        problems=tuple(problems),
    )


def wait_for_line(paths: RunPaths, process: "subprocess.Popen[bytes]", output_path: Path) -> None:
    deadline_s = time.monotonic() + START_S
    manifest = paths.manifest_path(0)
    while not (manifest.exists() and manifest.stat().st_size):
        assert process.poll() is None, f"it ended with {process.poll()}: {output_path.read_text()[-2000:]}"
        assert time.monotonic() < deadline_s, f"nothing is listed after {START_S:g} s"
        time.sleep(0.005)


def wait_for_temporary(paths: RunPaths) -> None:
    """Until a capture is being written; a writer that gives its files no temporary name is not waited for long."""
    deadline_s = time.monotonic() + AIM_DEADLINE_S
    while time.monotonic() < deadline_s:
        folders = [paths.run_dir, *sorted(paths.run_dir.glob("iter*"))]
        if any(entry.name.endswith(TEMPORARY_SUFFIX) for folder in folders[-2:] for entry in os.scandir(folder)):
            return


def verify(paths: RunPaths, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "qcollect", "verify", str(paths.run_dir), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--max-delay-s", type=float, default=2.0, help="after the first line")
    parser.add_argument("--seed", type=int, help="of the delays (random)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quant-type", default="none")
    parser.add_argument("--dir", type=Path, help="a folder of the disk to write to (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        capture_endlessly(arguments.child, arguments.layout, arguments.quant_type, arguments.device)
        return 0
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    delays = random.Random(seed)
    print(
        f"{arguments.kills} kills, delays of up to {arguments.max_delay_s:g} s, seed {seed}, torch {torch.__version__}"
    )
    print(
        f"{'':4} {'layout':19} {'delay':>7}  {'  '.join(f'{name:>8}' for name in COLUMNS)}   before / after the repair"
    )
    kills = []
    with tempfile.TemporaryDirectory(prefix="qcollect-kill-", dir=arguments.dir) as folder:
        for number in range(arguments.kills):
            kills.append(kill_one(number, Path(folder), delays.uniform(0, arguments.max_delay_s), arguments))
            print_kill(kills[-1])
    bad = [kill for kill in kills if kill.problems]
    num_files = sum(kill.before["files"] for kill in kills)
    print(
        f"{len(kills)} kills, {num_files} files: {len(bad)} with something wrong"
        if bad
        else f"{len(kills)} kills, {num_files} files: all as it should be"
    )
    if arguments.json:
        facts = {"seed": seed, "torch": torch.__version__, "kills": [asdict(kill) for kill in kills]}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return int(bool(bad))


def print_kill(kill: Kill) -> None:
    cells = "  ".join(f"{f'{kill.before[name]}/{kill.after[name]}':>8}" for name in COLUMNS)
    verdict = "WRONG" if kill.problems else "ok"
    layout = f"{kill.layout}{', aimed' if kill.is_aimed else ''}"
    print(f"{kill.number:4} {layout:19} {kill.delay_s:6.3f}s  {cells}   {verdict}", flush=True)
    for problem in kill.problems:
        print(f"       {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
