import multiprocessing
import os
import socket

import pytest

from qcollect.errors import ExitCode, OutputError
from qcollect.launch.claim import ClaimMode, claim
from qcollect.monitor.run_record import RunState, read_run_record
from qcollect.paths import RunPaths
from qcollect.plan.record import Plan
from qcollect.plan.trigger import TriggerEvent, read_event, record_event, request_capture
from qcollect.store.files import append_line, read_json, write_json_atomic
from qcollect.vocab import Trigger

NAME = "20241201_143022_0001_iter000_attention_L8_forward_pre_FA_mxfp8_rank0_sample0_query.pt"
NOW = 1_733_063_422.0
GONE = {"pid": 1, "create_time": 12.0}  # pid 1 runs, and did not start then


def listing(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def add_capture(paths, file):
    path = paths.run_dir / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"tensor")
    fields = {"file": file, "bytes": 6, "xxh3_128": "0", "metadata": {}, "tensor_info": {}}
    append_line(paths.manifest_path(0), fields)


def edit_record(paths, **changes):
    write_json_atomic(paths.run_path, read_json(paths.run_path) | changes)


@pytest.fixture
def dead_run(make_plan):
    """A run folder whose launcher was killed while it ran."""
    paths = claim(make_plan(name="old"), mode=ClaimMode.NEW, now=NOW).paths
    edit_record(paths, state="running", launcher=GONE)
    return paths


def test_claimed_folder_has_its_plan_its_record_and_its_folders(make_plan):
    plan = make_plan()
    claimed = claim(plan, mode=ClaimMode.NEW, now=NOW)
    assert claimed.paths == RunPaths(plan.run_dir)
    assert Plan.read(claimed.paths.plan_path) == plan
    assert read_run_record(claimed.paths) == claimed.record
    assert read_json(claimed.paths.run_path) == {
        "schema": 1,
        "run_id": "run-one",
        "run_token": "tokenone",
        "quant_type": "mxfp8",
        "state": "starting",
        "reason": None,
        "exit_code": None,
        "host": socket.gethostname(),
        "launcher": claimed.record.launcher.to_dict(),
        "agent": None,
        "target": 6,
        "world_size": 2,
        "started_at": "2024-12-01T14:30:22.000+00:00",
        "ended_at": None,
        "recipe_name": "tiny",
        "trigger": None,
    }
    assert claimed.record.launcher.pid == os.getpid()
    assert listing(plan.run_dir) == [
        ".qcollect",
        *(
            f".qcollect/{name}"
            for name in ("control", "errors", "logs", "manifest", "plan.json", "progress", "run.json")
        ),
    ]


def test_folder_in_use_is_refused_with_who_uses_it(make_plan):
    plan = make_plan(name="first")
    claim(plan, mode=ClaimMode.NEW, now=NOW)
    for mode in ClaimMode:
        with pytest.raises(OutputError) as error:
            claim(make_plan(name="second"), mode=mode, now=NOW)
        assert str(error.value) == (
            f"{plan.run_dir} is in use by run run-first (starting, pid {os.getpid()} on {socket.gethostname()}, "
            f"started 2024-12-01 14:30:22+00:00); end it with 'qcollect stop {plan.run_dir}', "
            "or choose another folder with --out"
        )
        assert error.value.exit_code == ExitCode.PREFLIGHT


def test_folder_of_an_ended_run_is_refused_with_what_to_do(make_plan):
    paths = claim(make_plan(name="first"), mode=ClaimMode.NEW, now=NOW).paths
    edit_record(paths, state="completed")
    before = listing(paths.run_dir)
    with pytest.raises(OutputError, match="already holds run run-first.*--overwrite.*--out"):
        claim(make_plan(name="second"), mode=ClaimMode.NEW, now=NOW)
    assert listing(paths.run_dir) == before


@pytest.mark.parametrize(
    "launcher",
    [GONE, {"pid": 0, "create_time": 0}, {"pid": "", "create_time": "x"}, {"pid": True}, None, "garbage", {}],
)
def test_stale_record_does_not_keep_a_folder(make_plan, dead_run, launcher):
    edit_record(dead_run, launcher=launcher)
    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert read_run_record(dead_run).run_id == "run-new"


@pytest.mark.parametrize("content", [b"", b"0", b'{"state": "runn'])
def test_damaged_record_is_replaced_when_asked(make_plan, dead_run, content):
    dead_run.run_path.write_bytes(content)
    with pytest.raises(OutputError, match=r"already holds a run without a readable run\.json"):
        claim(make_plan(name="new"), mode=ClaimMode.NEW, now=NOW)
    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert read_run_record(dead_run).run_id == "run-new"


def test_run_of_another_host_is_alive_while_its_files_change(make_plan, dead_run):
    edit_record(dead_run, host="elsewhere")
    changed_at = dead_run.run_path.stat().st_mtime
    with pytest.raises(OutputError, match="in use by run run-old .* on elsewhere"):
        claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=changed_at + 500)
    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=changed_at + 700)


def test_overwrite_removes_what_the_manifests_name_and_nothing_else(make_plan, dead_run):
    run_dir = dead_run.run_dir
    by_iteration = "iter00001/" + NAME.replace("iter000", "iter001")
    add_capture(dead_run, NAME)
    add_capture(dead_run, by_iteration)
    outside = run_dir.parent / "precious.pt"
    outside.write_bytes(b"")
    for file in ("../precious.pt", str(outside), "iter00001/../../precious.pt", "sub/x.pt", ".."):
        fields = {"file": file, "bytes": 6, "xxh3_128": "0", "metadata": {}, "tensor_info": {}}
        append_line(dead_run.manifest_path(1), fields)
    for kept in ("notes.txt", ".mine.tmp", "sub/x.pt"):
        (run_dir / kept).parent.mkdir(exist_ok=True)
        (run_dir / kept).write_bytes(b"mine")
    unfinished = run_dir / f".{NAME}.0123456789ab.tmp"
    unfinished.write_bytes(b"half")

    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)

    assert outside.exists()
    kept = [name for name in listing(run_dir) if not name.startswith(".qcollect")]
    assert kept == [".mine.tmp", "notes.txt", "sub", "sub/x.pt"]
    assert read_run_record(dead_run).run_id == "run-new"
    assert list(dead_run.manifest_dir.iterdir()) == []


def test_iteration_folder_with_files_of_others_stays(make_plan, dead_run):
    add_capture(dead_run, "iter00001/" + NAME)
    (dead_run.run_dir / "iter00001" / "notes.txt").touch()
    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert [p.name for p in (dead_run.run_dir / "iter00001").iterdir()] == ["notes.txt"]


def test_captures_no_manifest_names_are_never_touched(make_plan, tmp_path):
    run_dir = tmp_path / "out" / "mxfp8"
    (run_dir / "iter00000").mkdir(parents=True)
    (run_dir / "iter00000" / "old.pt").write_bytes(b"old")
    for mode in (ClaimMode.NEW, ClaimMode.OVERWRITE):
        with pytest.raises(OutputError) as error:
            claim(make_plan(), mode=mode, now=NOW)
        assert str(error.value) == (
            f"{run_dir} holds 1 .pt file(s) that no manifest names, such as iter00000/old.pt; nothing was changed. "
            "Choose another folder with --out, or move them away"
        )
        assert listing(run_dir) == ["iter00000", "iter00000/old.pt"]


def test_overwrite_refuses_before_it_removes_anything_if_a_capture_is_not_named(make_plan, dead_run):
    add_capture(dead_run, NAME)
    (dead_run.run_dir / "other.pt").write_bytes(b"other")
    before = listing(dead_run.run_dir)
    with pytest.raises(OutputError, match="such as other.pt; nothing was changed"):
        claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert listing(dead_run.run_dir) == before


def test_damaged_manifest_refuses_the_claim(make_plan, dead_run):
    add_capture(dead_run, NAME)
    with dead_run.manifest_path(0).open("ab") as file:
        file.write(b"garbage\n")
    before = listing(dead_run.run_dir)
    with pytest.raises(OutputError, match=r"rank00000\.jsonl:2: no manifest line"):
        claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert listing(dead_run.run_dir) == before


def test_displaced_run_left_by_a_crash_is_finished_at_the_next_claim(make_plan, dead_run):
    add_capture(dead_run, NAME)
    dead_run.state_dir.rename(dead_run.displaced_dir("crashed"))
    claim(make_plan(name="new"), mode=ClaimMode.NEW, now=NOW)
    assert [name for name in listing(dead_run.run_dir) if "/" not in name] == [".qcollect"]


def test_claim_that_was_prepared_and_never_made_leaves_nothing(make_plan, tmp_path):
    run_dir = tmp_path / "out" / "mxfp8"
    (run_dir / "..qcollect.deadbeef.tmp" / "manifest").mkdir(parents=True)
    claim(make_plan(), mode=ClaimMode.NEW, now=NOW)
    assert [p.name for p in run_dir.iterdir()] == [".qcollect"]


def test_claim_is_withdrawn_if_the_old_run_cannot_be_removed(make_plan, dead_run, monkeypatch):
    add_capture(dead_run, NAME)

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(type(dead_run.run_dir), "unlink", refuse)
        with pytest.raises(OutputError, match="Permission denied"):
            claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert not dead_run.state_dir.exists()
    claim(make_plan(name="newer"), mode=ClaimMode.NEW, now=NOW)
    assert not (dead_run.run_dir / NAME).exists()


def test_file_in_the_way_is_explained(make_plan, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match=r"mxfp8 cannot be used: Not a directory .*--out"):
        claim(make_plan(), mode=ClaimMode.NEW, now=NOW)
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mxfp8").write_text("a file")
    with pytest.raises(OutputError, match=r"mxfp8 cannot be used: File exists .*--out"):
        claim(make_plan(), mode=ClaimMode.NEW, now=NOW)
    (tmp_path / "out" / "mxfp8").unlink()
    (tmp_path / "out" / "mxfp8").mkdir()
    (tmp_path / "out" / "mxfp8" / ".qcollect").write_text("a file")
    with pytest.raises(OutputError, match=r"\.qcollect is not a folder"):
        claim(make_plan(), mode=ClaimMode.OVERWRITE, now=NOW)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_folder_that_cannot_be_written_is_explained(make_plan, tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        claim(make_plan(), mode=ClaimMode.NEW, now=NOW)


def test_claim_works_where_there_are_no_locks(make_plan, monkeypatch):
    def refuse(file, operation):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    claim(make_plan(name="first"), mode=ClaimMode.NEW, now=NOW)
    with pytest.raises(OutputError, match="in use by run run-first"):
        claim(make_plan(name="second"), mode=ClaimMode.NEW, now=NOW)


# ---------------------------------------------------------------------------------------------
# Many at once
# ---------------------------------------------------------------------------------------------


def _start(plan, mode, together, done, results):
    together.wait()
    try:
        claim(plan, mode=mode, now=NOW)
        results.put((plan.run_id, None))
    except OutputError as error:
        results.put((plan.run_id, str(error)))
    done.wait()  # the winner lives until all have tried


def start_at_once(plans, mode):
    context = multiprocessing.get_context("fork")
    together, done, results = context.Barrier(len(plans)), context.Barrier(len(plans) + 1), context.Queue()
    processes = [context.Process(target=_start, args=(plan, mode, together, done, results)) for plan in plans]
    for process in processes:
        process.start()
    answers = dict(results.get(timeout=30) for _ in plans)
    done.wait(timeout=30)
    for process in processes:
        process.join(30)
    return answers


@pytest.mark.parametrize("has_locks", [True, False])
def test_of_ten_starters_at_once_exactly_one_wins_and_the_others_name_it(make_plan, monkeypatch, has_locks):
    if not has_locks:
        monkeypatch.setattr("fcntl.flock", lambda file, operation: (_ for _ in ()).throw(OSError(9, "no locks")))
    plans = [make_plan(name=str(i)) for i in range(10)]
    answers = start_at_once(plans, ClaimMode.NEW)
    winners = [run_id for run_id, error in answers.items() if error is None]
    paths = RunPaths(plans[0].run_dir)
    assert len(winners) == 1
    assert read_run_record(paths).run_id == winners[0]
    assert Plan.read(paths.plan_path).run_id == winners[0]
    assert all(f"run {winners[0]} " in error for error in answers.values() if error is not None)
    assert [p.name for p in paths.run_dir.iterdir()] == [".qcollect"]


def test_of_ten_overwriters_at_once_exactly_one_wins(make_plan, dead_run):
    add_capture(dead_run, NAME)
    answers = start_at_once([make_plan(name=str(i)) for i in range(10)], ClaimMode.OVERWRITE)
    winners = [run_id for run_id, error in answers.items() if error is None]
    assert len(winners) == 1
    assert read_run_record(dead_run).run_id == winners[0]
    assert read_run_record(dead_run).state == RunState.STARTING
    assert [p.name for p in dead_run.run_dir.iterdir()] == [".qcollect"]


def test_ten_folders_have_ten_owners(make_plan, tmp_path):
    plans = [make_plan(tmp_path / f"out{i}" / "mxfp8", name=str(i)) for i in range(10)]
    assert set(start_at_once(plans, ClaimMode.NEW).values()) == {None}


def test_resumed_run_keeps_what_triggered_it_and_no_request(make_plan, dead_run):
    claim(make_plan(name="new"), mode=ClaimMode.OVERWRITE, now=NOW)
    edit_record(dead_run, state="interrupted", launcher=GONE)
    event = TriggerEvent(on=Trigger.SIGNAL, iteration=3, rank=0)
    record_event(dead_run, event)
    request_capture(dead_run)
    claim(make_plan(name="new"), mode=ClaimMode.RESUME, now=NOW)
    assert (read_event(dead_run), dead_run.signal_path.exists()) == (event, False)
    edit_record(dead_run, state="interrupted", launcher=GONE)
    claim(make_plan(name="other"), mode=ClaimMode.OVERWRITE, now=NOW)
    assert read_event(dead_run) is None
