"""A recipe by name or path -> its records; and the recipes that come with the program.

Where a recipe names a path (``model.checkpoint``, ``model.tokenizer``, ``data.path``, ``data.tokenizer``,
``script``, a quant type's file; in the file or by ``--set``) one rule holds: it is relative to the current directory.
``$RECIPE_DIR/...`` at its beginning is the folder of the recipe's file, ``$BUNDLED_DIR/...`` that of the
bundled recipes, so that a bundled recipe still finds its text after it was copied. Nothing else is
expanded. Records hold absolute paths only; whether they exist is for preflight to say.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qcollect.document import Document, parse_yaml
from qcollect.errors import RecipeError
from qcollect.recipe.fields import BUNDLED_DIR
from qcollect.recipe.formats import RECIPE_DIR
from qcollect.recipe.origins import Origin, Origins
from qcollect.recipe.overrides import Override, apply_overrides
from qcollect.recipe.problems import explain
from qcollect.recipe.records import BYTES_TOKENIZER, Recipe, recipe_from_dict
from qcollect.recipe.schema import RecipeModel

SUFFIXES = (".yaml", ".yml")
DEFAULT_SCRIPT = f"{BUNDLED_DIR}/train.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSummary:
    """A bundled recipe, for a list."""

    name: str
    path: Path
    description: str


def bundled_dir() -> Path:
    """The folder of the bundled recipes: inside the installed package, or beside it in a checkout.

    Raises:
        RecipeError: neither is there.
    """
    package_dir = Path(__file__).resolve().parents[1]
    for folder in (package_dir / "_recipes", package_dir.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise RecipeError(f"the bundled recipes are missing beside {package_dir}; install qcollect again")


def list_recipes() -> list[RecipeSummary]:
    """The bundled recipes by name.

    Raises:
        RecipeError: one is not a mapping with a ``description``.
    """
    return [_summarize(path) for path in _bundled_paths()]


def find_recipe(name_or_path: str | Path) -> Path:
    """The absolute path of a recipe: a path, or what ends in .yaml or .yml, is a file; the rest a bundled name.

    Raises:
        RecipeError: there is none; the message names near ones.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, str) and "/" not in text and not text.endswith((*SUFFIXES, ".py")):
        return _find_bundled(text)
    if text.endswith(".py"):
        raise RecipeError(
            f"{text} is a Python file, and a recipe is a YAML file; name the training script in it (script: {text})"
        )
    path = Path.cwd() / text
    if not path.exists():
        raise RecipeError(f"no recipe file {text} (in {Path.cwd()}); 'qcollect recipes ls' lists the bundled ones")
    return path


def load_recipe(name_or_path: str | Path, overrides: Sequence[str | Override] = ()) -> Recipe:
    """The recipe, validated.

    Args:
        name_or_path: see ``find_recipe``.
        overrides: ``key=value`` texts, or values with an origin of their own; later ones win.

    Raises:
        RecipeError: all that is wrong with the file and the overrides, a line each.
    """
    path = find_recipe(name_or_path)
    shown = str(path) if path.parent == bundled_dir() else str(name_or_path)
    document = parse_yaml(_read(path, shown))
    origins = Origins(shown, document.lines)
    problems = [(origins.line(line), message) for line, message in document.problems]
    values = _top_mapping(document, problems, shown)
    problems += apply_overrides(values, overrides, origins)
    try:
        context = {"resolve": lambda text: Path(_absolute_of(text, path.parent))}
        model = RecipeModel.model_validate(values, context=context)
    except ValidationError as error:
        _refuse([*problems, *explain(error, origins)])
    _refuse(problems)
    return _to_record(model, path)


def _to_record(model: RecipeModel, path: Path) -> Recipe:
    fields = model.model_dump(exclude={"description"})
    config = model.model.config
    fields["model"]["config"] = config and config.model_dump(exclude_unset=True)
    fields["quant"]["overrides"] = model.quant.overrides.to_dict()
    fields["model"]["checkpoint"] = _absolute(model.model.checkpoint, path.parent)
    for section in ("model", "data"):
        fields[section]["tokenizer"] = _absolute(fields[section]["tokenizer"], path.parent, keep=BYTES_TOKENIZER)
    fields["data"]["path"] = [_absolute(given, path.parent) for given in model.data.path]
    fields["script"] = _absolute(model.script or DEFAULT_SCRIPT, path.parent)
    return recipe_from_dict({**fields, "name": path.stem, "path": str(path)})


def _absolute(text: str | None, recipe_dir: Path, *, keep: str | None = None) -> str | None:
    return text if text is None or text == keep else _absolute_of(text, recipe_dir)


def _absolute_of(text: str, recipe_dir: Path) -> str:
    head, _, rest = text.partition("/")
    if head == RECIPE_DIR:
        return str(recipe_dir / rest)
    if head == BUNDLED_DIR:
        return str(bundled_dir() / rest)
    return str(Path.cwd() / text)


def _top_mapping(document: Document, problems: list[tuple[Origin, str]], shown: str) -> dict[str, Any]:
    if isinstance(document.value, dict):
        return document.value
    if document.value is None:
        _refuse(problems or [(Origin(0, shown), "is empty; 'qcollect recipes show tiny' prints one to begin with")])
    raise RecipeError(f"{shown}: a recipe is a mapping (model: ..., data: ...), and this is a {_kind(document.value)}")


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"


def _refuse(problems: Iterable[tuple[Origin, str]]) -> None:
    """Raises all problems in the order of the file, then of the overrides; nothing if there are none."""
    lines = []
    for origin, message in sorted(problems, key=lambda problem: problem[0]):
        lines.append(f"{origin.text}: {message}" if origin.text else message)
    if lines:
        raise RecipeError("\n".join(dict.fromkeys(lines)))


def _read(path: Path, shown: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{shown}:{line}: is not UTF-8 text (byte 0x{error.object[error.start]:02x})") from error


def _bundled_paths() -> list[Path]:
    return sorted(path for path in bundled_dir().iterdir() if path.suffix in SUFFIXES)


def _find_bundled(name: str) -> Path:
    paths = {path.stem: path for path in _bundled_paths()}
    if name in paths:
        return paths[name]
    near = get_close_matches(name, paths, n=1)
    question = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(
        f"no bundled recipe {name!r}; known: {', '.join(paths)}.{question} "
        f"A file of your own is given by its path, like ./{name or 'mine'}.yaml"
    )


def _summarize(path: Path) -> RecipeSummary:
    value = parse_yaml(_read(path, str(path))).value
    description = value.get("description") if isinstance(value, dict) else None
    if not isinstance(description, str) or not description:
        raise RecipeError(f"{path}: a bundled recipe needs a top-level 'description' (text)")
    return RecipeSummary(name=path.stem, path=path, description=description)
