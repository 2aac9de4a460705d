"""Paths and arguments arrive as they are: spaces, quotes, other scripts, brackets, leading dashes, another folder.

One run for all: started in a folder with such a name, from a recipe that begins with a dash, to a relative
folder, by a script that changes the directory and writes down its arguments, on a checkpoint with tied
embeddings.
"""

import json
from pathlib import Path

import pytest

from qcollect.paths import RunPaths
from qcollect.store.index import open_run
from qcollect.store.manifest import read_manifests

pytestmark = pytest.mark.integration

ARGUMENTS = ("two words", "", "--set", "a=b", "--", "-n", '$HOME;"ls"', "été [red]")
OUT = "a [/x/y] b"
RECIPE = "-n.yaml"
SCRIPT = """
import json, os, runpy, sys
from pathlib import Path
os.chdir(os.environ["TEST_ELSEWHERE"])
Path(os.environ["TEST_ARGUMENTS"]).write_text(json.dumps(sys.argv))
from qcollect.recipe.load import bundled_dir
runpy.run_path(str(bundled_dir() / "train.py"), run_name="__main__")
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, small_recipe):
    """The folder the run is started in, and the one its script goes to."""
    base = tmp_path_factory.mktemp("names")
    start, elsewhere = base / "my runs" / 'été "x" $HOME;ls', base / "elsewhere"
    start.mkdir(parents=True)
    elsewhere.mkdir()
    (start / "r.py").write_text(SCRIPT)
    (start / RECIPE).write_text(small_recipe.read_text() + "script: ./r.py\n")
    return start, elsewhere


@pytest.fixture(scope="module")
def arguments_path(tmp_path_factory):
    return tmp_path_factory.mktemp("arguments") / "argv.json"


@pytest.fixture(scope="module")
def arguments(tied_checkpoint):
    model = ("model.config=null", f"model.checkpoint={tied_checkpoint}", "model.tokenizer=bytes")
    capture = ("capture.modules=[lm_head, model.layers.0.self_attn.q_proj]",)
    sets = [text for setting in (*model, *capture) for text in ("--set", setting)]
    # the group of q_proj and of lm_head
    run = ["run", "mxfp8", f"--recipe=./{RECIPE}", "--out", OUT, "--nproc", "1", "--target", "12"]
    return [*run, *sets, "--", *ARGUMENTS]


@pytest.fixture(scope="module")
def result(qcollect_here, folders, arguments, arguments_path):
    start, elsewhere = folders
    environment = {"TEST_ELSEWHERE": str(elsewhere), "TEST_ARGUMENTS": str(arguments_path)}
    return qcollect_here(*arguments, cwd=start, env=environment)


@pytest.fixture(scope="module")
def run_dir(result, folders):
    assert result.exit_code == 0, result.err
    return folders[0] / OUT / "mxfp8"


def test_files_are_where_the_command_was_started(run_dir, folders):
    start, elsewhere = folders
    assert len(list(run_dir.glob("*.pt"))) == 12
    assert sorted(p.name for p in start.iterdir()) == sorted([RECIPE, "r.py", OUT.split("/")[0]])
    assert list(elsewhere.iterdir()) == []


def test_the_folder_is_shown_as_it_is(result, run_dir):
    assert result.out == f"{run_dir}\n"


def test_arguments_of_the_script_arrive_as_given(run_dir, folders, arguments_path):
    assert json.loads(arguments_path.read_text()) == [str(folders[0] / "r.py"), *ARGUMENTS]
    assert json.loads(RunPaths(run_dir).plan_path.read_text())["script_args"] == list(ARGUMENTS)


def test_paths_in_the_manifest_are_relative_to_the_run(run_dir):
    records = read_manifests(RunPaths(run_dir))
    assert sorted(record.file for record in records) == sorted(p.name for p in run_dir.glob("*.pt"))


def test_status_agrees_from_where_the_run_was_started_and_from_elsewhere(qcollect_here, run_dir, folders):
    start, elsewhere = folders
    shown = [
        qcollect_here("status", directory, cwd=cwd).out
        for directory, cwd in ((OUT, start), (f"{OUT}/mxfp8", start), (str(run_dir), elsewhere), (".", run_dir.parent))
    ]
    assert len(set(shown)) == 1
    assert shown[0].startswith("mxfp8  completed  12/12")


def test_a_dry_run_prints_a_command_that_can_be_pasted(qcollect_here, arguments, folders):
    import shlex

    given, script_args = arguments[: arguments.index("--")], arguments[arguments.index("--") :]
    result = qcollect_here(*given, "--dry-run", "--overwrite", *script_args, cwd=folders[0])
    assert result.exit_code == 0, result.err
    lines = result.out.splitlines()
    words = shlex.split(lines[lines.index("command:") + 1])
    assert words[0] == "env"
    assert words[words.index("torchrun") :] == [
        *("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--log-dir"),
        str(folders[0] / OUT / "mxfp8" / ".qcollect" / "logs" / "torchrun"),
        *("--nproc-per-node", "1", "-m", "qcollect.worker"),
        *ARGUMENTS,
    ]
    assert f"TENSOR_SAVE_DIR={folders[0] / OUT / 'mxfp8'}" in words


def test_a_checkpoint_with_tied_embeddings_trains_with_the_embedding_as_its_head(run_dir, tied_checkpoint):
    import torch
    from safetensors.torch import load_file

    (head,) = open_run(run_dir).select(module="lm_head", tensor_name="weight")
    embedding = load_file(tied_checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(head.load(), embedding.to(torch.bfloat16))
    assert head.metadata["consumers"] == []  # the head stays in high precision


def test_a_recipe_may_be_named_without_a_folder_although_it_begins_with_a_dash(
    qcollect_here, folders: tuple[Path, Path]
):
    shown = qcollect_here("recipes", "validate", "--", RECIPE, cwd=folders[0])
    assert (shown.exit_code, shown.out) == (0, f"{folders[0] / RECIPE}: valid\n")
