"""One run from the command line to the files: what is there, in which order, and that all accounts of it agree."""

import json
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
import xxhash

from qcollect.paths import RunPaths
from qcollect.store.manifest import read_manifests
from qcollect.vocab import CaptureName

pytestmark = pytest.mark.integration

# of a launch around this one: none of it may reach torchrun or the workers
INHERITED = {
    "RANK": "7",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "203.0.113.1",
    "MASTER_PORT": "29500",
    "PET_NNODES": "3",
    "PET_MAX_RESTARTS": "5",
    "PET_RDZV_ENDPOINT": "203.0.113.1:29500",
}
ATTENTION = (
    ("forward", "pre", "query"),
    ("forward", "pre", "key"),
    ("forward", "pre", "value"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "post", "grad_query"),
    ("backward", "post", "grad_key"),
    ("backward", "post", "grad_value"),
)
LINEAR = (
    ("forward", "pre", "input"),
    ("forward", "pre", "weight"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "post", "grad_input"),
    ("backward", "post", "grad_weight"),
)


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("base") / ("folder-of-fifty-characters-and-of-more-than-that/" * 3) / "run[red]x"


@pytest.fixture(scope="module")
def result(qcollect_process, out_dir):
    args = ("run", "mxfp8", "--recipe", "tiny", "--nproc", "2", "--target", "50", "--set", "launch.device=cpu")
    return qcollect_process(*args, "--out", str(out_dir), env=INHERITED)


@pytest.fixture(scope="module")
def run_dir(result, out_dir):
    assert result.exit_code == 0, result.err
    return out_dir / "mxfp8"


@pytest.fixture(scope="module")
def files(run_dir):
    return sorted(run_dir.glob("*.pt"))


@pytest.fixture(scope="module")
def names(files):
    return [CaptureName.parse(path.name) for path in files]


@pytest.fixture(scope="module")
def status(run_dir, qcollect_here):
    (run,) = qcollect_here("status", "--json", str(run_dir)).json
    return run


def test_the_target_is_reached_exactly_and_shared_evenly(names):
    assert sorted(name.rank for name in names) == [0] * 25 + [1] * 25


def test_nothing_but_captures_and_state_is_left(run_dir, files):
    assert set(run_dir.iterdir()) == {*files, run_dir / ".qcollect"}


def test_names_say_what_the_files_are(names):
    assert {name.quant_type for name in names} == {"mxfp8"}
    assert {(name.rank, name.iteration, name.sample_idx) for name in names} == {(0, 0, 0), (1, 0, 2)}
    for rank in (0, 1):
        assert sorted(n.counter for n in names if n.rank == rank) == list(range(1, 26))


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_groups_of_the_middle_layer_come_in_order_and_the_last_is_cut(names, rank):
    captures = sorted((n for n in names if n.rank == rank), key=lambda n: n.counter)
    assert {n.layer_idx for n in captures} == {3}
    groups = [
        (projection, tuple((n.operation, n.phase, n.split_tensor()[1]) for n in group))
        for projection, group in groupby(captures, key=lambda n: n.split_tensor()[0])
    ]
    assert groups == [(None, ATTENTION), ("q_proj", LINEAR), ("k_proj", LINEAR), ("v_proj", LINEAR[:5])]


def test_files_load_without_qcollect_and_without_unpickling(run_dir):
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "sys.modules['qcollect'] = None\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.pt')):\n"
        "    file = torch.load(path, weights_only=True)\n"
        "    tensor, info, metadata = file['tensor'], file['tensor_info'], file['metadata']\n"
        "    assert list(tensor.shape) == info['shape'] and str(tensor.dtype) == info['dtype'], path\n"
        "    assert tensor.device.type == 'cpu' and not tensor.requires_grad and torch.isfinite(tensor).all(), path\n"
        "    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), path\n"
        "    assert metadata['world_size'] == 2 and metadata['values'] == 'original', path\n"
        "    assert torch.equal(torch.load(path, weights_only=True, mmap=True)['tensor'], tensor), path\n"
        "    print(path.name, metadata['module'], metadata['tensor_name'])\n"
    )
    command = [sys.executable, "-c", script, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 50


def test_the_manifest_lists_every_file_with_its_size_and_checksum(run_dir, files):
    records = read_manifests(RunPaths(run_dir))
    assert sorted(record.file for record in records) == [path.name for path in files]
    for record in records:
        content = (run_dir / record.file).read_bytes()
        assert (len(content), xxhash.xxh3_128_hexdigest(content)) == (record.bytes, record.xxh3_128)
        name = CaptureName.parse(record.file)
        assert (name.rank, name.tensor.endswith(record.metadata["tensor_name"])) == (record.metadata["rank"], True)


def test_status_agrees_with_the_files(status, files):
    assert (status["state"], status["captured"], status["num_files"]) == ("completed", 50, 50)
    assert status["bytes"] == sum(path.stat().st_size for path in files)
    assert [(r["state"], r["captured"], r["share"]) for r in status["ranks"]] == [("done", 25, 25)] * 2
    assert sum(r["bytes"] for r in status["ranks"]) == status["bytes"]
    assert status["failures"] == status["warnings"] == []


def test_run_json_holds_code_and_reason(run_dir):
    run = json.loads(RunPaths(run_dir).run_path.read_text())
    assert (run["state"], run["exit_code"], run["reason"]) == ("completed", 0, "all 50 captures were taken")
    assert (run["world_size"], run["target"], run["quant_type"], run["recipe_name"]) == (2, 50, "mxfp8", "tiny")


def test_every_rank_has_a_log_of_its_own(run_dir):
    logs = [path for path in RunPaths(run_dir).logs_dir.iterdir() if path.is_file()]
    assert {path.name for path in logs} == {"agent.log", "rank00000.log", "rank00001.log"}
    assert "Traceback" not in "".join(path.read_text() for path in logs)


def test_metrics_hold_loss_gradient_norm_and_speed(run_dir):
    (line,) = [json.loads(text) for text in RunPaths(run_dir).metrics_path.read_text().splitlines()]
    assert line["iteration"] == 0
    assert 5 < line["loss"] < 7  # near ln 320: the weights are random
    assert line["grad_norm"] > 0 and line["tokens_per_s"] > 0
    assert line["num_tokens"] == 2 * 2 * 128


def test_the_result_is_one_line_on_stdout(result, run_dir):
    assert result.out == f"{run_dir}\n"
    assert result.err.splitlines()[-1] == "mxfp8: all 50 captures were taken"


def test_progress_off_a_terminal_is_plain_lines_that_are_never_broken(result, run_dir):
    assert "\x1b" not in result.out + result.err and "\r" not in result.err
    lines = result.err.splitlines()
    assert lines[0] == "tiny: checking the model, the data and the devices"
    assert all(line.startswith(("mxfp8", "tiny")) for line in lines), result.err
    assert len(lines) == len(set(lines))


def test_status_off_a_terminal_is_a_line_a_run(qcollect_here, run_dir, out_dir):
    for folder in (run_dir, out_dir):
        shown = qcollect_here("status", str(folder), env={"COLUMNS": "40", "TERM": "dumb"})
        assert shown.exit_code == 0
        (line,) = shown.out.splitlines()
        assert line.startswith("mxfp8  completed  50/50")
        assert line.endswith("all 50 captures were taken")


def test_status_of_a_relative_folder_agrees_from_anywhere(qcollect_here, run_dir, status):
    (run,) = qcollect_here("status", "--json", "run[red]x", cwd=run_dir.parents[1]).json
    ages = ("age_s", "last_file_age_s")
    assert run["run_dir"] == str(run_dir)
    assert {k: v for k, v in run.items() if k not in ages and k != "ranks"} == {
        k: v for k, v in status.items() if k not in ages and k != "ranks"
    }


def test_a_name_in_brackets_is_shown_as_it_is_in_the_dashboard(run_dir):
    from rich.console import Console

    from qcollect.monitor.render import render_status
    from qcollect.monitor.snapshot import summarize_directory

    console = Console(force_terminal=True, width=400, color_system=None)
    with console.capture() as capture:
        console.print(render_status(summarize_directory(run_dir, time.time())))
    assert str(run_dir) in capture.get()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_folder_that_holds_a_run_is_refused_at_once_and_left_alone(
    qcollect_here, nothing_starts, run_dir, out_dir, flags, list_tree, monkeypatch
):
    monkeypatch.setattr("qcollect.launch.inspect.inspect_recipe", lambda recipe: pytest.fail("the model was looked at"))
    before = list_tree(run_dir)
    refused = qcollect_here("run", "mxfp8", "--recipe", "tiny", "--out", str(out_dir), *flags)
    assert (refused.exit_code, refused.out) == (3, "")
    run_id = json.loads(RunPaths(run_dir).run_path.read_text())["run_id"]
    assert f"{run_dir} already holds run {run_id} (completed, " in refused.err
    assert "--overwrite" in refused.err and "--out" in refused.err
    assert list_tree(run_dir) == before


def test_the_size_a_dry_run_tells_is_the_size_of_the_files(qcollect_here, nothing_starts, files, tmp_path):
    args = ("run", "mxfp8", "--recipe", "tiny", "--nproc", "2", "--target", "50", "--set", "launch.device=cpu")
    plan = qcollect_here(*args, "--out", str(tmp_path / "new"), "--dry-run", "--json").json
    assert plan["num_bytes"] == pytest.approx(sum(path.stat().st_size for path in files), rel=0.2)
    assert plan["target"] == len(files)
    assert not (tmp_path / "new").exists()


def test_what_a_folder_holds_beside_it_does_not_disturb_a_status(qcollect_here, run_dir, tmp_path):
    (tmp_path / "mxfp8").symlink_to(run_dir)
    (tmp_path / "notes").mkdir()
    (run,) = qcollect_here("status", "--json", str(tmp_path)).json
    assert (run["captured"], run["run_dir"]) == (50, str(tmp_path / "mxfp8"))


def test_status_says_where_it_found_no_run(qcollect_here, tmp_path: Path):
    for folder, problem in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no run")):
        missing = qcollect_here("status", str(folder))
        assert (missing.exit_code, missing.out) == (3, "")
        assert missing.err.startswith(f"error: {folder} {problem} ")
        assert "name the folder given to --out" in missing.err
