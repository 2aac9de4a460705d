"""The plan: everything a launch needs, resolved, as one JSON file that worker and status read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from qcollect.plan.devices import RankDevice
from qcollect.plan.schedule import Schedule
from qcollect.recipe.records import Recipe, recipe_from_dict

PLAN_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run, ready to be executed.

    ``agent_argv`` starts torchrun under supervision; ``torchrun_argv`` is the same launch as a user
    would type it. ``env`` holds what is set for the workers, ``unset`` what is removed from the
    inherited environment. ``excluded`` names the modules left in high precision by design.
    ``devices`` has one entry a rank; a worker finds its own by local rank.
    """

    run_id: str
    run_token: str
    run_dir: Path
    quant_type: str
    recipe: Recipe
    world_size: int
    device: str
    torchrun_argv: tuple[str, ...]
    agent_argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    script_args: tuple[str, ...]
    schedule: Schedule
    excluded: tuple[str, ...]
    devices: tuple[RankDevice, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": PLAN_SCHEMA,
            "run_id": self.run_id,
            "run_token": self.run_token,
            "run_dir": str(self.run_dir),
            "quant_type": self.quant_type,
            "recipe": self.recipe.to_dict(),
            "world_size": self.world_size,
            "device": self.device,
            "torchrun_argv": list(self.torchrun_argv),
            "agent_argv": list(self.agent_argv),
            "env": dict(self.env),
            "unset": list(self.unset),
            "script_args": list(self.script_args),
            "target": self.schedule.target,
            "shares": [self.schedule.share(rank) for rank in range(self.world_size)],
            "schedule": self.schedule.to_dict(),
            "excluded": list(self.excluded),
            "devices": [device.to_dict() for device in self.devices],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        def strings(key: str) -> tuple[str, ...]:
            values: Sequence[str] = fields[key]
            return tuple(values)

        return cls(
            run_id=fields["run_id"],
            run_token=fields["run_token"],
            run_dir=Path(fields["run_dir"]),
            quant_type=fields["quant_type"],
            recipe=recipe_from_dict(fields["recipe"]),
            world_size=fields["world_size"],
            device=fields["device"],
            torchrun_argv=strings("torchrun_argv"),
            agent_argv=strings("agent_argv"),
            env=dict(fields["env"]),
            unset=strings("unset"),
            script_args=strings("script_args"),
            schedule=Schedule.from_dict(fields["schedule"]),
            excluded=strings("excluded"),
            devices=tuple(RankDevice.from_dict(device) for device in fields.get("devices", ())),
            warnings=strings("warnings"),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
