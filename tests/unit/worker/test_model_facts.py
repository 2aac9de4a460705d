from dataclasses import replace

import pytest

from qcollect.paths import CACHE_VARIABLE
from qcollect.plan.finding import Finding
from qcollect.recipe.load import load_recipe
from qcollect.worker import model_facts
from qcollect.worker.inspection import examine_model
from qcollect.worker.model_facts import ModelFacts, remember


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def examine():
    """``examine_model`` that counts its calls."""

    def examine(recipe):
        examine.calls.append(recipe)
        return examine_model(recipe)

    examine.calls = []
    return examine


def test_the_second_answer_is_the_first_without_a_look_at_the_model(cache, examine):
    recipe = load_recipe("tiny")
    first, second = remember(recipe, examine), remember(recipe, examine)
    assert first == second == examine_model(recipe)
    assert len(examine.calls) == 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "override",
    ["data.sequence_length=32", "train.micro_batch_size=1", "train.compute=fp32", "quant.exclude=['*.q_proj']"],
)
def test_another_recipe_is_looked_at(cache, examine, override):
    remember(load_recipe("tiny"), examine)
    recipe = load_recipe("tiny", [override])
    assert remember(recipe, examine) == examine_model(recipe)
    assert len(examine.calls) == 2


def test_what_changes_nothing_about_the_model_is_not_another_recipe(cache, examine):
    remember(load_recipe("tiny"), examine)
    remember(load_recipe("tiny", ["capture.target=8", "launch.grace_s=3"]), examine)
    assert len(examine.calls) == 1


def test_changed_code_and_other_versions_are_looked_at(cache, examine, monkeypatch):
    recipe = load_recipe("tiny")
    remember(recipe, examine)
    monkeypatch.setattr(model_facts, "_version", lambda package: "0.0")
    remember(recipe, examine)
    monkeypatch.setattr(model_facts, "_stamps", lambda path, pattern: [("x.py", 1, 2)])
    remember(recipe, examine)
    assert len(examine.calls) == 3


def test_a_changed_checkpoint_is_looked_at(cache, examine, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    recipe = load_recipe("tiny")
    recipe = replace(recipe, model=replace(recipe.model, config=None, checkpoint=str(checkpoint)))
    facts = ModelFacts(modules=(), excluded=(), vocab_size=8, num_parameters=1, findings=())
    calls = []

    def count(recipe):
        calls.append(recipe)
        return facts

    remember(recipe, count)
    remember(recipe, count)
    assert len(calls) == 1
    (checkpoint / "model.safetensors").write_bytes(b"more")
    remember(recipe, count)
    assert len(calls) == 2


def test_an_answer_with_a_problem_is_not_kept(cache):
    problem = Finding.problem("checkpoint", "torn", "get it again")
    facts = ModelFacts(modules=(), excluded=(), vocab_size=None, num_parameters=0, findings=(problem,))
    assert remember(load_recipe("tiny"), lambda recipe: facts) == facts
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"modules": 3}', b'{"modules": [], "excluded": []}'])
def test_a_damaged_cache_is_looked_through(cache, examine, content):
    recipe = load_recipe("tiny")
    first = remember(recipe, examine)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert remember(recipe, examine) == first
    assert len(examine.calls) == 2


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, examine, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    recipe = load_recipe("tiny")
    assert remember(recipe, examine) == remember(recipe, examine)
