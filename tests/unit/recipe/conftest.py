from collections.abc import Callable
from pathlib import Path

import pytest

from qcollect.errors import RecipeError
from qcollect.recipe.load import load_recipe

MINIMAL = "model: {checkpoint: m}\ndata: {path: d, sequence_length: 8}\n"


@pytest.fixture
def write_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes ``r.yaml`` into an empty current directory and gives back its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("r.yaml").write_text(text, encoding="utf-8")
        return "r.yaml"

    return write


@pytest.fixture
def refusals(write_recipe: Callable[[str], str]) -> Callable[..., list[str]]:
    """The lines of the error that a recipe's text, with overrides, is refused with."""

    def load(text: str, *overrides: str) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load_recipe(write_recipe(text), overrides)
        return str(caught.value).splitlines()

    return load


@pytest.fixture
def minimal() -> str:
    """The text of the shortest recipe: two lines, everything else at its default."""
    return MINIMAL
