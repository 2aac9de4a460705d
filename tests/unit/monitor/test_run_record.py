import errno
from dataclasses import replace

import pytest

from qcollect.monitor import run_record
from qcollect.monitor.run_record import RunRecord, RunState, read_run_record, write_run_record


def test_record_is_read_back(make_run):
    run = make_run()
    run.record(ended_at="2024-12-01T14:30:22.500+00:00", state="failed", exit_code=4, reason="é")
    record = read_run_record(run.paths)
    write_run_record(run.paths, record)
    assert read_run_record(run.paths) == record
    assert record.ended_at == 1_733_063_422.5


def test_record_with_garbage_is_lost_and_has_no_launcher():
    record = RunRecord.from_dict({"state": "dancing", "launcher": {"pid": "12", "create_time": 3}, "target": "x"})
    assert (record.state, record.launcher, record.target, record.run_id) == (RunState.LOST, None, 0, "?")


def test_end_of_a_run_is_recorded_on_a_full_disk(make_run, monkeypatch):
    run = make_run()
    run.record()
    record = replace(read_run_record(run.paths), state=RunState.FAILED, exit_code=4, reason="no space " * 100)

    def full(path, fields):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_record, "write_json_atomic", full)
    write_run_record(run.paths, record)
    written = read_run_record(run.paths)
    assert (written.state, written.exit_code) == (RunState.FAILED, 4)
    assert written.reason == record.reason[:400]


def test_folder_that_is_gone_is_an_error(make_run):
    run = make_run()
    run.record()
    record = read_run_record(run.paths)
    run.paths.state_dir.rename(run.paths.run_dir / "moved")
    with pytest.raises(FileNotFoundError):
        write_run_record(run.paths, record)


def test_what_triggered_a_run_is_read_back(make_run):
    run = make_run()
    run.record(trigger={"on": "signal", "iteration": 3, "rank": 0, "metric": None, "value": None, "reference": None})
    record = read_run_record(run.paths)
    assert str(record.trigger) == "triggered by signal at iteration 3 (rank 0)"
    write_run_record(run.paths, record)
    assert read_run_record(run.paths) == record
    run.record(trigger={"on": "moon"})
    assert read_run_record(run.paths).trigger is None
