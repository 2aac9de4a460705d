"""How fast quantization on the CPU is: against ``copy_`` into memory that is there, plain torch, and three libraries.

    python tests/bench/formats_cpu.py                          this package alone
    python tests/bench/formats_cpu.py --torchao PYTHON --quark PYTHON --en-dtypes PYTHON --json FILE

PYTHON is that of an environment with torch and torchao (its mx_tensor, eager), amd-quark (its C++, compiled when it is
first used, which takes a minute), or en_dtypes (its HiFloat8 of numpy, to codes and back, by one thread). What is
timed here is the public call, ``fake_quantize(..., out=out)``, with the abs max of types that need one, once its parts
have been compiled. Each library runs in a process of its own and waits while the others work. In every round each of
them quantizes one tensor, the next of six, so that load on the machine falls on all alike and no cache holds the
input. Ratios are of medians. Nothing fails because of a time; what a library cannot do is skipped with a reason.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_INPUTS = 6
TYPES = ("mxfp8", "mxfp4", "hifp8", "nvfp4", "fp8_e4m3", "hif4", "bf16")
STOCHASTIC = {"rounding": "stochastic", "seed": 1}
# Beside each type as it is: (type, axis, settings).
OTHERS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("mxfp8", -1, {"block_size": (32, 32)}),
    ("nvfp4", -1, {"block_size": (16, 16)}),
    *((name, axis, STOCHASTIC) for name in ("mxfp8", "mxfp4", "hifp8", "nvfp4") for axis in (-1, 0)),
)
SLOW_STEPS = "stochastic"  # in plain torch: seconds, which are not waited for in every round
# What the libraries call the elements of the types they have.
ELEMENTS = {
    "torchao": {"mxfp8": "float8_e4m3fn", "mxfp4": "float4"},
    "quark": {"mxfp8": "fp8_e4m3", "mxfp4": "fp4"},
    "en_dtypes": {"hifp8": "hifloat8"},
}
LIMITS = {"copy": 4.0, "quark": 0.4, "torchao": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One type along one axis; medians in milliseconds, None where nothing is measured."""

    quant_type: str
    axis: int
    settings: dict[str, Any]
    copy_ms: float
    eager_ms: float | None
    compiled_ms: float
    peers_ms: dict[str, float]

    def ratios(self) -> dict[str, float | None]:
        others = {"copy": self.copy_ms, "eager": self.eager_ms} | self.peers_ms
        return {name: None if other is None else self.compiled_ms / other for name, other in others.items()}


def main() -> None:
    arguments = parse()
    if arguments.peer:
        serve(arguments)
        return
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(arguments.threads)
    prepare_s = prepare(arguments)
    peers = {name: start_peer(name, getattr(arguments, name), arguments) for name in ELEMENTS}
    rows = []
    for quant_type, axis, settings in cases(arguments):
        rows.append(measure(quant_type, axis, settings, peers, arguments))
        print_row(rows[-1])
    if arguments.json:
        facts = {
            "cpu": processor(),
            "threads": arguments.threads,
            "size": arguments.size,
            "rounds": arguments.rounds,
            "torch": torch.__version__,
            "prepare_s": prepare_s,
            "rows": [asdict(row) | {"ratios": row.ratios()} for row in rows],
        }
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def cases(arguments: argparse.Namespace) -> list[tuple[str, int, dict[str, Any]]]:
    plain: list[tuple[str, int, dict[str, Any]]] = [(name, axis, {}) for name in arguments.types for axis in (-1, 0)]
    return plain + [case for case in OTHERS if case[0] in arguments.types]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the float32 input")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--cache-dir", type=Path, help="where compiled code is kept (the user's cache folder)")
    parser.add_argument("--torchao", type=Path, metavar="PYTHON", help="python of an environment with torchao")
    parser.add_argument("--quark", type=Path, metavar="PYTHON", help="python of an environment with amd-quark")
    parser.add_argument("--en-dtypes", type=Path, metavar="PYTHON", help="python of an environment with en_dtypes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--peer", choices=tuple(ELEMENTS), help=argparse.SUPPRESS)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------
# This package
# ---------------------------------------------------------------------------------------------


def prepare(arguments: argparse.Namespace) -> float:
    """Seconds until all types can be run."""
    import torch

    from qcollect.formats import compiled

    start_s = time.perf_counter()
    choices = [choices_of(quant_type, axis, settings) for quant_type, axis, settings in cases(arguments)]
    is_ready, reason = compiled.prepare(choices, [torch.float32], cache_dir=arguments.cache_dir)
    if not is_ready:
        sys.exit(f"nothing to measure: {reason}")
    seconds = time.perf_counter() - start_s
    print(f"prepared in {seconds:.1f} s", file=sys.stderr)
    return seconds


def choices_of(quant_type: str, axis: int, settings: dict[str, Any]) -> Any:
    import torch

    from qcollect.formats.quantizer import Quantizer

    settings = dict(settings)
    seed = settings.pop("seed", 0)
    return Quantizer.create(quant_type, axis=axis, **settings).choices(axis % 2, torch.float32, seed)


def by_steps(x: Any, out: Any, choices: Any, encode: Any) -> None:
    from qcollect.formats.eager import limit_values, restore_values, round_values, scale_values

    scaled = scale_values(x, choices, encode)
    round_values(scaled, x, choices)
    limit_values(scaled, choices)
    restore_values(scaled)
    out.copy_(scaled.blocks.cut(x.shape))


def measure(
    quant_type: str,
    axis: int,
    settings: dict[str, Any],
    peers: dict[str, "Peer | None"],
    arguments: argparse.Namespace,
) -> Row:
    import torch

    from qcollect.formats import compiled
    from qcollect.formats.quantizer import fake_quantize
    from qcollect.formats.scales import tensor_amax, tensor_encode

    inputs, out = make_inputs(arguments.size)
    choices = choices_of(quant_type, axis, settings)
    tensor_scale = choices.quant_type.tensor_scale
    has_encode = tensor_scale is not None and tensor_scale.is_inherent
    assert compiled.supports(inputs[0], choices, has_encode=has_encode)

    def by_plain_torch(x: Any) -> None:
        encode = tensor_encode(tensor_amax(x, tensor_scale), tensor_scale, choices.scale_rule) if has_encode else None
        by_steps(x, out, choices, encode)

    ways: dict[str, Callable[[Any], object]] = {
        "copy": lambda x: out.copy_(x),
        "eager": by_plain_torch,
        "compiled": lambda x: fake_quantize(x, quant_type, axis, **settings, out=out),
    }
    if settings.get("rounding") == SLOW_STEPS:
        del ways["eager"]
    peers = {} if settings else peers
    asked = {name: peer for name, peer in peers.items() if peer is not None and quant_type in ELEMENTS[name]}
    times_ms: dict[str, list[float]] = {name: [] for name in (*ways, *asked)}
    with torch.no_grad():
        for number in range(arguments.rounds + 1):
            for place, (name, way) in enumerate(ways.items()):
                x = inputs[(number * len(ways) + place) % NUM_INPUTS]
                start_s = time.perf_counter()
                way(x)
                times_ms[name].append((time.perf_counter() - start_s) * 1e3)
            for name, peer in asked.items():
                times_ms[name].append(peer.time_ms(quant_type, axis))
    medians = {name: statistics.median(times[1:]) for name, times in times_ms.items()}  # the first warms up
    return Row(
        quant_type=quant_type,
        axis=axis,
        settings=settings,
        copy_ms=medians["copy"],
        eager_ms=medians.get("eager"),
        compiled_ms=medians["compiled"],
        peers_ms={name: medians[name] for name in asked},
    )


def make_inputs(size: int) -> tuple[list[Any], Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, size, generator=generator) for _ in range(NUM_INPUTS)]
    return inputs, torch.zeros(size, size)


def print_row(row: Row) -> None:
    name = " ".join([row.quant_type, *(f"{key}={value}" for key, value in row.settings.items())])
    texts = [f"{name:8} axis {row.axis:2}  compiled {row.compiled_ms:6.1f} ms"]
    for name, ratio in row.ratios().items():
        if ratio is None:
            continue
        limit = LIMITS.get(name)
        texts.append(f"{ratio:.2f} x {name}" + (f" (at most {limit})" if limit is not None else ""))
    print("  ".join(texts), flush=True)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, 'unknown')}, {os.cpu_count()} logical cores"


# ---------------------------------------------------------------------------------------------
# Libraries, each in a process of its own
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's process: a line in, the milliseconds of one quantization out."""

    process: "subprocess.Popen[str]"

    def time_ms(self, quant_type: str, axis: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{quant_type} {axis}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def start_peer(name: str, python: Path | None, arguments: argparse.Namespace) -> Peer | None:
    """A library that is ready to be asked; None, and a line that says why, where it is not."""
    if python is None:
        print(f"{name}: skipped, no --{name.replace('_', '-')} PYTHON", file=sys.stderr)
        return None
    command = [str(python), __file__, "--peer", name, "--size", str(arguments.size)]
    command += ["--threads", str(arguments.threads)]
    # its compiler may need what is beside its python (ninja); its threads are not to spin while others are measured
    environment = os.environ | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_WAIT_POLICY": "passive",
    }
    environment.pop("PYTHONPATH", None)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        print(f"{name}: skipped, {error}", file=sys.stderr)
        return None
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if not answer.startswith("ready"):
        process.kill()
        print(f"{name}: skipped, {answer or 'it ended without a word'}", file=sys.stderr)
        return None
    print(f"{name}: {answer}", file=sys.stderr)
    return Peer(process)


def serve(arguments: argparse.Namespace) -> None:
    """A library's side: until its input ends, one quantization for each line."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print to stdout as they like
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(arguments.threads)
    try:
        quantize = QUANTIZERS[arguments.peer]()
        inputs, _ = make_inputs(arguments.size)
        for quant_type in ELEMENTS[arguments.peer]:
            quantize(inputs[0][:64], quant_type, -1)
    except Exception as error:  # whatever is wrong there is the reason to skip it
        answers.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n")
        return
    answers.write(f"ready, torch {torch.__version__}\n")
    answers.flush()
    with torch.no_grad():
        for number, line in enumerate(sys.stdin):
            quant_type, axis = line.split()
            start_s = time.perf_counter()
            quantize(inputs[number % NUM_INPUTS], quant_type, int(axis))
            answers.write(f"{(time.perf_counter() - start_s) * 1e3}\n")
            answers.flush()


def torchao_quantizer() -> Callable[[Any, str, int], object]:
    """To codes and scales along the last axis and back; another axis is transposed there and back."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    elements = {"float8_e4m3fn": torch.float8_e4m3fn, "float4": getattr(torch, "float4_e2m1fn_x2", "fp4_e2m1")}

    def quantize(x: Any, quant_type: str, axis: int) -> Any:
        element = elements[ELEMENTS["torchao"][quant_type]]
        source = x if axis == -1 else x.t().contiguous()
        scale, codes = to_mx(source, element, 32)
        values = to_dtype(codes, scale, element, 32, torch.float32)
        return values if axis == -1 else values.t().contiguous()

    return quantize


def quark_quantizer() -> Callable[[Any, str, int], object]:
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    def quantize(x: Any, quant_type: str, axis: int) -> Any:
        return fake_quantize_mx(
            input_tensor=x,
            quant_dtype="mx",
            mx_element_dtype=ELEMENTS["quark"][quant_type],
            axis=axis,
            block_size=32,
            scale_calculation_mode="floor",
        )

    return quantize


def en_dtypes_quantizer() -> Callable[[Any, str, int], object]:
    import en_dtypes

    def quantize(x: Any, quant_type: str, axis: int) -> Any:
        dtype = getattr(en_dtypes, ELEMENTS["en_dtypes"][quant_type])
        return x.numpy().astype(dtype).astype("float32")

    return quantize


QUANTIZERS = {"torchao": torchao_quantizer, "quark": quark_quantizer, "en_dtypes": en_dtypes_quantizer}

if __name__ == "__main__":
    main()
