import json
import math
import os

import pytest

from qcollect.errors import ExitCode, OutputError
from qcollect.host.processes import ProcessId
from qcollect.monitor.run_record import RunState
from qcollect.monitor.snapshot import read_snapshot, summarize_directory
from qcollect.plan.trigger import TriggerEvent, record_event
from qcollect.vocab import Trigger

EVERYBODY = {ProcessId(pid=p, create_time=t) for p, t in ((10, 5.0), (100, 6.0), (101, 6.0))}


@pytest.fixture
def read(now):
    def read(run, *, hostname="here", processes=EVERYBODY, at=now):
        return read_snapshot(run.paths, at, hostname=hostname, is_process=processes.__contains__)

    return read


def test_running_run(make_run, read, now):
    run = make_run()
    run.record()
    run.progress(0, captured=99)  # what is captured is what the manifest says
    run.progress(1, updated_at=now - 1)
    run.captures(0, 4)
    run.captures(1, 1, folder="iter00001/")
    for path in run.paths.run_dir.rglob("*.pt"):
        os.utime(path, (now - 10, now - 10))
    (run.paths.run_dir / ".half.pt.0.tmp").touch()
    run.paths.metrics_path.write_text(
        '{"iteration": 2, "loss": 3.0}\n{"iteration": 4, "loss": 2.25}\n{"iteration": 5, "lo'
    )

    snapshot = read(run)

    assert (snapshot.state, snapshot.phase) == (RunState.RUNNING, "capturing")
    assert (snapshot.captured, snapshot.num_files, snapshot.target, snapshot.bytes) == (5, 5, 10, 5 * 1024)
    assert (snapshot.iteration, snapshot.loss, snapshot.elapsed_s) == (4, 2.25, 60.0)
    assert (snapshot.files_per_s, snapshot.eta_s, snapshot.last_file_age_s) == (0.5, 10.0, 10.0)
    assert [(r.state, r.captured, r.share, r.pid, r.age_s) for r in snapshot.ranks] == [
        ("training", 4, 5, 100, 2.0),
        ("training", 1, 5, 101, 1.0),
    ]
    assert snapshot.num_ranks_ok == 2
    assert snapshot.warnings == ()


def test_ranks_that_have_not_reported_wait_with_their_planned_share(make_run, read):
    run = make_run()
    run.record()
    run.paths.plan_path.write_text('{"shares": [5, 4]}')
    snapshot = read(run)
    assert [(r.state, r.share, r.captured) for r in snapshot.ranks] == [("waiting", 5, 0), ("waiting", 4, 0)]
    assert snapshot.phase == "starting"


@pytest.mark.parametrize(
    ("states", "captured", "phase"),
    [
        (("loading", "loading"), 0, "loading"),
        (("loading", "training"), 0, "capturing"),
        (("training", "training"), 10, "training"),
        (("draining", "done"), 10, "draining"),
    ],
)
def test_phase_of_a_running_run(make_run, read, states, captured, phase):
    run = make_run()
    run.record()
    for rank, state in enumerate(states):
        run.progress(rank, state=state)
    run.captures(0, captured)
    assert read(run).phase == phase


@pytest.mark.parametrize("recorded", ["starting", "running", "stopping"])
def test_run_whose_launcher_is_gone_is_lost(make_run, read, recorded):
    run = make_run()
    run.record(state=recorded)
    assert (
        read(run, processes={ProcessId(pid=10, create_time=99.0)}).state == RunState.LOST
    )  # the pid belongs to another process now


@pytest.mark.parametrize("launcher", [None, {}, {"pid": "", "create_time": 5.0}, {"pid": 0, "create_time": 5.0}])
def test_run_without_a_usable_pid_is_lost(make_run, read, launcher):
    run = make_run()
    run.record(launcher=launcher)
    assert read(run).state == RunState.LOST


def test_run_of_another_host_is_unknown(make_run, read):
    run = make_run()
    run.record()
    run.progress(0)
    snapshot = read(run, hostname="elsewhere", processes=set())
    assert snapshot.state == RunState.UNKNOWN
    assert snapshot.state_text == "unknown (recorded on here)"
    assert snapshot.ranks[0].state == "training"


def test_ended_run_keeps_its_state_whatever_its_pid_is_now(make_run, read):
    run = make_run()
    run.record(state="completed", exit_code=0, reason="all", ended_at="2024-12-01T14:29:52.000+00:00")
    run.progress(0, state="done")
    snapshot = read(run, processes=set())
    assert (snapshot.state, snapshot.exit_code, snapshot.reason) == (RunState.COMPLETED, 0, "all")
    assert (snapshot.elapsed_s, snapshot.eta_s) == (30.0, None)


def test_damaged_record_is_lost_and_a_missing_one_unknown(make_run, read):
    run = make_run()
    run.captures(1, 3)
    snapshot = read(run)
    assert (snapshot.state_text, snapshot.captured) == ("unknown (no run.json)", 3)
    assert [r.rank for r in snapshot.ranks] == [1]
    run.paths.run_path.write_text('{"state": "run')
    assert read(run).state == RunState.LOST


def test_worker_that_vanished_is_gone_and_one_that_told_why_has_failed(make_run, read):
    run = make_run()
    run.record(world_size=3)
    for rank in range(3):
        run.progress(rank)
    run.rank_error(1, time=100.0)
    run.agent_error((2, -15, 100))
    snapshot = read(run, processes={ProcessId(pid=10, create_time=5.0)})
    assert [r.state for r in snapshot.ranks] == ["gone", "failed", "ended"]
    assert snapshot.num_ranks_ok == 0
    assert snapshot.failures[0].describe() == "rank 1 failed: ValueError: bad tokenizer path"


def test_files_and_manifest_that_differ_after_the_end_are_pointed_out(make_run, read):
    run = make_run()
    run.record(state="failed")
    run.captures(0, 3)
    (run.paths.run_dir / "extra.pt").touch()
    assert read(run).warnings == ("1 .pt file(s) have no manifest line",)
    (run.paths.run_dir / "extra.pt").unlink()
    (run.paths.run_dir / "rank0_0.pt").unlink()
    assert read(run).warnings == ("1 manifest line(s) have no .pt file",)


def test_training_that_waited_for_writers_says_how_long(make_run, read):
    run = make_run()
    run.record(state="completed")
    run.progress(0, waited_s=0.4, state="done")
    run.progress(1, waited_s=12.3, state="done")
    assert read(run).warnings == (
        "training waited 12 s for captures to be written (rank 1); a larger capture.host_memory_gb holds more of them",
    )


def test_captures_that_refer_to_others_are_counted(make_run, read):
    run = make_run()
    run.record(state="completed")
    run.captures(0, 5)
    run.captures(1, 5)
    run.progress(0, num_deduped=0, deduped_bytes=0)
    run.progress(1)
    assert read(run).notes == ()
    run.progress(0, num_deduped=2, deduped_bytes=4_000_000)
    run.progress(1, num_deduped=1, deduped_bytes=321)
    snapshot = read(run)
    assert snapshot.notes == ("3 of 10 captures refer to another that is the same, which saved 4,000,321 bytes",)
    assert snapshot.warnings == ()
    shown = snapshot.to_dict()
    assert shown["notes"] == list(snapshot.notes)
    assert [(r["num_deduped"], r["deduped_bytes"]) for r in shown["ranks"]] == [(2, 4_000_000), (1, 321)]


def test_silent_rank_is_pointed_out(make_run, read, now):
    run = make_run()
    run.record()
    run.progress(0, updated_at=now - 45)
    run.progress(1, updated_at=now - 45, state="done")
    assert read(run).warnings == ("rank 0 has not reported for 45 s",)


def test_rate_falls_while_nothing_comes(make_run, read, now):
    run = make_run()
    run.record()
    run.captures(0, 4)
    for path in run.paths.run_dir.glob("*.pt"):
        os.utime(path, (now - 2, now - 2))
    assert read(run).files_per_s == 2.0
    assert read(run, at=now + 6).files_per_s == 0.5


def test_snapshot_as_json(make_run, read):
    run = make_run("run[red]x")
    run.record()
    run.progress(0, loss=2.5)
    run.rank_error(0, time=1.0)
    fields = json.loads(json.dumps(read(run).to_dict(), allow_nan=False))
    assert fields["run_dir"] == str(run.paths.run_dir)
    assert fields["state"] == "running"
    assert fields["ranks"][0]["failure"]["description"] == "rank 0 failed: ValueError: bad tokenizer path"
    assert fields["failures"][0]["log_path"] == str(run.paths.log_path(0))


def test_nan_in_metrics_is_no_number(make_run, read):
    run = make_run()
    run.record()
    run.paths.metrics_path.write_text('{"iteration": 2, "loss": NaN}\n')
    assert read(run).loss is None


def test_all_runs_of_a_folder_are_listed(make_run, tmp_path, now):
    for name in ("mxfp8", "mxfp4"):
        make_run(name).record(quant_type=name)
    (tmp_path / "out" / "not_a_run").mkdir()
    assert [s.quant_type for s in summarize_directory(tmp_path / "out", now)] == ["mxfp4", "mxfp8"]
    assert [s.quant_type for s in summarize_directory(tmp_path / "out" / "mxfp4", now)] == ["mxfp4"]


def test_folder_without_a_run_is_explained(tmp_path, now):
    with pytest.raises(OutputError) as error:
        summarize_directory(tmp_path, now)
    assert str(error.value) == (
        f"{tmp_path} holds no run (looked for .qcollect in it and in the folders it holds); "
        "name the folder given to --out, or start a run: qcollect run mxfp8"
    )
    assert error.value.exit_code == ExitCode.PREFLIGHT
    with pytest.raises(OutputError, match="does not exist"):
        summarize_directory(tmp_path / "none", now)


# ---- a trigger ---------------------------------------------------------------------------------

WAITING = {"waiting_for": ["loss_spike", "nan"], "nearest": {"loss": {"ratio": 1.2, "iteration": 2}}}
NAN = TriggerEvent(on=Trigger.NAN, iteration=120, rank=1, metric="loss", value=math.nan)


def test_run_that_waits_for_a_trigger_says_for_what(make_run, read):
    run = make_run()
    run.record()
    run.progress(0, trigger=WAITING)
    run.progress(1, trigger=WAITING)
    snapshot = read(run)
    assert (snapshot.phase, snapshot.captured, snapshot.eta_s, snapshot.trigger) == (
        "waiting for loss_spike, nan", 0, None, None,
    )  # fmt: skip
    assert snapshot.warnings == ()
    assert snapshot.to_dict()["ranks"][0]["trigger"] == WAITING


def test_run_that_was_triggered_says_by_what(make_run, read):
    run = make_run()
    run.record()
    run.progress(0, trigger=WAITING)  # its last word, a moment old
    run.progress(1)
    record_event(run.paths, NAN)
    snapshot = read(run)
    assert (snapshot.phase, str(snapshot.trigger)) == ("capturing", str(NAN))
    assert json.loads(json.dumps(snapshot.to_dict(), allow_nan=False))["trigger"] == NAN.to_dict()
