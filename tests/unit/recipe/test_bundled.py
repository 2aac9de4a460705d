from pathlib import Path

import pytest

from qcollect.errors import RecipeError
from qcollect.recipe import load
from qcollect.recipe.load import bundled_dir, find_recipe, list_recipes, load_recipe
from qcollect.recipe.schema import ConfigModel, RopeModel


def test_bundled_recipes_are_listed_by_name_with_descriptions() -> None:
    summaries = list_recipes()
    assert [s.name for s in summaries] == [
        "llama32_1b_random",
        "llama32_1b_wikipedia",
        "smollm2_135m_wikipedia",
        "tiny",
    ]
    assert all(s.description and s.path.is_absolute() for s in summaries)


def test_tiny_finds_its_text_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("tiny")
    assert recipe.data.path == (str(bundled_dir() / "text" / "encyclopedia.txt"),)
    assert recipe.script == str(bundled_dir() / "train.py")
    assert recipe.path == str(bundled_dir() / "tiny.yaml")


def test_copied_recipe_still_finds_the_bundled_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(find_recipe("tiny").read_text(encoding="utf-8"), encoding="utf-8")
    copy, original = load_recipe("mine.yaml"), load_recipe("tiny")
    assert (copy.data, copy.model, copy.script) == (original.data, original.model, original.script)
    assert copy.name == "mine"


def test_default_recipe_looks_for_model_and_data_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("llama32_1b_wikipedia")
    assert recipe.model.checkpoint == str(tmp_path / "model/llama3.2-1b")
    assert recipe.data.path == (str(tmp_path / "dataset/wikipedia_processed/wikipedia_processed_text_document"),)


def test_tiny_fills_whole_blocks() -> None:
    recipe = load_recipe("tiny")
    assert recipe.model.config is not None
    sizes = [recipe.model.config[k] for k in ("hidden_size", "intermediate_size", "head_dim", "vocab_size")]
    assert all(size % 32 == 0 for size in [*sizes, recipe.data.sequence_length])


def test_random_recipe_has_the_sizes_of_llama32_1b() -> None:
    config = load_recipe("llama32_1b_random").model.config
    assert config is not None
    hidden, inner, vocab, kv = (
        config["hidden_size"], config["intermediate_size"], config["vocab_size"],
        config["num_key_value_heads"] * config["head_dim"],
    )  # fmt: skip
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert config["num_hidden_layers"] * layer + vocab * hidden + hidden == 1_235_814_400  # the model card's count


@pytest.mark.parametrize("name", ["tiny", "llama32_1b_random"])
def test_transformers_takes_the_config_as_it_stands(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    wanted = load_recipe(name).model.config
    assert wanted is not None
    config = transformers.LlamaConfig(**wanted)
    assert {key: getattr(config, key) for key in wanted} == wanted


def test_every_config_key_is_one_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    assert set(ConfigModel.model_fields) <= set(transformers.LlamaConfig().to_dict())
    assert ConfigModel.model_fields["rope_parameters"].annotation == RopeModel | None


def test_recipes_inside_an_installed_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_dir = tmp_path / "site-packages" / "qcollect"
    installed = package_dir / "_recipes"
    installed.mkdir(parents=True)
    (package_dir.parent / "recipes").mkdir()
    monkeypatch.setattr(load, "__file__", str(package_dir / "recipe" / "load.py"))
    assert bundled_dir() == installed


def test_missing_bundled_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "__file__", str(tmp_path / "qcollect" / "recipe" / "load.py"))
    with pytest.raises(RecipeError, match=r"the bundled recipes are missing beside .*install qcollect again"):
        bundled_dir()


def test_bundled_recipe_without_description_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.yaml").write_text("model: {checkpoint: m}\n")
    monkeypatch.setattr(load, "bundled_dir", lambda: tmp_path)
    with pytest.raises(RecipeError, match=r"plain\.yaml: a bundled recipe needs a top-level 'description'"):
        list_recipes()


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama32_1b_wikipdia")
    assert str(caught.value) == (
        "no bundled recipe 'llama32_1b_wikipdia'; known: llama32_1b_random, llama32_1b_wikipedia, "
        "smollm2_135m_wikipedia, tiny. Did you mean 'llama32_1b_wikipedia'? "
        "A file of your own is given by its path, like ./llama32_1b_wikipdia.yaml"
    )


@pytest.mark.parametrize("name", ["r.yaml", "./r.yml", "sub/tiny", "~/r.yaml"])
def test_missing_file_is_said_with_the_current_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value) == f"no recipe file {name} (in {tmp_path}); 'qcollect recipes ls' lists the bundled ones"


def test_python_file_is_no_recipe() -> None:
    with pytest.raises(RecipeError, match=r"^\./train\.py is a Python file, and a recipe is a YAML file; name the "):
        load_recipe("./train.py")
