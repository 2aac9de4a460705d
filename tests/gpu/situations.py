"""Captures on one CUDA device, in what the other scripts here leave out: forms of storage, FSDP1, triggers, values that
are larger than a buffer on the device, and whether the training thread ever waits for the device.

python tests/gpu/situations.py                 about two minutes
python tests/gpu/situations.py --device cpu    only to try the script
"""

import argparse
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("RANK", "0")

import torch
import torch.distributed as dist

import qcollect
from qcollect.recipe.load import load_recipe
from qcollect.store.index import Capture
from qcollect.worker.model import build_model

NUM_CAPTURES = 600  # of two iterations, originals and quantized copies


def train(
    device: str,
    out_dir: Path,
    wrap: Callable[[Any], Any] = lambda model: model,
    *,
    quant_type: str = "mxfp8",
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    **settings: Any,
) -> dict[Any, Capture]:
    """What two steps from the same weights on the same tokens leave, by key.

    Args:
        watch: around every forward and backward.
        settings: of ``collect``; None: left out.
    """
    torch.manual_seed(0)
    model = wrap(build_model(load_recipe("tiny").model, device=device, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(1)).to(device)
    settings = {"target": NUM_CAPTURES, "iterations": [0, 1], "num_iterations": 2, "values": "both"} | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with qcollect.collect(model, quant_type, out_dir, **settings) as run:
            for iteration in range(4):
                with watch():
                    loss = model(input_ids=tokens, labels=tokens).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run.step(loss=float("nan") if iteration == 1 else float(loss)):
                    break
    return {capture.key: capture for capture in qcollect.open_run(out_dir)}


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.view(words), b.view(words))


def check_storage(device: str, folder: Path, name: str, **settings: Any) -> str:
    """The tensors of a run that stores them as they are, bit for bit, with the same statistics."""
    plain = train(device, folder / f"{name}-plain")
    found = train(device, folder / name, **settings)
    assert found.keys() == plain.keys(), (len(found), len(plain))
    for key, capture in found.items():
        assert not differ(capture.load(), plain[key].load()), key
        assert capture.tensor_info == plain[key].tensor_info, key
    kinds = sorted({str(capture.metadata["storage"]) for capture in found.values()})
    sizes = [sum(path.stat().st_size for path in (folder / n).glob("*.pt")) for n in (name, f"{name}-plain")]
    return f"{len(found)} captures, {', '.join(kinds)}, {sizes[0] / sizes[1]:.2f} of the bytes"


def check_fsdp1(device: str, folder: Path) -> str:
    """Of one rank: the tensors of the same training without it, whole weights included."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = train(
            device, folder / "fsdp1", lambda model: FullyShardedDataParallel(model, use_orig_params=True), target=300,
            iterations=[0],
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
    plain = train(device, folder / "fsdp1-plain", target=300, iterations=[0])
    assert wrapped.keys() == plain.keys(), sorted(map(str, wrapped.keys() ^ plain.keys()))[:4]
    for key, capture in wrapped.items():
        assert not differ(capture.load(), plain[key].load()), key
    return f"{len(wrapped)} captures"


def check_trigger(device: str, folder: Path) -> str:
    """Captures begin with the iteration after a NaN."""
    found = train(device, folder / "trigger", target=100, iterations=None, num_iterations=4, trigger=["nan"])
    assert len(found) == 100 and {key.iteration for key in found} == {2}, {key.iteration for key in found}
    (event,) = {str(capture.metadata["trigger"]) for capture in found.values()}
    return f"{len(found)} captures, {event}"


def check_large(device: str, folder: Path) -> str:
    """Values larger than a buffer on the device, one after the other, each overwritten as soon as it was seen."""
    width, num_iterations = 4096 if device == "cuda" else 64, 2
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 3 * width, bias=False),
        torch.nn.ReLU(inplace=True),
        torch.nn.Linear(3 * width, 2 * width, bias=False),
        torch.nn.ReLU(inplace=True),
    ).to(device)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    expected: dict[tuple[int, str, str], torch.Tensor] = {}  # copied on the device, which nothing here waits for
    for name, linear in linears.items():
        linear.register_forward_hook(
            lambda _module, _inputs, output, name=name: expected.update({(iteration, name, "output"): output.clone()})
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(width, width, device=device, requires_grad=True)
    settings: dict[str, Any] = {"target": 12 * num_iterations, "iterations": list(range(num_iterations))}
    with qcollect.collect(model, "mxfp8", folder / "large", num_iterations=num_iterations, **settings) as run:
        for iteration in range(num_iterations):
            for name, linear in linears.items():
                expected[iteration, name, "weight"] = linear.weight.detach().clone()
            model(x).square().mean().backward()
            for name, linear in linears.items():
                assert linear.weight.grad is not None
                expected[iteration, name, "grad_weight"] = linear.weight.grad.clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            run.step()
    found = {(c.key.iteration, c.key.module, c.key.tensor_name): c for c in qcollect.open_run(folder / "large")}
    for key, value in expected.items():
        assert not differ(found[key].load(), value.cpu()), key
    largest = max(value.numel() * value.element_size() for value in expected.values())
    return f"{len(found)} captures, {len(expected)} compared, up to {largest >> 20} MiB"


@contextmanager
def refuse_to_wait() -> Iterator[None]:
    """Whatever torch waits for the device in is an error, in any thread; transformers may not look at positions."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_waiting(device: str, folder: Path) -> str:
    """Forward and backward of captured iterations, the first included, run without a wait."""
    watch = refuse_to_wait if device == "cuda" else nullcontext
    if device == "cuda":
        with watch(), suppress(RuntimeError):
            torch.ones(1, device=device).item()
            raise AssertionError("a wait goes unseen")
    stats: dict[str, Any] = {"mode": "stats", "target": None, "values": None}
    cases: dict[str, dict[str, Any]] = {
        "files": {},
        "nvfp4": {"quant_type": "nvfp4"},
        "fp8": {"quant_type": "fp8_e4m3"},
        "codes": {"storage": "codes", "scales": True},
        "dedupe": {"dedupe": True, "compress": "zstd"},
        "stats": {**stats, "shadow": ["mxfp4", "hifp8", "nvfp4"]},
        "stats nvfp4": {**stats, "quant_type": "nvfp4"},
    }
    nums = {
        name: len(train(device, folder / f"wait-{name}", watch=watch, **settings)) for name, settings in cases.items()
    }
    assert min(nums.values()) > 0, nums
    return ", ".join(f"{num} {name}" for name, num in nums.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", help="the name of a check, as it is printed; may be repeated")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print("SKIP: torch sees no CUDA device")
        return 77
    torch.use_deterministic_algorithms(True)
    print(torch.cuda.get_device_name() if device == "cuda" else "cpu", torch.__version__)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="qcollect-situations-") as name:
        folder = Path(name)
        checks: dict[str, Callable[[], str]] = {
            "codes": lambda: check_storage(device, folder, "codes", storage="codes"),
            "scales beside values": lambda: check_storage(device, folder, "scales", scales=True),
            "dedupe": lambda: check_storage(device, folder, "dedupe", dedupe=True),
            "FSDP1": lambda: check_fsdp1(device, folder),
            "trigger": lambda: check_trigger(device, folder),
            "large values": lambda: check_large(device, folder),
            "no waiting": lambda: check_no_waiting(device, folder),
        }
        for title, check in checks.items():
            if arguments.only and title not in arguments.only:
                continue
            try:
                print(f"ok    {title}: {check()}", flush=True)
            except Exception as error:
                failed += 1
                print(f"FAIL  {title}: {type(error).__name__}: {error}", flush=True)
                traceback.print_exc()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
