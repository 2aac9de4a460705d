"""What a run needs of the machine, one function a finding: facts in, findings out. Pure.

``doctor`` shows what these find, ``run`` and ``sweep`` are refused by it.
"""

import re
from collections.abc import Sequence

from qcollect.host.machine import MachineFacts
from qcollect.plan.finding import Finding
from qcollect.plan.inspection import Inspection
from qcollect.plan.memory import MemoryEstimate, estimate_memory
from qcollect.recipe.records import BYTES_TOKENIZER, Recipe

MIN_PYTHON, FIRST_UNTESTED_PYTHON = (3, 11), (3, 14)
# as in pyproject.toml; a test compares them
MIN_VERSIONS = {
    "torch": (2, 11),
    "transformers": (5, 17),
    "safetensors": (0, 5),
    "tokenizers": (0, 22),
    "zstandard": (0, 23),
}
_INSTALL = {"torch": "pip install --upgrade torch", "zstandard": "pip install 'qcollect[zstd]'"}
# transformers changes what models are made of with its major versions
TESTED_TRANSFORMERS_MAJOR = 5
MIN_OPEN_FILES = 1024
# NVIDIA's advice for NCCL in containers, whose default is 64 MiB
MIN_SHARED_MEMORY_BYTES = 1 << 30
_GIB = 1 << 30


def check_machine(facts: MachineFacts, recipe: Recipe) -> list[Finding]:
    """Everything that can be told without a look at model, data and devices."""
    return [
        check_system(facts),
        check_python(facts),
        *check_packages(facts, recipe),
        check_loopback(facts),
        check_host_name(facts),
        check_open_files(facts),
    ]


def check_system(facts: MachineFacts) -> Finding:
    """Supervision rests on prctl and /proc, which only Linux has."""
    if facts.system != "Linux":
        return Finding.problem(
            "system",
            f"{facts.system} has neither prctl nor /proc, and without them no run can be supervised",
            "start runs on Linux (a container will do); reading and analysing captures works here",
        )
    if not facts.has_proc:
        return Finding.problem(
            "system", "/proc is not mounted, and without it no run can be supervised", "mount -t proc proc /proc"
        )
    return Finding.ok("system", "Linux, with prctl and /proc to supervise a run")


def check_python(facts: MachineFacts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python < MIN_PYTHON:
        return Finding.problem(
            "python", f"Python {version} is older than {_dotted(MIN_PYTHON)}", "install qcollect under a newer one"
        )
    if facts.python >= FIRST_UNTESTED_PYTHON:
        return Finding.warning(
            "python",
            f"Python {version} is newer than what qcollect is tested with",
            f"if something fails, use one before {_dotted(FIRST_UNTESTED_PYTHON)}",
        )
    return Finding.ok("python", version)


def check_packages(facts: MachineFacts, recipe: Recipe) -> list[Finding]:
    """torch, and what the recipe's model, tokenizer and compression need beside it."""
    needed = ["torch", "transformers"]
    if recipe.model.checkpoint is not None:
        needed.append("safetensors")
    if (
        recipe.data.tokenizer or recipe.model.tokenizer or recipe.model.checkpoint or BYTES_TOKENIZER
    ) != BYTES_TOKENIZER:
        needed.append("tokenizers")
    if recipe.capture.compress == "zstd":
        needed.append("zstandard")
    return [_check_package(name, facts.packages.get(name)) for name in needed]


def _check_package(name: str, installed: str | None) -> Finding:
    least = MIN_VERSIONS[name]
    install = _INSTALL.get(name, "pip install 'qcollect[hf]'")
    if installed is None:
        return Finding.problem(name, f"{name} is not installed, and the recipe needs it", install)
    version = parse_version(installed)
    if version < least:
        return Finding.problem(name, f"{name} {installed} is older than {_dotted(least)}", install)
    if name == "transformers" and version[0] > TESTED_TRANSFORMERS_MAJOR:
        return Finding.warning(
            name,
            f"transformers {installed} is newer than what qcollect is tested with",
            f"if something fails: pip install 'transformers<{TESTED_TRANSFORMERS_MAJOR + 1}'",
        )
    return Finding.ok(name, installed)


def check_loopback(facts: MachineFacts) -> Finding:
    """The ranks of one node meet on 127.0.0.1, at a port that is free; a MASTER_PORT in the shell is not used."""
    if facts.loopback_problem is not None:
        return Finding.problem(
            "port",
            f"no port of 127.0.0.1 can be used: {facts.loopback_problem}",
            "the processes of a run meet there: bring the loopback interface up (ip link set lo up), or let the "
            "container have it",
        )
    return Finding.ok("port", "a free port of 127.0.0.1 can be used")


def check_host_name(facts: MachineFacts) -> Finding:
    if facts.host_name_problem is not None:
        return Finding.warning(
            "host_name",
            f"{facts.host_name!r} does not resolve: {facts.host_name_problem}",
            "it does not matter on one node, where everything goes over 127.0.0.1; for several add it to /etc/hosts",
        )
    return Finding.ok("host_name", f"{facts.host_name} resolves")


def check_open_files(facts: MachineFacts) -> Finding:
    if facts.max_open_files is not None and facts.max_open_files < MIN_OPEN_FILES:
        return Finding.warning(
            "open_files",
            f"a process may open {facts.max_open_files} files (ulimit -n)",
            f"raise it before a run with data loaders or several GPUs: ulimit -n {4 * MIN_OPEN_FILES}",
        )
    limit = "any number of" if facts.max_open_files is None else f"{facts.max_open_files:,}"
    return Finding.ok("open_files", f"a process may open {limit} files")


# ---------------------------------------------------------------------------------------------
# Once torch has been asked
# ---------------------------------------------------------------------------------------------


def check_devices(facts: MachineFacts, inspection: Inspection) -> list[Finding]:
    """What torch sees, and whether it overlooks what is there."""
    if inspection.device != "cpu":
        return [Finding.ok("devices", _describe_devices(inspection))]
    if not facts.device_files:
        return [Finding.ok("devices", "no accelerator is here; runs go on the CPU")]
    found = f"torch sees no accelerator, and {facts.device_files[0]} is there"
    if inspection.torch_accelerator is None:
        return [Finding.warning("devices", f"{found}: this torch is built for the CPU only", _OTHER_TORCH)]
    return [
        Finding.warning(
            "devices",
            f"{found}: the driver may be too old for a torch built for {inspection.torch_accelerator}, or "
            "CUDA_VISIBLE_DEVICES hides it",
            "compare with nvidia-smi, and see 'qcollect env'; as it is, runs go on the CPU",
        )
    ]


_OTHER_TORCH = "install a build for it (pytorch.org, 'Get Started'); as it is, runs go on the CPU"


def _describe_devices(inspection: Inspection) -> str:
    capabilities = [device.capability for device in inspection.devices] or [None] * len(inspection.device_names)
    named = [
        f"{inspection.device}:{i} {name}{f' (compute capability {capability})' if capability else ''}"
        for i, (name, capability) in enumerate(zip(inspection.device_names, capabilities, strict=True))
    ]
    built = f"; torch is built for {inspection.torch_accelerator}" if inspection.torch_accelerator else ""
    return f"{', '.join(named)}{built}"


def check_shared_memory(facts: MachineFacts, device: str, world_size: int) -> list[Finding]:
    """Nothing, unless several ranks talk through NCCL."""
    if device != "cuda" or world_size < 2:
        return []
    free = facts.shared_memory_bytes
    if free is None:
        return [Finding.ok("shared_memory", "there is no /dev/shm to run out of")]
    if free >= MIN_SHARED_MEMORY_BYTES:
        return [Finding.ok("shared_memory", f"/dev/shm has {_gib(free)} free")]
    return [
        Finding.warning(
            "shared_memory",
            f"/dev/shm has {free:,} bytes free, and NCCL passes data of several GPUs through it",
            "give the container more: docker run --shm-size=1g",
        )
    ]


def check_memory(
    facts: MachineFacts, recipe: Recipe, inspection: Inspection, device: str, world_size: int
) -> list[Finding]:
    """Whether each rank's model, optimizer and activations fit where they go (see ``plan.memory``)."""
    estimate = estimate_memory(recipe, inspection, device)
    if device == "cpu":
        where = f"{_gib(facts.available_bytes)} of memory are available for {_ranks(world_size)}"
        return [_compare(estimate, where, facts.available_bytes // world_size)]
    return [
        _compare(
            estimate, f"{device}:{i} {d.name} has {_gib(d.free_bytes)} free of {_gib(d.total_bytes)}", d.free_bytes
        )
        for i, d in enumerate(inspection.devices[:world_size])
        if d.free_bytes is not None and d.total_bytes is not None
    ]


def _compare(estimate: MemoryEstimate, where: str, free_bytes: int) -> Finding:
    needs = f"{where}; a rank takes about {_gib(estimate.num_bytes)}"
    states = f"{_gib(estimate.state_bytes)} of weights, gradients and optimizer states"
    if estimate.state_bytes > free_bytes:
        return Finding.problem("memory", f"{needs}, {states} alone, which do not fit", _LESS_MODEL)
    if estimate.num_bytes > free_bytes:
        return Finding.warning("memory", f"{needs}, {states} and the rest activations: it may run out", _LESS_DATA)
    return Finding.ok("memory", f"{needs} ({states})")


_LESS_MODEL = "take a smaller model, fewer processes (--nproc) or a larger device; end what else runs there"
_LESS_DATA = (
    "shorten data.sequence_length, lower train.micro_batch_size (on a CPU --nproc too), or "
    "--set train.activation_checkpointing=non_reentrant"
)


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version: (2, 13, 0) of ``2.13.0+cpu``, (2, 11, 0) of ``2.11.0rc1``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
