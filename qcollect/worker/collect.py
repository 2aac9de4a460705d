"""``qcollect.collect``: capture from any torch model, with or without the launcher."""

import os
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator
from torch import nn

from qcollect.errors import UsageError
from qcollect.formats.catalog import get_quant_type
from qcollect.plan.record import Plan
from qcollect.plan.schedule import ModuleSites, build_schedule, choose_captures, warn_of_small_target
from qcollect.recipe.origins import Origins
from qcollect.recipe.problems import explain
from qcollect.recipe.records import CaptureSpec, QuantSpec, capture_from_dict
from qcollect.recipe.schema import CaptureModel, QuantModel, Section, check_shadows, read_shadows
from qcollect.recipe.selectors import match_names
from qcollect.vocab import LayerType, RankInfo
from qcollect.worker.claim import claim_directory
from qcollect.worker.collector import Collector, CollectorSettings, refuse_compiled, seat
from qcollect.worker.engine import EngineSettings
from qcollect.worker.measured_sites import shadows_of
from qcollect.worker.packing import Packing
from qcollect.worker.policy import QuantPolicy
from qcollect.worker.sites import find_modules, named_modules, unwrap
from qcollect.worker.state import detect_rank
from qcollect.worker.unserved import describe_unserved, find_unserved
from qcollect.worker.vote import make_vote_group

PLAN_VARIABLE = "QCOLLECT_PLAN"
CAPTURE_SETTINGS = tuple(f.name for f in fields(CaptureSpec) if f.name != "target")
QUANT_SETTINGS = tuple(f.name for f in fields(QuantSpec) if f.name not in ("type", "types"))


class _Sections(Section):
    """The sections of a recipe that ``collect`` takes: checked as a recipe's are."""

    quant: QuantModel
    capture: CaptureModel

    _read_shadows = model_validator(mode="before")(read_shadows)

    @model_validator(mode="after")
    def _shadows_exist(self) -> Self:
        check_shadows(self.quant, self.capture)
        return self


was_called = False  # in this process; a script that calls ``collect`` is not collected from automatically


def collect(
    model: nn.Module,
    quant_type: str | None = None,
    out_dir: str | os.PathLike[str] | None = None,
    target: int | None = None,
    *,
    num_iterations: int = 1000,
    micro_batches: int = 1,
    micro_batch_size: int = 1,
    loss_scale: float = 1.0,
    seed: int = 0,
    **settings: Any,
) -> Collector:
    """A context in which ``model`` trains with quantized gemms and its tensors are captured.

        with qcollect.collect(model, quant_type="hifp8", out_dir="logs", target=50) as run:
            for batch in loader:
                loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
                if run.step():
                    break

    Under the launcher the plan decides and every other argument is ignored, so the same script runs
    both ways. Without it ``out_dir`` is taken as it stands (no type folder is added), all ranks of an
    initialized process group share the target, and a tensor that turns out to have no gradient is
    replaced by the next of the schedule in the next iteration. After the target the model goes on
    training quantized; leaving the context restores it.

    Args:
        model: any module; linears and, in transformers models, attention kernels are captured.
        quant_type: catalog name, or a YAML file of one's own; None: ``CUSTOM_QUANT_TYPE``, else ``hifp8``.
        out_dir: None: ``TENSOR_SAVE_DIR``, else ``./tensor_logs``.
        target: captures summed over ranks; None: 50. With ``mode="stats"`` there is none: everything is captured.
        num_iterations: what ``iterations="every:N"`` and ``"spread:K"`` refer to; all there are for ``mode="stats"``.
        micro_batches: forward passes an iteration.
        micro_batch_size: sequences of one; needed with ``samples`` only.
        loss_scale: recorded; what the loss is multiplied with before ``backward``.
        seed: of everything random in quantization.
        settings: any field of a recipe's ``capture`` and ``quant`` sections (``values="both"``, ``layers=[0]``, ...).
            ``trigger=["loss_spike", "nan"]``, or a dict of a trigger's fields, waits for what is given to
            ``run.step(loss=..., grad_norm=...)``, or for SIGUSR1 to this process (``signal``).

    What has products that no tap reaches (experts in one tensor, a kernel of a module's own) is named in one warning.

    Raises:
        UsageError: a setting that does not exist, a selector that matches nothing, an unknown type, a model that is
            compiled already or lies in ``nn.DataParallel``.
        PreflightError: ``out_dir`` holds a run, or the target cannot be reached.
    """
    global was_called
    was_called = True
    refuse_compiled(model)
    group = make_vote_group()
    plan_path = os.environ.get(PLAN_VARIABLE)
    if plan_path:
        return Collector(model, settings_of_plan(Plan.read(Path(plan_path))), group)
    quant_type = quant_type or os.environ.get("CUSTOM_QUANT_TYPE") or "hifp8"
    run_dir = Path(out_dir or os.environ.get("TENSOR_SAVE_DIR") or "tensor_logs").absolute()
    if quant_type not in settings.get("formats", ()):
        get_quant_type(quant_type)
    quant, capture = _specs(quant_type, target, settings)
    policy = QuantPolicy.from_spec(quant, seed)
    rank = detect_rank(next(model.parameters(), None))
    _check_ranks(rank, group)
    unserved = find_unserved(unwrap(model), policy)
    if unserved and seat(rank) == 0:
        warnings.warn(f"qcollect: {describe_unserved(unserved)}", stacklevel=2)
    sites = sites_of(unwrap(model), policy)
    if quant.exclude:
        match_names(quant.exclude, _excludable(unwrap(model), sites), key="exclude")
    schedule = build_schedule(
        choose_captures(sites, quant, capture),
        capture,
        world_size=rank.world_size,
        num_iterations=num_iterations,
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
    )
    warning = warn_of_small_target(schedule, capture)
    if warning is not None and seat(rank) == 0:
        warnings.warn(f"qcollect: {warning}", stacklevel=2)
    enabled = saving_enabled()
    if enabled:
        claim_directory(run_dir, group)
    return Collector(
        model,
        CollectorSettings(
            quant_type=quant.type,
            policy=policy,
            schedule=schedule,
            run_dir=run_dir,
            run_id=uuid.uuid4().hex[:12],
            rank=rank,
            loss_scale=loss_scale,
            packing=Packing.from_spec(capture),
            by_iteration=capture.layout == "by_iteration",
            engine=EngineSettings.of(capture),
            shadows=shadows_of(capture.shadow, quant),
            enabled=enabled,
            trigger=capture.trigger,
        ),
        group,
    )


def settings_of_plan(plan: Plan) -> CollectorSettings:
    """The collector the launcher planned, for this process's rank."""
    rank = detect_rank()
    return CollectorSettings(
        quant_type=plan.quant_type,
        policy=QuantPolicy.from_spec(plan.recipe.quant, plan.recipe.train.seed),
        schedule=plan.schedule,
        run_dir=plan.run_dir,
        run_id=plan.run_id,
        rank=rank,
        loss_scale=plan.recipe.train.loss_scale,
        packing=Packing.from_spec(plan.recipe.capture),
        by_iteration=plan.recipe.capture.layout == "by_iteration",
        engine=EngineSettings.of(plan.recipe.capture),
        shadows=shadows_of(plan.recipe.capture.shadow, plan.recipe.quant),
        is_planned=True,
        enabled=saving_enabled(),
        max_bytes=plan.recipe.launch.max_bytes,
        trigger=plan.recipe.capture.trigger,
        device=next((device for device in plan.devices if device.local_rank == rank.local_rank), None),
    )


def saving_enabled() -> bool:
    """``TENSOR_SAVE_ENABLED``: anything but false, 0, no or off."""
    return os.environ.get("TENSOR_SAVE_ENABLED", "true").strip().lower() not in ("false", "0", "no", "off")


def sites_of(model: nn.Module, policy: QuantPolicy) -> list[ModuleSites]:
    """The sites of a model as far as its modules tell: shapes and inputs without grad are not known yet."""
    return [
        ModuleSites(
            module=found.name,
            layer_type=found.layer_type,
            layer_idx=found.layer_idx,
            shapes={},
            element_bytes=next((p.element_size() for p in found.module.parameters()), 4),
            without_grad=_without_grad(found.module) if found.layer_type == LayerType.LINEAR else (),
            excluded=found.on_request or policy.excludes(found.name),
            on_request=found.on_request,
        )
        for found in find_modules(model)
    ]


def _check_ranks(rank: RankInfo, group: Any) -> None:
    seat(rank)
    if group is None and rank.world_size > 1:
        raise UsageError(
            f"WORLD_SIZE is {rank.world_size}, and the ranks share the target and the folder: "
            "call torch.distributed.init_process_group before collect"
        )


def _excludable(model: nn.Module, sites: Sequence[ModuleSites]) -> list[str]:
    """What ``exclude`` can name: not a module that only holds others."""
    names = {site.module for site in sites}
    return [name for name, module in named_modules(model) if name in names or next(module.children(), None) is None]


def _without_grad(module: nn.Module) -> tuple[str, ...]:
    weight = getattr(module, "weight", None)
    return () if weight is None or weight.requires_grad else ("grad_weight",)


def _specs(quant_type: str, target: int | None, settings: dict[str, Any]) -> tuple[QuantSpec, CaptureSpec]:
    unknown = sorted(set(settings) - set(CAPTURE_SETTINGS) - set(QUANT_SETTINGS))
    if unknown:
        raise UsageError(
            f"collect has no setting {unknown[0]!r}; capture settings: {', '.join(CAPTURE_SETTINGS)}; "
            f"quant settings: {', '.join(QUANT_SETTINGS)}"
        )
    values = {name: _listed(value) for name, value in settings.items()}
    sections = {
        "quant": {"type": quant_type, **{k: v for k, v in values.items() if k in QUANT_SETTINGS}},
        "capture": {"target": target, **{k: v for k, v in values.items() if k in CAPTURE_SETTINGS}},
    }
    try:
        checked = _Sections.model_validate(sections)
    except ValidationError as error:
        found = explain(error, Origins("collect", {}))
        raise UsageError("\n".join(f"{origin.text}: {message}" for origin, message in found)) from None
    quant = checked.quant.model_dump() | {"overrides": checked.quant.overrides.to_dict()}
    return QuantSpec(**quant), capture_from_dict(checked.capture.model_dump())


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
