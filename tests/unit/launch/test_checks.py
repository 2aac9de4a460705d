"""What a run needs of a machine: facts in, findings out, each with what to do."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from qcollect.host.machine import MachineFacts
from qcollect.launch import checks
from qcollect.launch.checks import (
    MIN_VERSIONS,
    check_devices,
    check_host_name,
    check_loopback,
    check_machine,
    check_memory,
    check_open_files,
    check_packages,
    check_python,
    check_shared_memory,
    check_system,
    parse_version,
)
from qcollect.plan.finding import Level
from qcollect.plan.inspection import Device, Inspection
from qcollect.recipe.load import load_recipe

GIB = 1 << 30
FACTS = MachineFacts(
    system="Linux",
    has_proc=True,
    python=(3, 12, 1),
    packages={"torch": "2.13.0+cpu", "transformers": "5.24.0", "safetensors": "0.8.0", "tokenizers": "0.23.3"},
    host_name="node7",
    host_name_problem=None,
    loopback_problem=None,
    available_bytes=64 * GIB,
    max_open_files=20_000,
    shared_memory_bytes=8 * GIB,
    device_files=(),
)
ONE_CARD = Device(name="NVIDIA H100", free_bytes=78 * GIB, total_bytes=80 * GIB, capability="9.0")
INSPECTION = Inspection(
    modules=(), excluded=(), vocab_size=0, num_parameters=GIB, device="cuda", device_names=("NVIDIA H100",),
    devices=(ONE_CARD,), torch_accelerator="CUDA 13.0",
)  # fmt: skip


@pytest.fixture
def tiny():
    return load_recipe("tiny")


def with_package(name, version):
    return replace(FACTS, packages=FACTS.packages | {name: version})


def test_a_machine_with_everything_gives_a_line_a_check(tiny):
    findings = check_machine(FACTS, tiny)
    assert {f.level for f in findings} == {Level.OK}
    assert [f.check for f in findings] == [
        "system", "python", "torch", "transformers", "port", "host_name", "open_files",
    ]  # fmt: skip


def test_a_checkpoint_needs_more_packages():
    recipe = load_recipe("smollm2_135m_wikipedia")
    names = [f.check for f in check_packages(FACTS, recipe)]
    assert names == ["torch", "transformers", "safetensors", "tokenizers"]


def test_compression_needs_its_package(tiny):
    recipe = replace(tiny, capture=replace(tiny.capture, compress="zstd"))
    finding = next(f for f in check_packages(FACTS, recipe) if f.check == "zstandard")
    assert (finding.level, finding.text) == (
        Level.PROBLEM,
        "zstandard is not installed, and the recipe needs it; pip install 'qcollect[zstd]'",
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            replace(FACTS, system="Darwin"),
            "Darwin has neither prctl nor /proc, and without them no run can be supervised; "
            "start runs on Linux (a container will do); reading and analysing captures works here",
        ),
        (
            replace(FACTS, has_proc=False),
            "/proc is not mounted, and without it no run can be supervised; mount -t proc proc /proc",
        ),
    ],
)
def test_a_system_where_no_run_can_be_supervised_is_refused(facts, text):
    assert (check_system(facts).level, check_system(facts).text) == (Level.PROBLEM, text)


@pytest.mark.parametrize(
    ("version", "level", "text"),
    [
        ((3, 10, 9), Level.PROBLEM, "Python 3.10.9 is older than 3.11; install qcollect under a newer one"),
        ((3, 11, 0), Level.OK, "3.11.0"),
        (
            (3, 14, 0),
            Level.WARNING,
            "Python 3.14.0 is newer than what qcollect is tested with; if something fails, use one before 3.14",
        ),
    ],
)
def test_the_python_that_is_needed(version, level, text):
    finding = check_python(replace(FACTS, python=version))
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(
    ("name", "version", "level", "text"),
    [
        (
            "torch",
            None,
            Level.PROBLEM,
            "torch is not installed, and the recipe needs it; pip install --upgrade torch",
        ),
        ("torch", "2.10.1+cu130", Level.PROBLEM, "torch 2.10.1+cu130 is older than 2.11; pip install --upgrade torch"),
        ("torch", "2.11.0rc1", Level.OK, "2.11.0rc1"),
        (
            "transformers",
            None,
            Level.PROBLEM,
            "transformers is not installed, and the recipe needs it; pip install 'qcollect[hf]'",
        ),
        (
            "transformers",
            "4.57.0",
            Level.PROBLEM,
            "transformers 4.57.0 is older than 5.17; pip install 'qcollect[hf]'",
        ),
        (
            "transformers",
            "6.0.0",
            Level.WARNING,
            "transformers 6.0.0 is newer than what qcollect is tested with; "
            "if something fails: pip install 'transformers<6'",
        ),
    ],
)
def test_the_packages_that_are_needed(tiny, name, version, level, text):
    (finding,) = (f for f in check_packages(with_package(name, version), tiny) if f.check == name)
    assert (finding.level, finding.text) == (level, text)


def test_the_least_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(e for name in ("hf", "zstd") for e in project["optional-dependencies"][name])]
    declared = dict(entry.split(">=") for entry in wanted)
    assert {name: parse_version(declared[name]) for name in MIN_VERSIONS} == MIN_VERSIONS
    assert project["requires-python"] == ">={}.{},<{}.{}".format(*checks.MIN_PYTHON, *checks.FIRST_UNTESTED_PYTHON)


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cpu", (2, 13, 0)), ("2.11.0rc1", (2, 11, 0)), ("2.11a0+git", (2, 11)), ("5", (5,)), ("unknown", (0,))],
)
def test_a_version_is_the_numbers_it_begins_with(text, version):
    assert parse_version(text) == version


def test_a_loopback_without_ports_is_refused():
    finding = check_loopback(replace(FACTS, loopback_problem="Cannot assign requested address"))
    assert finding.level == Level.PROBLEM
    assert finding.text == (
        "no port of 127.0.0.1 can be used: Cannot assign requested address; the processes of a run meet there: "
        "bring the loopback interface up (ip link set lo up), or let the container have it"
    )


def test_a_host_name_that_does_not_resolve_is_only_a_warning():
    finding = check_host_name(replace(FACTS, host_name_problem="Name or service not known"))
    assert finding.level == Level.WARNING
    assert finding.text == (
        "'node7' does not resolve: Name or service not known; it does not matter on one node, where everything goes "
        "over 127.0.0.1; for several add it to /etc/hosts"
    )


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        (
            256,
            Level.WARNING,
            "a process may open 256 files (ulimit -n); "
            "raise it before a run with data loaders or several GPUs: ulimit -n 4096",
        ),
        (1024, Level.OK, "a process may open 1,024 files"),
        (None, Level.OK, "a process may open any number of files"),
    ],
)
def test_the_limit_of_open_files(limit, level, text):
    finding = check_open_files(replace(FACTS, max_open_files=limit))
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(
    ("free", "level", "text"),
    [
        (
            64 << 20,
            Level.WARNING,
            "/dev/shm has 67,108,864 bytes free, and NCCL passes data of several GPUs through it; "
            "give the container more: docker run --shm-size=1g",
        ),
        (8 * GIB, Level.OK, "/dev/shm has 8.0 GiB free"),
        (None, Level.OK, "there is no /dev/shm to run out of"),
    ],
)
def test_shared_memory_of_several_gpus(free, level, text):
    (finding,) = check_shared_memory(replace(FACTS, shared_memory_bytes=free), "cuda", 2)
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cuda", 1)])
def test_shared_memory_does_not_matter_without_nccl(device, world_size):
    assert check_shared_memory(replace(FACTS, shared_memory_bytes=0), device, world_size) == []


# ---------------------------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------------------------


def test_devices_are_named_with_what_torch_tells_of_them():
    (finding,) = check_devices(FACTS, INSPECTION)
    assert finding.message == "cuda:0 NVIDIA H100 (compute capability 9.0); torch is built for CUDA 13.0"
    (finding,) = check_devices(FACTS, replace(INSPECTION, devices=(), torch_accelerator=None))
    assert finding.message == "cuda:0 NVIDIA H100"


ON_CPU = replace(INSPECTION, device="cpu", device_names=(), devices=(), torch_accelerator=None)


@pytest.mark.parametrize(
    ("files", "built_for", "level", "text"),
    [
        ((), None, Level.OK, "no accelerator is here; runs go on the CPU"),
        (
            ("/dev/nvidia0",),
            None,
            Level.WARNING,
            "torch sees no accelerator, and /dev/nvidia0 is there: this torch is built for the CPU only; "
            "install a build for it (pytorch.org, 'Get Started'); as it is, runs go on the CPU",
        ),
        (
            ("/dev/nvidia0",),
            "CUDA 13.0",
            Level.WARNING,
            "torch sees no accelerator, and /dev/nvidia0 is there: the driver may be too old for a torch built for "
            "CUDA 13.0, or CUDA_VISIBLE_DEVICES hides it; "
            "compare with nvidia-smi, and see 'qcollect env'; as it is, runs go on the CPU",
        ),
    ],
)
def test_devices_that_torch_overlooks_are_warned_of(files, built_for, level, text):
    (finding,) = check_devices(replace(FACTS, device_files=files), replace(ON_CPU, torch_accelerator=built_for))
    assert (finding.level, finding.text) == (level, text)


# ---------------------------------------------------------------------------------------------
# Memory: of 1 Gi parameters in bf16 the states alone are 20 GiB, and a device's context takes 1
# ---------------------------------------------------------------------------------------------


def card(free_gib, name="NVIDIA H100"):
    return Device(name=name, free_bytes=int(free_gib * GIB), total_bytes=80 * GIB)


@pytest.mark.parametrize(
    ("free_gib", "level", "text"),
    [
        (
            78,
            Level.OK,
            "cuda:0 NVIDIA H100 has 78.0 GiB free of 80.0 GiB; a rank takes about 21.0 GiB "
            "(20.0 GiB of weights, gradients and optimizer states)",
        ),
        (
            20.5,
            Level.WARNING,
            "cuda:0 NVIDIA H100 has 20.5 GiB free of 80.0 GiB; a rank takes about 21.0 GiB, 20.0 GiB of weights, "
            "gradients and optimizer states and the rest activations: it may run out; shorten data.sequence_length, "
            "lower train.micro_batch_size (on a CPU --nproc too), or "
            "--set train.activation_checkpointing=non_reentrant",
        ),
        (
            19.9,
            Level.PROBLEM,
            "cuda:0 NVIDIA H100 has 19.9 GiB free of 80.0 GiB; a rank takes about 21.0 GiB, 20.0 GiB of weights, "
            "gradients and optimizer states alone, which do not fit; take a smaller model, fewer processes (--nproc) "
            "or a larger device; end what else runs there",
        ),
    ],
)
def test_memory_of_a_device(tiny, free_gib, level, text):
    inspection = replace(INSPECTION, devices=(card(free_gib),))
    (finding,) = check_memory(FACTS, tiny, inspection, "cuda", 1)
    assert (finding.level, finding.text) == (level, text)


def test_each_device_that_is_used_is_judged_by_itself(tiny):
    inspection = replace(INSPECTION, device_names=("A", "B", "C"), devices=(card(78, "A"), card(5, "B"), card(1, "C")))
    findings = check_memory(FACTS, tiny, inspection, "cuda", 2)
    assert [(f.level, f.message[:8]) for f in findings] == [(Level.OK, "cuda:0 A"), (Level.PROBLEM, "cuda:1 B")]


def test_a_device_that_does_not_tell_its_memory_is_not_judged(tiny):
    assert check_memory(FACTS, tiny, replace(INSPECTION, devices=(Device(name="A"),)), "cuda", 1) == []
    assert check_memory(FACTS, tiny, replace(INSPECTION, devices=()), "cuda", 1) == []


@pytest.mark.parametrize(("world_size", "level"), [(1, Level.OK), (3, Level.WARNING), (4, Level.PROBLEM)])
def test_ranks_on_the_cpu_share_its_memory(tiny, world_size, level):
    facts = replace(FACTS, available_bytes=61 * GIB)
    (finding,) = check_memory(facts, tiny, ON_CPU, "cpu", world_size)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    assert finding.level == level
    assert finding.message.startswith(f"61.0 GiB of memory are available for {ranks}; a rank takes about 20.6 GiB")
