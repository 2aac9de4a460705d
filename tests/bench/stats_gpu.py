# ruff: noqa: E402
"""What capture mode ``stats`` costs on one CUDA device, in Llama-3.2-1B's shape: iterations against quantized ones.

    python tests/bench/stats_gpu.py [--json FILE]               every part
    python tests/bench/stats_gpu.py --parts quantized both --pairs 40
    python tests/bench/stats_gpu.py --device cpu --recipe tiny --pairs 4    only to try the script

Parts, each an iteration of 1 x 2048 tokens in ``collect`` against a copy of the model that has the same quantizing
taps and nothing else of ``collect``:

    quantized  capture.values quantized: the errors of all operands of all gemms
    both       those, and the statistics of all tensors
    original   the statistics of all tensors
    shadow1    both, and one type beside (--shadow names them, in order)
    shadow2    two types
    shadow3    three types
    check      no time: of the first layer, in deterministic mode, every number of a line against the tensor that mode
               ``tensors`` captures, and its errors by the formats' own interface on the device

Pairs are interleaved, which comes first alternates, and the models change places half way. ``ratio`` is the median of
the pairs' ratios with its bootstrap interval (95 %), until the device is done; ``host_ratio`` until ``step`` has
returned. ``waited_s`` is how long training waited for lines to be written, ``lines`` how many a micro-batch has. The
bounds: 1.15 quantized, 1.5 both, and 0.15 for each type beside (``more`` is the difference to the part before). The
exit code is 1 if a line is missing or wrong, never because of a time.
"""

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("RANK", "0")

import torch
from pairs import Pair, summarize_pairs, take_pairs
from torch import nn

import qcollect
from qcollect.formats.quantizer import Quantizer, bind_consumer
from qcollect.paths import RunPaths
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import QuantSpec
from qcollect.store.files import count_lines
from qcollect.worker.model import build_model
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import install

NUM_WARM = 3
SHADOWS = ("mxfp4", "hifp8", "mxfp6_e2m3")


class Bench:
    """The model, its copy and its tokens."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        recipe = load_recipe(arguments.recipe)
        self.folder, self.device, self.quant_type = folder, arguments.device, arguments.quant_type
        self.num_pairs = arguments.pairs
        self.models = [build_model(recipe.model, device=self.device, dtype=torch.bfloat16)]
        self.models.append(copy.deepcopy(self.models[0]))
        config: Any = self.models[0].config
        shape = (1, recipe.data.sequence_length)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(self.device)

    def iterate(self, model: Any) -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds until ``work`` has returned, and until the device is done too."""
        self.synchronize()
        start_s = time.perf_counter()
        work()
        returned_s = time.perf_counter() - start_s
        self.synchronize()
        return returned_s, time.perf_counter() - start_s


def run_part(bench: Bench, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    half = bench.num_pairs // 2
    pairs, facts = time_pairs(bench, *bench.models, half, f"{name}0", settings)
    more, _ = time_pairs(bench, *reversed(bench.models), half, f"{name}1", settings)
    pairs += more
    return summarize_pairs(pairs) | facts


def run_check(bench: Bench, shadow: tuple[str, ...]) -> dict[str, Any]:
    model, common = bench.models[0], {"layers": [0], "num_iterations": 1}
    torch.use_deterministic_algorithms(True)
    try:
        for name, settings in (
            ("tensors", {"target": 50}),
            ("stats", {"mode": "stats", "shadow": [name for name in shadow if name != "hifp8"]}),
        ):
            with qcollect.collect(model, bench.quant_type, bench.folder / name, **common, **settings) as run:
                bench.iterate(model)
                run.step()
    finally:
        torch.use_deterministic_algorithms(False)
    files = {capture.key: capture for capture in qcollect.open_run(bench.folder / "tensors")}
    lines = qcollect.open_run(bench.folder / "stats")
    wrong = []
    for line in lines:
        file = files[replace(line.key, values="original", gemm=None)]
        if line.key.gemm is None:
            is_right = line.tensor_info == file.tensor_info
        else:
            (entry,) = line.metadata["consumers"]
            original = file.load().to(bench.device).reshape(entry["shape"])
            own = bind_consumer(original, entry).with_stats(histograms=False)[1].describe()
            is_right = line.errors[entry["quant_type"]] == own and all(
                errors == Quantizer.create(name, axis=entry["axis"]).apply_with_stats(original)[1].describe()
                for name, errors in line.errors.items()
                if name != entry["quant_type"]
            )
        if not is_right:
            wrong.append(f"{line.key.module} {line.key.tensor_name} {line.key.gemm}")
    for name in ("tensors", "stats"):
        shutil.rmtree(bench.folder / name)
    return {"lines": len(lines), "num_missing": 95 - len(lines) + len(wrong), "wrong": wrong}


def time_pairs(
    bench: Bench, collected: nn.Module, bare: nn.Module, num_pairs: int, name: str, settings: dict[str, Any]
) -> tuple[list[Pair], dict[str, Any]]:
    """For each pair the times of an iteration in ``collect`` and of one with taps only; which is first alternates."""
    out_dir, last = bench.folder / name, num_pairs + NUM_WARM
    taps = install(bare, QuantPolicy.from_spec(QuantSpec(type=bench.quant_type)), lambda: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # one iteration more than is run: the last one would wait for all lines
            run = qcollect.collect(
                collected, bench.quant_type, out_dir, mode="stats", num_iterations=last + 1, **settings
            )
            with run:

                def work() -> None:
                    bench.iterate(collected)
                    run.step()

                pairs = take_pairs(bench.time, (work, lambda: bench.iterate(bare)), num_pairs, NUM_WARM)
    finally:
        taps.remove()
    manifest = RunPaths(out_dir).manifest_path(0)
    num_lines = count_lines(manifest)
    facts = {
        "lines": num_lines // last,
        "num_missing": run.num_captured - num_lines,
        "line_bytes": manifest.stat().st_size // max(num_lines, 1),
        "waited_s": run.sink.waited_s,
    }
    shutil.rmtree(out_dir)
    return pairs, facts


def parts_of(shadow: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {values: {"values": values} for values in ("quantized", "both", "original")}
    return parts | {f"shadow{i}": {"values": "both", "shadow": shadow[:i]} for i in range(1, len(shadow) + 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="all of them")
    parser.add_argument("--quant-type", default="mxfp8")
    parser.add_argument("--shadow", nargs="*", default=SHADOWS, help=" ".join(SHADOWS))
    parser.add_argument("--recipe", default="llama32_1b_random", help="with random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pairs", type=int, default=60, help="of each part")
    parser.add_argument("--dir", type=Path, help="a folder of the disk to write to (the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    parts = parts_of(tuple(arguments.shadow)) | {"check": {}}
    unknown = set(arguments.parts or ()) - set(parts)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "quant_type": arguments.quant_type,
        "shadow": list(arguments.shadow),
        "recipe": arguments.recipe,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="qcollect-stats-", dir=arguments.dir) as folder:
        bench = Bench(arguments, Path(folder))
        before = "both"
        for part in arguments.parts or parts:
            started_s = time.monotonic()
            if part == "check":
                facts[part] = found = run_check(bench, tuple(arguments.shadow))
                print(f"{part:10} {found['lines']} lines, wrong: {', '.join(found['wrong']) or 'none'}", flush=True)
                continue
            facts[part] = found = run_part(bench, part, parts[part])
            if part.startswith("shadow"):
                found["more"] = found["ratio"] - facts[before]["ratio"] if before in facts else None
                before = part
            print(
                f"{part:10} {found['ratio']:.3f} ({found['ratio_low']:.3f} to {found['ratio_high']:.3f}), host "
                f"{found['host_ratio']:.3f}, {1e3 * found['quantized_s']:.1f} ms -> {1e3 * found['collect_s']:.1f} ms, "
                f"{found['lines']} lines of {found['line_bytes']} bytes, waited {found['waited_s']:.2f} s"
                + (f", more {found['more']:.3f}" if found.get("more") is not None else "")
                + f" ({time.monotonic() - started_s:.0f} s)",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    num_missing = sum(found["num_missing"] for found in facts.values() if isinstance(found, dict))
    print("all lines are right" if not num_missing else f"WRONG: {num_missing} lines are missing or wrong")
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
