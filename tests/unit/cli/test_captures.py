import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import qcollect.cli
from qcollect.host.processes import identify
from qcollect.monitor.run_record import RunRecord, RunState
from qcollect.paths import RunPaths, temporary_path
from qcollect.store.files import append_line, read_lines, write_json_atomic
from qcollect.vocab import GROUPS, Gemm, LayerType, RankInfo, Values
from qcollect.worker.saver import Observation, Saver

OLDER = (
    "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt",
    "20241201_143022_0002_iter003_linear_LNone_forward_post_linear_hifp8_rank11_sample7_output.pt",
    "20250908_095220_0003_attention_L0_forward_pre_FA_mxfp8_value.pt",
    "20250908_091143_0004_linear_L1_backward_mxfp8_input.pt",
)


def save_run(
    run_dir, *, ranks=(0, 1), by_iteration=False, quant_type="mxfp8", module="model.layers.3.self_attn.q_proj"
):
    """A linear's six captures on each rank, and a quantized copy."""
    for rank in ranks:
        clock = datetime(2024, 12, 1, 14, 30, tzinfo=UTC)
        saver = Saver(run_dir, run_id="one", by_iteration=by_iteration, clock=lambda clock=clock: clock)
        slots = [(slot, None) for slot in GROUPS[LayerType.LINEAR]]
        for slot, gemm in [*slots, (GROUPS[LayerType.LINEAR][0], Gemm.WGRAD)]:
            seen = Observation(
                layer_type="linear",
                layer_idx=3 + rank,
                operation=slot.operation,
                phase=slot.phase,
                component="linear",
                quant_type=quant_type,
                tensor_name=slot.tensor_name,
                tensor=f"q_proj_{slot.tensor_name}" + (f"_{gemm}" if gemm else ""),
                module=module,
                rank=RankInfo(rank=rank, local_rank=0, world_size=2),
                iteration=0,
                micro_batch=0,
                sample_idx=rank,
                num_samples=1,
                values=Values.QUANTIZED if gemm else Values.ORIGINAL,
                consumers=[{"gemm": str(gemm), "axis": 0}] if gemm else (),
                extra={"expert": None, "is_first": rank == 0},
            )
            saver.save(torch.full((2, 4), 0.5 + saver.num_saved), seen)
    return RunPaths(run_dir)


@pytest.fixture
def paths(tmp_path):
    return save_run(tmp_path / "out" / "mxfp8")


@pytest.fixture
def command(capsys):
    """Runs the command line here; gives its exit code, stdout and stderr."""

    def run(*args):
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            qcollect.cli.main([str(arg) for arg in args])
        signal.signal(signal.SIGTERM, before)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def listed(command):
    """The values of some columns of the captures that ``ls`` lists, a tuple each."""

    def run(directory, columns, *args):
        code, out, err = command("ls", directory, "--columns", columns, "--json", *args)
        assert code == 0, err
        return [tuple(row.values()) for row in json.loads(out)]

    return run


# ---- ls -------------------------------------------------------------------------------------------


def test_captures_are_a_table_of_whole_lines(command, paths, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    code, out, err = command("ls", paths.run_dir)
    header, *rows = out.splitlines()
    assert (code, err, len(rows)) == (0, "", 14)
    assert header.split() == [
        "rank", "iteration", "layer_idx", "module", "operation", "phase", "tensor_name", "gemm", "shape", "dtype",
        "abs_max", "bytes", "file",
    ]  # fmt: skip
    file = "20241201_143000_0001_iter000_linear_L3_forward_pre_linear_mxfp8_rank0_sample0_q_proj_input.pt"
    size = (paths.run_dir / file).stat().st_size
    assert rows[0].split() == [
        "0", "0", "3", "model.layers.3.self_attn.q_proj", "forward", "pre", "input", "-", "2x4", "torch.float32", "0.5",
        str(size), file,
    ]  # fmt: skip


def test_all_runs_of_a_folder_are_listed_with_their_names(command, listed, paths):
    save_run(paths.run_dir.with_name("mxfp4"), ranks=(0,), by_iteration=True, quant_type="mxfp4")
    assert listed(paths.run_dir.parent, "run,quant_type", "--where", "tensor_name=weight") == [
        ("mxfp4", "mxfp4"),
        ("mxfp8", "mxfp8"),
        ("mxfp8", "mxfp8"),
    ]
    _, out, _ = command("ls", paths.run_dir.parent)
    assert out.splitlines()[0].startswith("run    rank  iteration")
    ((path,),) = listed(paths.run_dir.parent, "path", "--where", "run=mxfp4", "--where", "tensor_name=weight")
    assert path.startswith(f"{paths.run_dir.parent}/mxfp4/iter00000/") and Path(path).exists()


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("layer_idx=3", 7),
        ("layer_idx=3,4", 14),
        ("layer_idx=0-3", 7),
        ("layer_idx=4-9,0-2", 7),
        ("layer_idx=3.0", 7),
        ("layer_idx=three", 0),
        ("layer_idx=true", 0),
        ("operation=backward", 6),
        ("operation=back*", 6),
        ("operation=BACKWARD", 0),
        ("tensor_name=grad_*,weight", 8),
        ("module=*.q_proj", 14),
        ("gemm=wgrad", 2),
        ("gemm=null", 12),
        ("gemm=dgrad", 0),
        ("is_first=true", 7),
        ("is_first=1", 0),
        ("expert=null", 14),
        ("expert=0", 0),
        ("values=quantized", 2),
        ("shape=[2,4]", 14),
        ("shape=[2, 4]", 14),
        ("shape=2x4", 14),
        ("shape=*x8", 0),
        ("abs_max=0.5", 2),
        ("abs_max=1-3", 4),
        ("dtype=torch.float32", 14),
        ("metadata.rank=1", 7),
        ("tensor_info.num_nan=0", 14),
        ("counter=1", 2),
        ('save_time="2024-12-01 14:30:00"', 14),
        ("save_time=2024-12-01 14:30:00", 14),
        ('consumers=[{"gemm": "wgrad", "axis": 0}]', 2),
    ],
)
def test_values_are_compared_by_their_type(listed, paths, where, count):
    assert len(listed(paths.run_dir, "file", "--where", where)) == count


def test_all_conditions_must_hold(listed, paths):
    found = listed(paths.run_dir, "rank,tensor_name", "--where", "rank=1", "--where", "operation=backward")
    assert found == [(1, "grad_output"), (1, "grad_input"), (1, "grad_weight")]


def test_captures_are_sorted_by_fields_and_cut(listed, paths):
    assert listed(paths.run_dir, "abs_max,rank", "--sort=-abs_max,rank", "--limit", "3") == [
        (6.5, 0),
        (6.5, 1),
        (5.5, 0),
    ]
    assert listed(paths.run_dir, "gemm", "--sort", "gemm", "--limit", "3") == [("wgrad",), ("wgrad",), (None,)]
    assert listed(paths.run_dir, "gemm", "--sort", "-gemm", "--limit", "3") == [("wgrad",), ("wgrad",), (None,)]
    assert listed(paths.run_dir, "counter", "--limit", "0") == []
    assert listed(paths.run_dir, "counter", "--limit", "2") == [(1,), (2,)]


def test_an_unknown_field_is_an_error_that_names_those_there_are(command, paths):
    for args in (["--where", "layer_ixd=3"], ["--columns", "layer_ixd"], ["--sort", "layer_ixd"]):
        code, out, err = command("ls", paths.run_dir, *args)
        assert (code, out) == (2, "")
        assert err.startswith(
            "error: no capture has the field 'layer_ixd'; did you mean 'layer_idx'? fields: abs_max, "
        )
        assert ", expert, " in err


def test_what_is_no_condition_is_an_error(command, paths):
    code, _, err = command("ls", paths.run_dir, "--where", "layer_idx")
    assert (code, err) == (
        2,
        "error: --where 'layer_idx' is no condition; write field=value, for example layer_idx=3\n",
    )


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_filter_that_matches_nothing_says_so_on_stderr(command, paths, json_flag):
    code, out, err = command("ls", paths.run_dir, "--where", "rank=7", "--where", "layer_idx=3", *json_flag)
    assert (code, out) == (0, "[]\n" if json_flag else "")
    assert err == f"none of 14 captures in {paths.run_dir} has rank=7 and layer_idx=3\n"


def test_json_holds_everything_the_manifest_says(command, paths):
    _, out, _ = command("ls", paths.run_dir, "--limit", "1", "--json")
    (capture,) = json.loads(out)
    line = json.loads(read_lines(paths.manifest_path(0))[0])
    assert capture == {"run": "mxfp8", "path": str(paths.run_dir / line["file"]), **line}
    assert list(capture["metadata"]) == list(line["metadata"])


def test_older_captures_are_listed_from_their_names(command, listed, tmp_path):
    for name in OLDER:
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "checkpoint.pt").touch()
    columns = "counter,iteration,layer_type,layer_idx,operation,phase,component,quant_type,rank,sample_idx,tensor_name"
    assert listed(tmp_path, columns) == [
        (1, 0, "linear", 0, "forward", "post", "linear", "bf16", 0, 0, "output"),
        (2, 3, "linear", None, "forward", "post", "linear", "hifp8", 11, 7, "output"),
        (4, None, "linear", 1, "backward", None, None, "mxfp8", None, None, "grad_output"),
        (3, None, "attention", 0, "forward", "pre", "FA", "mxfp8", None, None, "value"),
    ]
    assert listed(tmp_path, "file,bytes", "--where", "rank=11") == [(OLDER[1], 5)]
    assert listed(tmp_path, "file", "--where", "phase=null") == [(OLDER[3],)]
    code, out, _ = command("ls", tmp_path)
    assert code == 0 and len(out.splitlines()) == 5
    (first, *_) = json.loads(command("ls", tmp_path, "--json")[1])
    assert (first["xxh3_128"], first["tensor_info"], first["metadata"]["quant_type"]) == (None, {}, "bf16")
    assert sorted(os.listdir(tmp_path)) == sorted([*OLDER, "checkpoint.pt"])


def test_a_file_no_manifest_lists_is_listed_from_its_name(listed, paths):
    lines = read_lines(paths.manifest_path(1))
    paths.manifest_path(1).write_bytes(b"\n".join(lines[1:]) + b"\n" + lines[0][:20])
    found = listed(paths.run_dir, "abs_max,layer_idx,gemm", "--where", "rank=1", "--where", "tensor_name=input,weight")
    assert found == [(1.5, 4, None), (6.5, 4, "wgrad"), (None, 4, None)]


def test_a_damaged_line_is_pointed_out(command, paths):
    with paths.manifest_path(0).open("ab") as file:
        file.write(b"{}\n")
    code, out, err = command("ls", paths.run_dir)
    assert (code, len(out.splitlines())) == (0, 15)
    assert err == (
        f"warning: {paths.manifest_path(0)}:8: no manifest line (KeyError: 'file'); "
        "'qcollect verify --repair' mends it\n"
    )


def test_folders_without_captures_are_named(command, tmp_path):
    code, out, err = command("ls", tmp_path / "none")
    assert (code, out) == (3, "") and err.startswith(f"error: {tmp_path}/none does not exist (looked for ")
    code, out, err = command("ls", tmp_path)
    assert (code, out) == (3, "") and err.startswith(f"error: {tmp_path} holds no captures (looked for ")
    (tmp_path / "file").touch()
    assert command("ls", tmp_path / "file")[0] == 2
    (tmp_path / ".qcollect").mkdir()
    assert command("ls", tmp_path) == (0, "", f"no capture in {tmp_path}\n")


def test_text_of_files_is_shown_as_it_is_and_never_as_control_codes(command, tmp_path):
    save_run(tmp_path / "a [x] [red]b", ranks=(0,), module="[bold]m\x1b[31m[0]\n")
    code, out, _ = command("ls", tmp_path, "--columns", "module,run,path", "--limit", "1")
    assert code == 0 and out.splitlines()[1].startswith("[bold]m\\x1b[31m[0]   a [x] [red]b  ")
    file = next((tmp_path / "a [x] [red]b").glob("*.pt"))
    assert "  module: [bold]m\\x1b[31m[0] \n" in command("show", file)[1]


# ---- show -----------------------------------------------------------------------------------------


def test_a_capture_shows_what_it_says_of_itself(command, paths):
    line = json.loads(read_lines(paths.manifest_path(0))[0])
    code, out, err = command("show", paths.run_dir / line["file"])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:4] == [
        f"file: {paths.run_dir / line['file']}",
        f"bytes: {line['bytes']}",
        f"xxh3_128: {line['xxh3_128']}",
        "manifest: agrees",
    ]
    assert {"  tensor: q_proj_input", "  layer_idx: 3", "  expert: none", "  std: 0.0"} <= set(lines)
    assert lines[-3:] == ["shape: 2x4", "dtype: torch.float32", "first values: 0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5"]
    shown = json.loads(command("show", paths.run_dir / line["file"], "--json")[1])
    assert (shown["metadata"], shown["tensor_info"]) == (line["metadata"], line["tensor_info"])
    assert shown["values_shown"] == [0.5] * 8


@pytest.mark.parametrize("by_iteration", [False, True])
def test_a_manifest_line_that_disagrees_is_told(command, tmp_path, by_iteration):
    paths = save_run(tmp_path / "run", ranks=(0,), by_iteration=by_iteration)
    manifest = paths.manifest_path(0)
    line = json.loads(read_lines(manifest)[0])

    def said():
        return json.loads(command("show", paths.run_dir / line["file"], "--json")[1])["manifest"]

    assert said() == "agrees"
    manifest.write_text(json.dumps(line | {"xxh3_128": "00", "metadata": {}}) + "\n")
    assert said() == "says otherwise: xxh3_128, metadata"
    manifest.unlink()
    assert said() == "no line for this file"


@pytest.mark.parametrize("name", [*OLDER, "renamed by hand.pt"])
@pytest.mark.parametrize("content", [{}, {"metadata": {"layer_idx": 0}}, {"tensor_info": {"shape": torch.Size([3])}}])
def test_older_captures_are_shown(command, tmp_path, name, content):
    torch.save({"tensor": torch.tensor([1.0, float("nan"), float("inf")]).bfloat16(), **content}, tmp_path / name)
    code, out, err = command("show", tmp_path / name)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "first values: 1.0 nan inf"
    shown = json.loads(command("show", tmp_path / name, "--json")[1])
    assert (shown["manifest"], shown["shape"], shown["dtype"]) == ("no line for this file", [3], "torch.bfloat16")
    assert bool(shown["name"]) == (name in OLDER)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.ones(3, 100),
        torch.eye(3).to_sparse(),
    ],
    ids=str,
)
def test_values_of_every_kind_of_tensor_are_shown(command, tmp_path, tensor):
    torch.save({"tensor": tensor, "metadata": {}}, tmp_path / "x.pt")
    code, out, err = command("show", tmp_path / "x.pt", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["values_shown"]) == min(8, tensor.numel())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text", None])
def test_a_torn_file_is_an_error_with_its_path(command, paths, content):
    path = next(paths.run_dir.glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    code, out, err = command("show", path)
    assert (code, out) == (4, "")
    assert err.startswith(f"error: {path}: is torn or no capture: ") and err.count("\n") == 1


def test_what_is_no_file_is_an_error(command, paths):
    code, _, err = command("show", paths.run_dir / "none.pt")
    assert (code, err.startswith(f"error: {paths.run_dir}/none.pt: cannot be read: No such file")) == (4, True)
    assert command("show", paths.run_dir)[0] == 2
    torch.save([1, 2], paths.run_dir / "list.pt")
    assert command("show", paths.run_dir / "list.pt")[0] == 4


# ---- verify ---------------------------------------------------------------------------------------


def test_a_sound_run_is_told_in_a_line(command, paths):
    size = sum(p.stat().st_size for p in paths.run_dir.glob("*.pt"))
    expected = f"{paths.run_dir}: 14 files, {size:,} bytes: all is well\n"
    assert command("verify", paths.run_dir.parent) == (0, expected, "")


def test_findings_are_a_line_each_and_end_with_4(command, paths):
    save_run(paths.run_dir.with_name("hifp8"), ranks=(0,))
    path = min(paths.run_dir.glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = command("verify", paths.run_dir.parent)
    first, second, third = out.splitlines()
    assert code == 4
    assert first.endswith("7 files, " + first.split("7 files, ")[1]) and first.endswith(": all is well")
    assert second.startswith(f"{path}: is torn or no capture (")
    assert third.endswith(": 1 finding(s)")
    code, out, _ = command("verify", paths.run_dir, "--json")
    (report,) = json.loads(out)
    assert (code, report["num_files"], report["target"]) == (4, 14, None)
    assert [(f["path"], f["problem"]) for f in report["findings"]] == [(str(path), "torn")]


def test_a_repair_tells_what_it_did_and_the_second_does_nothing(command, paths):
    path = min(paths.run_dir.glob("*.pt"))
    path.write_bytes(b"torn")
    code, out, _ = command("verify", paths.run_dir, "--repair")
    assert (code, out.splitlines()[0]) == (0, f"{path}: moved to {paths.torn_dir / path.name}: it is torn")
    assert out.splitlines()[-1].endswith(": all is well")
    code, out, _ = command("verify", paths.run_dir, "--repair", "--json")
    assert (code, json.loads(out)[0]["repaired"]) == (0, [])
    assert command("ls", paths.run_dir)[1].count("\n") == 14


def planned_run(make_plan, run_dir):
    """A run with a plan of a query on each of two ranks."""
    plan = make_plan(run_dir, share=1)
    for rank in (0, 1):
        seen = Observation(
            layer_type="attention",
            layer_idx=0,
            operation="forward",
            phase="pre",
            component="FA",
            quant_type="mxfp8",
            tensor_name="query",
            tensor="query",
            module="model.layers.0.self_attn",
            rank=RankInfo(rank=rank, local_rank=rank, world_size=2),
            iteration=0,
            micro_batch=0,
            sample_idx=4 * rank,
            num_samples=4,
        )
        Saver(run_dir, run_id="one").save(torch.ones(2), seen)
    paths = RunPaths(run_dir)
    write_json_atomic(paths.plan_path, plan.to_dict())
    return paths


def test_a_run_is_compared_with_its_plan(command, make_plan, tmp_path):
    paths = planned_run(make_plan, tmp_path / "mxfp8")
    code, out, _ = command("verify", paths.run_dir)
    assert (code, out.count("2 of 2 planned: all is well")) == (0, 1)
    (gone,) = paths.run_dir.glob("*rank1*.pt")
    gone.unlink()
    assert command("verify", paths.run_dir)[0] == 4
    code, out, _ = command("verify", paths.run_dir, "--repair")
    *_, missing, summary = out.splitlines()
    assert code == 4
    assert missing == (
        f"{paths.run_dir}: is without rank 1 iteration 0 micro-batch 0 model.layers.0.self_attn forward pre query, "
        "which is planned; 'qcollect run --resume' takes it"
    )
    assert summary.endswith(", 1 of 2 planned: 1 finding(s)")


def test_a_plan_that_cannot_be_read_is_a_finding(command, make_plan, tmp_path):
    paths = planned_run(make_plan, tmp_path / "mxfp8")
    paths.plan_path.write_text('{"schedule": ')
    code, out, _ = command("verify", paths.run_dir)
    assert code == 4 and out.startswith(f"{paths.plan_path}: cannot be read (JSONDecodeError: ")


@pytest.fixture
def record_run():
    def record(paths, *, launcher, host=None):
        run = RunRecord(
            run_id="one",
            run_token="token",
            quant_type="mxfp8",
            state=RunState.RUNNING,
            host=host or socket.gethostname(),
            target=2,
            world_size=2,
            recipe_name="tiny",
            launcher=launcher,
        )
        write_json_atomic(paths.run_path, run.to_dict())

    return record


def test_a_run_that_is_alive_is_not_repaired(command, paths, record_run):
    other = save_run(paths.run_dir.with_name("hifp8"), ranks=(0,))
    (other.run_dir / "torn").mkdir()
    path = min(other.run_dir.glob("*.pt"))
    path.write_bytes(b"torn")
    record_run(paths, launcher=identify(os.getpid()))
    code, out, err = command("verify", paths.run_dir.parent, "--repair")
    assert (code, out) == (3, "")
    assert err == f"error: {paths.run_dir} is in use by a run; let it end, or end it with 'qcollect stop'\n"
    assert path.exists()


def test_a_run_that_is_alive_is_not_blamed_for_what_is_on_its_way(command, make_plan, tmp_path, record_run):
    paths = planned_run(make_plan, tmp_path / "mxfp8")
    record_run(paths, launcher=identify(os.getpid()))
    (path,) = paths.run_dir.glob("*rank1*.pt")
    path.rename(temporary_path(path, "abc"))
    paths.manifest_path(1).unlink()
    code, out, _ = command("verify", paths.run_dir)
    assert (code, out.splitlines()[0].endswith("1 of 2 planned: all is well so far (the run goes on)")) == (0, True)
    record_run(paths, launcher=None)
    assert command("verify", paths.run_dir)[0] == 4


def test_a_folder_that_cannot_be_repaired_says_why(command, paths, monkeypatch):
    min(paths.run_dir.glob("*.pt")).write_bytes(b"torn")

    def refuse(*args):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr("qcollect.store.repair.rename_new", refuse)
    code, _, err = command("verify", paths.run_dir, "--repair")
    assert (code, err) == (3, f"error: {paths.run_dir} cannot be repaired: Permission denied (somewhere)\n")


# ---- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", ["ls {dir}", "ls {dir} --json", "verify {dir} --json", "show {file}"])
def test_a_reader_that_closes_early_makes_no_noise(paths, args):
    """Textualize/rich issue 3400."""
    if args.startswith("ls"):  # more than a pipe holds
        line = json.loads(read_lines(paths.manifest_path(0))[0])
        for counter in range(1000):
            append_line(
                paths.manifest_path(0), line | {"file": line["file"].replace("_0001_", f"_{counter + 100:04d}_")}
            )
    words = args.format(dir=paths.run_dir, file=next(paths.run_dir.glob("*.pt")))
    command = f"{sys.executable} -m qcollect {words} | head -1; exit ${{PIPESTATUS[0]}}"
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=env)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert done.returncode in (0, 1, 141)


def test_listing_imports_no_torch(paths):
    script = (
        "import sys\nfrom qcollect.cli import main\n"
        "try:\n    main(['ls', sys.argv[1], '--where', 'rank=0'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(paths.run_dir)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 8)


def test_a_narrow_terminal_gets_the_columns_that_fit(paths):
    shown = in_terminal(["ls", str(paths.run_dir), "--where", "rank=0"], columns=90)
    header, *rows = [line.rstrip() for line in shown.splitlines()]
    assert header.split()[:3] == ["rank", "layer_idx", "module"] and "file" not in header
    assert len(rows) == 8 and rows[-1].startswith("left out, as the terminal is narrow: file, dtype, bytes, ")
    long = in_terminal(["ls", str(paths.run_dir), "--columns", "path"], columns=40)
    assert str(min(paths.run_dir.glob("*.pt"))) in long.splitlines()
    wide = in_terminal(["ls", str(paths.run_dir), "--where", "rank=0"], columns=300)
    assert "file" in wide.splitlines()[0] and "left out" not in wide


def in_terminal(arguments, *, columns):
    """What a command prints on a terminal of that width."""
    main, side = pty.openpty()
    env = os.environ | {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "qcollect", *arguments]
    parts = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=side, stderr=side, env=env) as process:
        os.close(side)
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(main)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[01]m", "", b"".join(parts).decode())  # bold headers


def test_a_read_only_folder_is_listed_and_verified(command, paths):
    shutil.copytree(paths.run_dir, copy := paths.run_dir.with_name("copy"))
    for folder in (copy, copy / ".qcollect"):
        folder.chmod(0o555)
    try:
        assert command("ls", copy)[0] == command("verify", copy)[0] == 0
    finally:
        for folder in (copy, copy / ".qcollect"):
            folder.chmod(0o755)
