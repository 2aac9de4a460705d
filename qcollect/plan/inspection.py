"""What a worker started with ``--inspect`` tells the control program about the model and the machine."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from qcollect.plan.finding import Finding, Level, texts
from qcollect.plan.schedule import ModuleSites


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One visible accelerator. None where torch does not tell."""

    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    capability: str | None = None
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The model's sites, this machine's devices, and what was found about the recipe's files.

    ``device`` is the accelerator type (``cuda``, ``npu``, ...) or ``cpu``; ``device_names`` has one entry a
    visible device, ``devices`` the same with memory. ``excluded`` names what stays in high precision:
    embeddings, norms, lm_head and ``quant.exclude``. ``num_samples`` is what the data give before they are
    seen again. ``torch_accelerator`` is what torch was built for (``CUDA 13.0``); None: the CPU only.
    """

    modules: tuple[ModuleSites, ...]
    excluded: tuple[str, ...]
    vocab_size: int
    num_parameters: int
    device: str
    device_names: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    torch_accelerator: str | None = None
    num_samples: int | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Of each visible device, as torch gives it; empty where it does not."""
        return tuple(device.uuid or "" for device in self.devices)

    @property
    def problems(self) -> tuple[str, ...]:
        """What forbids the launch, each a complete message."""
        return texts(self.findings, Level.PROBLEM)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What does not forbid it and is most likely not meant, each a complete message."""
        return texts(self.findings, Level.WARNING)

    def to_dict(self) -> dict[str, Any]:
        return {
            "modules": [m.to_dict() for m in self.modules],
            "excluded": list(self.excluded),
            "vocab_size": self.vocab_size,
            "num_parameters": self.num_parameters,
            "device": self.device,
            "device_names": list(self.device_names),
            "devices": [asdict(device) for device in self.devices],
            "torch_accelerator": self.torch_accelerator,
            "num_samples": self.num_samples,
            "findings": [finding.to_dict() for finding in self.findings],
            "problems": list(self.problems),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """What ``to_dict`` gave, also that of earlier versions, whose findings were sentences only."""
        findings = [Finding.from_dict(f) for f in fields.get("findings", ())]
        known = {finding.text for finding in findings}
        for level, key in ((Level.PROBLEM, "problems"), (Level.WARNING, "warnings")):
            findings += _of_sentences(level, (s for s in fields.get(key, ()) if s not in known))
        return cls(
            modules=tuple(ModuleSites.from_dict(m) for m in fields["modules"]),
            excluded=tuple(fields["excluded"]),
            vocab_size=fields["vocab_size"],
            num_parameters=fields["num_parameters"],
            device=fields["device"],
            device_names=tuple(fields["device_names"]),
            devices=tuple(Device(**device) for device in fields.get("devices", ())),
            torch_accelerator=fields.get("torch_accelerator"),
            num_samples=fields.get("num_samples"),
            findings=tuple(findings),
        )


def _of_sentences(level: Level, sentences: Iterable[str]) -> list[Finding]:
    return [Finding(check="recipe", level=level, message=sentence) for sentence in sentences]
