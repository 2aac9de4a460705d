"""What a worker started with ``--inspect`` tells the control program about the model and the machine."""

from dataclasses import dataclass
from typing import Any, Self

from qcollect.plan.schedule import ModuleSites


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The model's sites and this machine's devices.

    ``problems`` are findings that forbid the launch, ``warnings`` such that do not, each a complete
    message; ``device`` is the
    accelerator type (``cuda``, ``npu``, ...) or ``cpu``; ``device_names`` has one entry a visible device.
    ``excluded`` names what stays in high precision: embeddings, norms, lm_head and ``quant.exclude``.
    """

    modules: tuple[ModuleSites, ...]
    excluded: tuple[str, ...]
    vocab_size: int
    num_parameters: int
    device: str
    device_names: tuple[str, ...]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "modules": [m.to_dict() for m in self.modules],
            "excluded": list(self.excluded),
            "vocab_size": self.vocab_size,
            "num_parameters": self.num_parameters,
            "device": self.device,
            "device_names": list(self.device_names),
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            modules=tuple(ModuleSites.from_dict(m) for m in fields["modules"]),
            excluded=tuple(fields["excluded"]),
            vocab_size=fields["vocab_size"],
            num_parameters=fields["num_parameters"],
            device=fields["device"],
            device_names=tuple(fields["device_names"]),
            problems=tuple(fields["problems"]),
            warnings=tuple(fields["warnings"]),
        )
