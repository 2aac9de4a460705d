import pytest

from qcollect.monitor.failures import has_failures, read_failures, read_log_tail


def described(run):
    return [f.describe() for f in read_failures(run.paths)]


def test_run_without_errors_has_no_failures(make_run):
    run = make_run()
    assert read_failures(run.paths) == ()
    assert not has_failures(run.paths)


def test_rank_that_failed_first_by_time_is_first(make_run):
    run = make_run()
    run.rank_error(0, time=100.8, type="RuntimeError", message="Connection closed by peer")
    run.rank_error(1, time=100.2)
    run.agent_error((0, 1, 101), (1, 1, 101))
    assert has_failures(run.paths)
    assert described(run) == [
        "rank 1 failed: ValueError: bad tokenizer path",
        "rank 0 failed: RuntimeError: Connection closed by peer",
    ]
    assert read_failures(run.paths)[0].log_path == run.paths.log_path(1)


def test_ranks_that_torchrun_ended_are_not_the_headline(make_run):
    run = make_run()
    run.agent_error((0, -15, 99), (1, 3, 100), (2, 143, 99))
    assert described(run) == [
        "rank 1 ended with exit code 3",
        "rank 0 was ended by signal 15 (SIGTERM)",
        "rank 2 ended with exit code 143",
    ]
    assert [f.was_ended for f in read_failures(run.paths)] == [False, True, True]


def test_rank_killed_by_a_signal_comes_before_the_peer_that_raised_in_the_same_second(make_run):
    run = make_run()
    run.rank_error(0, time=100.75, type="RuntimeError", message="Connection closed by peer")
    run.agent_error((1, -9, 100), (0, 1, 101))
    assert described(run)[0] == "rank 1 was killed (signal 9), often out of memory"


def test_abort_comes_after_the_rank_that_raised_in_the_same_second(make_run):
    run = make_run()
    run.rank_error(1, time=100.2)
    run.agent_error((0, -6, 100), (1, 1, 101))
    assert described(run)[0] == "rank 1 failed: ValueError: bad tokenizer path"


def test_survivor_killed_at_last_comes_after_a_failure_listed_before_it(make_run):
    run = make_run()
    run.rank_error(1, time=100.9)
    run.agent_error((1, 1, 100), (0, 1, 100))
    assert described(run)[0] == "rank 1 failed: ValueError: bad tokenizer path"


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (-9, "rank 0 was killed (signal 9), often out of memory"),
        (-11, "rank 0 was ended by signal 11 (SIGSEGV)"),
        (-77, "rank 0 was ended by signal 77 (unknown)"),
        (3, "rank 0 ended with exit code 3"),
    ],
)
def test_exit_codes_are_explained(make_run, exit_code, text):
    run = make_run()
    run.agent_error((0, exit_code, 100))
    assert described(run) == [text]


def test_failure_of_the_agent_itself(make_run):
    run = make_run()
    run.agent_error(type="RendezvousError", message="port 29500 is in use", time=100.0)
    assert described(run) == ["torchrun's agent failed: RendezvousError: port 29500 is in use"]
    run.agent_error(signal=15, time=100.0)
    assert described(run) == ["torchrun's agent was ended by signal 15 (SIGTERM)"]


def test_damaged_error_files_are_passed_over(make_run):
    run = make_run()
    run.paths.error_path(0).write_text('{"rank": ')
    run.paths.error_path(1).write_text("{}")
    run.paths.agent_error_path.write_text('{"failures": [1, {"rank": "x"}, {"rank": 2}]}')
    assert described(run) == ["rank 2 failed: it did not say why"]


def test_log_tail_has_the_last_lines_that_show_something(tmp_path):
    log = tmp_path / "rank00000.log"
    log.write_bytes(b"".join(b"line %d\n\n" % i for i in range(20)) + b" 1%|#\r50%|##\r100%|###\nlast \xff without end")
    assert read_log_tail(log, 4) == ("line 18", "line 19", "100%|###", "last \ufffd without end")
    assert read_log_tail(tmp_path / "none") == ()
