"""Smoke of the main job on real accelerators: one command, about five minutes.

    python tests/gpu/smoke.py                 every number of processes there are devices for, of 1 and 2
    python tests/gpu/smoke.py --nproc 2

Needs torch with CUDA and the package's dependencies; runs from a checkout, installed or not. For each
number of processes it runs the tiny recipe through the command line (NCCL between processes) and
checks the files; then it trains with and without capture in deterministic mode and compares bits,
and compares fake quantization on the device with the CPU's.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import qcollect
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.paths import RunPaths
from qcollect.recipe.load import load_recipe
from qcollect.vocab import CaptureName
from qcollect.worker.dataset import make_batches
from qcollect.worker.model import build_model

TARGET = 101  # files a run: odd, so that two ranks have different shares


def check_sweep(quant_types: Sequence[str], nproc: int, folder: Path) -> str:
    """A sweep of the tiny recipe: exit code, exact counts, devices, loadable files, fixed points, equal keys."""
    out = folder / f"nproc{nproc}"
    command = [sys.executable, "-m", "qcollect", "sweep", "--recipe", "tiny", "--nproc", str(nproc), "--out", str(out)]
    command += ["--target", str(TARGET), "--set", "capture.values=both", *(f"--quant={name}" for name in quant_types)]
    started = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if result.returncode:
        logs = sorted(out.glob("*/.qcollect/logs/*.log"))
        tails = "".join(f"\n--- {log}\n{log.read_text()[-3000:]}" for log in logs)
        raise AssertionError(f"exit {result.returncode}: {result.stderr[-3000:]}{tails}")
    num_quantized = sum(check_folder(out / name, nproc) for name in quant_types)
    keys = [
        {(capture.key, capture.path.name.split("_")[2]) for capture in qcollect.open_run(out / n)} for n in quant_types
    ]
    assert all(run == keys[0] for run in keys), "keys or counters differ between types"
    return f"{TARGET} files each, {num_quantized} quantized and all fixed points, {seconds:.1f} s"


def check_folder(run_dir: Path, nproc: int) -> int:
    """One run's files; how many of them are quantized copies."""
    files = sorted(run_dir.glob("*.pt"))
    ranks = [CaptureName.parse(file.name).rank for file in files]
    expected = [TARGET // nproc + (rank < TARGET % nproc) for rank in range(nproc)]
    assert [ranks.count(rank) for rank in range(nproc)] == expected, (len(files), expected)
    reports = [RunPaths(run_dir).progress_path(rank) for rank in range(nproc)]
    devices = [json.loads(report.read_text())["device"] for report in reports]
    assert devices == [f"cuda:{index}" for index in range(nproc)], devices
    return sum(check_file(file) for file in files)


def check_file(path: Path) -> bool:
    """Loads without unpickling; a quantized copy is a fixed point of its own quantizer, on CPU and device."""
    content = torch.load(path, weights_only=True)
    metadata, tensor = content["metadata"], content["tensor"]
    assert content["tensor_info"]["device"].startswith("cuda"), content["tensor_info"]["device"]
    if metadata["values"] != "quantized":
        return False
    (consumer,) = metadata["consumers"]
    settings = {key: consumer[key] for key in ("scale_rule", "rounding", "block_size", "scale", "saturate")}
    for device in ("cpu", "cuda"):
        again = qcollect.fake_quantize(tensor.to(device), consumer["quant_type"], consumer["axis"], **settings).cpu()
        assert torch.equal(again.view(torch.int16), tensor.view(torch.int16)), (path.name, device)
    return True


def load_train_script() -> Any:
    spec = importlib.util.spec_from_file_location("qcollect_train", ROOT / "recipes" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Endless:
    """A collector whose step never ends the training, so that both trainings have five."""

    def __init__(self, collector: Any) -> None:
        self.collector = collector

    def __enter__(self) -> "Endless":
        self.collector.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.collector.__exit__(*details)

    def step(self, **metrics: float) -> bool:
        self.collector.step(**metrics)
        return False


def check_bit_identity(compute: str, quant_type: str, layout: str, folder: Path) -> str:
    """Five deterministic steps with all captures of an iteration on, against five without qcollect."""
    script = load_train_script()
    torch.use_deterministic_algorithms(True)
    recipe = load_recipe("tiny", [f"train.compute={compute}", f"data.layout={layout}"])
    out = folder / f"{compute}-{quant_type}-{layout}"

    def train(attach: Callable[[Any], Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = build_model(recipe.model, device="cuda")
        batches = make_batches(recipe, rank=0, world_size=1, vocab_size=320)
        options = {} if attach is None else {"attach": attach}
        with contextlib.redirect_stdout(io.StringIO()):
            losses = script.train(recipe, model, batches, num_iterations=5, **options)
        return losses, model.state_dict()

    bare = train(None)
    captured = train(lambda model: Endless(qcollect.collect(model, quant_type=quant_type, out_dir=out, target=300)))
    assert bare[0] == captured[0], (bare[0], captured[0])
    assert all(torch.equal(bare[1][name], captured[1][name]) for name in bare[1])
    assert len(list(out.glob("*.pt"))) == 300
    return f"5 losses and {len(bare[1])} weights bit-identical with 300 captures, last loss {bare[0][-1]:.4f}"


def check_quantizers(num_elements: int = 1 << 22) -> str:
    """Random bit patterns: the device gives the CPU's bits, for every type, dtype and orientation."""
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for name in QUANT_TYPES:
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
            limits = torch.iinfo(bits)
            x = torch.randint(limits.min, limits.max, (num_elements // 2048, 2048), dtype=bits, generator=generator)
            x = x.view(dtype)
            for axis in (0, 1):
                on_cpu = qcollect.fake_quantize(x, name, axis)
                on_device = qcollect.fake_quantize(x.cuda(), name, axis).cpu()
                same = (on_cpu.view(bits) == on_device.view(bits)) | (on_cpu.isnan() & on_device.isnan())
                assert bool(same.all()), (name, dtype, axis)
                compared += x.numel()
    return f"{compared:,} elements, 0 differ"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc", type=int, action="append", help="processes, one a device; may be repeated")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("SKIP: torch sees no CUDA device")
        return 77
    counts = arguments.nproc or [n for n in (1, 2) if n <= torch.cuda.device_count()]
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    print(
        f"{torch.cuda.device_count()} x {', '.join(names)}; torch {torch.__version__}; python {sys.version.split()[0]}"
    )
    with tempfile.TemporaryDirectory(prefix="qcollect-gpu-") as name:
        folder = Path(name)
        checks: list[tuple[str, Callable[[], str]]] = []
        for n in counts:
            types = ("mxfp8", "hifp8") if n == 1 else ("bf16", "mxfp8", "mxfp4", "hifp8")
            title = f"{', '.join(types)} with {n} process(es)"
            checks.append((title, lambda t=types, n=n: check_sweep(t, n, folder)))
        for compute, quant_type in (("bf16", "bf16"), ("fp32", "none")):
            for layout in ("packed", "padded"):
                checks.append(
                    (
                        f"{compute} compute, type {quant_type}, {layout}",
                        lambda c=compute, q=quant_type, y=layout: check_bit_identity(c, q, y, folder),
                    )
                )
        checks.append(("device against CPU", check_quantizers))
        failed = 0
        for title, check in checks:
            try:
                print(f"ok    {title}: {check()}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {title}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
