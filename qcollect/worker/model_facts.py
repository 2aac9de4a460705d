"""What the launcher asks of a model, remembered from one launch to the next.

To know a model's sites its code must be imported and run on the meta device, which takes longer than
everything else before a launch. The answer follows from the recipe, the checkpoint's files and the
versions of the code, and is kept under exactly those: a file in the user's cache folder that may be
removed at any time. An answer with a problem in it is never kept.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import xxhash

import qcollect.paths
from qcollect.paths import cache_dir
from qcollect.plan.finding import Finding, Level
from qcollect.plan.schedule import ModuleSites
from qcollect.recipe.records import Recipe
from qcollect.store.files import read_json, write_json_atomic

_PACKAGES = ("torch", "transformers", "safetensors", "gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A recipe's model: its sites, what stays in high precision, its size, and what was found about its files."""

    modules: tuple[ModuleSites, ...]
    excluded: tuple[str, ...]
    vocab_size: int | None
    num_parameters: int
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "modules": [module.to_dict() for module in self.modules],
            "excluded": list(self.excluded),
            "vocab_size": self.vocab_size,
            "num_parameters": self.num_parameters,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(
            modules=tuple(ModuleSites.from_dict(module) for module in fields["modules"]),
            excluded=tuple(fields["excluded"]),
            vocab_size=fields["vocab_size"],
            num_parameters=fields["num_parameters"],
            findings=tuple(Finding.from_dict(finding) for finding in fields["findings"]),
        )


def remember(recipe: Recipe, examine: Callable[[Recipe], ModelFacts]) -> ModelFacts:
    """``examine(recipe)``, or what it gave for the same recipe, files and versions before."""
    path = cache_dir("models") / f"{_key(recipe)}.json"
    with suppress(OSError, KeyError, TypeError, ValueError):
        stored = read_json(path)
        if stored is not None:
            return ModelFacts.from_dict(stored)
    facts = examine(recipe)
    if not any(finding.level == Level.PROBLEM for finding in facts.findings):
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, facts.to_dict())
    return facts


def _key(recipe: Recipe) -> str:
    """A digest of all that the facts follow from."""
    asked = {
        "recipe": {name: section for name, section in recipe.to_dict().items() if name in ("model", "train", "quant")},
        "sequence_length": recipe.data.sequence_length,
        "python": sys.version,
        "versions": {name: _version(name) for name in _PACKAGES},
        "code": _stamps(Path(qcollect.paths.__file__).parent, "*.py"),
        "files": _stamps(Path(recipe.model.checkpoint), "*") if recipe.model.checkpoint else [],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _stamps(path: Path, pattern: str) -> list[tuple[str, int, int]]:
    """(path, bytes, time of change) of a file, or of the files below a folder."""
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    stamps = []
    for file in files:
        with suppress(OSError):
            status = file.stat()
            stamps.append((str(file.absolute()), status.st_size, status.st_mtime_ns))
    return stamps
