"""Recipe + inspection + host facts -> plan. Pure: reads no file, no environment, no clock."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qcollect.errors import DeviceError
from qcollect.paths import RunPaths
from qcollect.plan.devices import (
    ORDER_VARIABLE,
    PCI_ORDER,
    VISIBLE_VARIABLE,
    RankDevice,
    assign_devices,
    device_environment,
    parse_visible_devices,
    warn_of_hidden_devices,
)
from qcollect.plan.inspection import Inspection
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Schedule, build_schedule, choose_captures, warn_of_small_target
from qcollect.recipe.records import Recipe
from qcollect.recipe.selectors import match_names

# Variables of a launch around this one; torchrun sets its own, and takes the PET_ ones (set by job
# schedulers) for flags that are not given: other nodes to wait for, restarts that capture again, ...
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_RDZV_CONF",
    "PET_MAX_RESTARTS",
    "PET_NO_PYTHON",
    "PET_RUN_PATH",
    "PET_VIRTUAL_LOCAL_RANK",
)


def schedule_for(recipe: Recipe, quant_type: str, inspection: Inspection, world_size: int) -> Schedule:
    """The schedule of ``recipe`` under ``quant_type`` on ``world_size`` ranks.

    Raises:
        SelectionError: a selector matches nothing.
        ScheduleError: the target cannot be reached.
    """
    if recipe.quant.exclude:
        match_names(recipe.quant.exclude, _excludable(inspection), key="quant.exclude")
    return build_schedule(
        choose_captures(inspection.modules, replace(recipe.quant, type=quant_type), recipe.capture),
        recipe.capture,
        world_size=world_size,
        num_iterations=recipe.train.iterations,
        micro_batches=recipe.train.micro_batches,
        micro_batch_size=recipe.train.micro_batch_size,
    )


def _excludable(inspection: Inspection) -> list[str]:
    """What ``quant.exclude`` can name with effect, or names without need: not a module that only holds others."""
    names = [m.module for m in inspection.modules]
    return names + [e for e in inspection.excluded if not any(name.startswith(f"{e}.") for name in names)]


def choose_world_size(recipe: Recipe, inspection: Inspection, user_value: str | None = None) -> int:
    """``launch.nproc``, else one process a visible device, else one on the CPU.

    Args:
        recipe: what is asked for.
        inspection: what torch sees, with ``device_environment`` applied.
        user_value: CUDA_VISIBLE_DEVICES of the user's shell; None: unset.

    Raises:
        DeviceError: more processes than devices, or a device type or a device that is not here.
    """
    asked, num_devices = recipe.launch.nproc, len(inspection.device_names)
    if recipe.launch.device not in ("auto", "cpu", inspection.device):
        raise DeviceError(
            f"launch.device is {recipe.launch.device!r}, and this machine's torch sees "
            f"{inspection.device!r} only{_hiding(user_value)}; set launch.device=auto or install a torch build for it"
        )
    if recipe.launch.device != "cpu":
        _check_gpu_ids(recipe, inspection, user_value)
    if device_type(recipe, inspection) == "cpu":
        return asked or 1
    if asked is not None and asked > num_devices:
        source = _source_of_devices(recipe, user_value) if inspection.device == "cuda" else ""
        raise DeviceError(
            f"--nproc {asked} is more than the {num_devices} visible {inspection.device} device(s)"
            f"{source and f' of {source}'} ({', '.join(inspection.device_names)}); lower --nproc, or make more visible "
            f"with {VISIBLE_VARIABLE if source.startswith(VISIBLE_VARIABLE) else '--gpu-ids'}"
        )
    return asked or num_devices


def _check_gpu_ids(recipe: Recipe, inspection: Inspection, user_value: str | None) -> None:
    """Refuse ``--gpu-ids`` that torch does not see all of."""
    gpu_ids, num_devices = recipe.launch.gpu_ids, len(inspection.device_names)
    if gpu_ids is None:
        return
    if inspection.device not in ("cuda", "cpu"):
        raise DeviceError(
            f"--gpu-ids {','.join(gpu_ids)} chooses among CUDA devices, and this machine's torch sees "
            f"{inspection.device!r}; leave it out"
        )
    if num_devices == len(gpu_ids):
        return
    advice = (
        "compare with nvidia-smi -L (an id that does not exist hides every one after it, and a process sees one MIG "
        "instance only)"
        if num_devices
        else "leave it out to run on the CPU, or see with 'qcollect env' and nvidia-smi -L what is here"
    )
    within = "" if user_value is None else f" of {parse_visible_devices(user_value)}"
    raise DeviceError(
        f"--gpu-ids {','.join(gpu_ids)} names {len(gpu_ids)} device(s){within} and torch sees {num_devices or 'none'} "
        f"of them; {advice}"
    )


def _source_of_devices(recipe: Recipe, user_value: str | None) -> str:
    """What limits the visible devices, as the user wrote it; empty if nothing does."""
    if recipe.launch.gpu_ids is not None:
        return f"--gpu-ids {','.join(recipe.launch.gpu_ids)}"
    return "" if user_value is None else str(parse_visible_devices(user_value))


def _hiding(user_value: str | None) -> str:
    """That CUDA_VISIBLE_DEVICES makes no device visible, where it does so."""
    if user_value is None or (visible := parse_visible_devices(user_value)).entries:
        return ""
    why = f" ({visible.explain_hidden()})" if visible.hides_by_mistake else ""
    return f", as {visible} makes none visible{why}"


def device_type(recipe: Recipe, inspection: Inspection) -> str:
    return inspection.device if recipe.launch.device == "auto" else recipe.launch.device


def build_plan(
    recipe: Recipe,
    quant_type: str,
    inspection: Inspection,
    *,
    out_dir: Path,
    script_args: Sequence[str],
    python: str,
    num_cores: int,
    loopback: str | None,
    run_id: str,
    run_token: str,
    user_visible_devices: str | None = None,
    user_device_order: str | None = None,
) -> Plan:
    """The resolved launch of ``quant_type`` into ``out_dir/quant_type``.

    ``loopback`` names the interface ranks of one node talk over (gloo, and what NCCL needs to begin);
    ``user_visible_devices`` and ``user_device_order`` are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of
    the user's shell (None: unset).

    Raises:
        FormatError, SelectionError, ScheduleError, DeviceError: as the functions above.
        UsageError: ``launch.gpu_ids`` that cannot be meant.
    """
    recipe = replace(recipe, quant=replace(recipe.quant, type=quant_type))
    device = device_type(recipe, inspection)
    device_env = device_environment(recipe.launch.gpu_ids, user_visible_devices, recipe.launch.device)
    world_size = choose_world_size(recipe, inspection, user_visible_devices)
    if device == "cpu":
        device_env = {}
    schedule = schedule_for(recipe, quant_type, inspection, world_size)
    warning = warn_of_small_target(schedule, recipe.capture)
    device_warning = _warn_of_devices(recipe, inspection, user_visible_devices)
    run_dir = out_dir / quant_type
    torchrun = _torchrun_arguments(world_size, RunPaths(run_dir).torchrun_dir, script_args)
    return Plan(
        run_id=run_id,
        run_token=run_token,
        run_dir=run_dir,
        quant_type=quant_type,
        recipe=recipe,
        world_size=world_size,
        device=device,
        torchrun_argv=("torchrun", *torchrun),
        agent_argv=(python, "-m", "qcollect.launch.agent", *torchrun),
        env=_worker_environment(recipe, run_dir, run_token, max(1, num_cores // world_size), loopback) | device_env,
        unset=RANK_VARIABLES,
        script_args=tuple(script_args),
        schedule=schedule,
        excluded=inspection.excluded,
        devices=_rank_devices(world_size, device, inspection, device_env, user_device_order),
        warnings=(*inspection.warnings, *(w for w in (warning, device_warning) if w is not None)),
    )


def _rank_devices(
    world_size: int, device: str, inspection: Inspection, env: dict[str, str], user_order: str | None
) -> tuple[RankDevice, ...]:
    return assign_devices(
        world_size,
        device,
        inspection.device_names,
        inspection.device_uuids,
        visible_value=env.get(VISIBLE_VARIABLE),
        is_pci_order=env.get(ORDER_VARIABLE, user_order) == PCI_ORDER,
    )


def _warn_of_devices(recipe: Recipe, inspection: Inspection, user_value: str | None) -> str | None:
    """What the user asked of devices and does not get."""
    gpu_ids = recipe.launch.gpu_ids
    if recipe.launch.device == "cpu":
        return None if gpu_ids is None else f"launch.device is 'cpu': --gpu-ids {','.join(gpu_ids)} is not used"
    if gpu_ids is not None or inspection.device not in ("cuda", "cpu"):
        return None
    return warn_of_hidden_devices(user_value, len(inspection.device_names))


def _torchrun_arguments(world_size: int, log_dir: Path, script_args: Sequence[str]) -> tuple[str, ...]:
    # --standalone picks a free port; --local-addr keeps a host name that does not resolve out of it;
    # without --log-dir torchrun leaves a folder in /tmp
    options = ("--standalone", "--local-addr", "127.0.0.1", "--log-dir", str(log_dir))
    return (*options, "--nproc-per-node", str(world_size), "-m", "qcollect.worker", *script_args)


def _worker_environment(
    recipe: Recipe, run_dir: Path, run_token: str, num_threads: int, loopback: str | None
) -> dict[str, str]:
    env = {
        "CUSTOM_QUANT_TYPE": recipe.quant.type,
        "TENSOR_SAVE_DIR": str(run_dir),
        "TENSOR_SAVE_ENABLED": "true",
        "TENSOR_SAVER_ITERATION": "0",
        "CURRENT_SAMPLE_IDX": "0",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": str(recipe.launch.omp_num_threads or num_threads),
        "PYTHONUNBUFFERED": "1",
        "QCOLLECT_PLAN": str(RunPaths(run_dir).plan_path),
        "QCOLLECT_RUN_TOKEN": run_token,
    }
    if loopback is not None:
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = loopback
    if recipe.train.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return env
