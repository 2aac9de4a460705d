import io

import pytest
from rich.console import Console

from qcollect.host.processes import ProcessId
from qcollect.monitor.render import format_bytes, format_duration, plain_line, printable, render_status
from qcollect.monitor.snapshot import read_snapshot
from qcollect.plan.trigger import TriggerEvent, record_event
from qcollect.vocab import Trigger

EVERYBODY = {ProcessId(pid=p, create_time=t) for p, t in ((10, 5.0), (100, 6.0), (101, 6.0))}


def show(renderable, *, width=120, terminal=False):
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal, no_color=not terminal, _environ={}).print(renderable)
    return buffer.getvalue()


@pytest.fixture
def snapshot(make_run, now):
    def snapshot(run):
        return read_snapshot(run.paths, now, hostname="here", is_process=EVERYBODY.__contains__)

    return snapshot


@pytest.fixture
def running(make_run):
    run = make_run()
    run.record()
    run.progress(0)
    run.progress(1, state="loading", loss=None)
    run.captures(0, 4)
    return run


def test_one_run_is_shown_with_its_ranks(running, snapshot):
    lines = show(render_status([snapshot(running)]), width=80).splitlines()
    blank = lines.index("")
    assert lines[0] == "mxfp8 · tiny · run-a"
    assert "".join(lines[1:blank]) == str(running.paths.run_dir)
    lines = lines[blank:]
    assert lines[1].split() == "quant state captured rate ETA size iter loss ranks exit".split()
    assert lines[2].split() == "mxfp8 capturing ███░░░░░ 4/10 - - 4.0 KiB 3 - 2/2 -".split()
    assert lines[4].split() == "rank pid state device iter captured size loss seen".split()
    assert lines[5].split() == "0 100 training cpu 3 4/5 2.0 KiB 2.5 2s ago".split()
    assert lines[6].split() == "1 101 loading cpu 3 0/5 2.0 KiB - 2s ago".split()


def test_what_references_saved_is_shown_below_a_run(running, snapshot):
    running.progress(0, num_deduped=3, deduped_bytes=4_000_321)
    lines = show(render_status([snapshot(running)])).splitlines()
    assert lines[-1] == "3 of 4 captures refer to another that is the same, which saved 4,000,321 bytes"


def test_several_runs_are_shown_as_a_table_with_what_failed(make_run, snapshot, running):
    failed = make_run("mxfp4")
    failed.record(quant_type="mxfp4", state="failed", exit_code=4)
    failed.rank_error(1, time=100.0)
    text = show(render_status([snapshot(running), snapshot(failed)]), width=200)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["quant", "mxfp8", "mxfp4"]
    assert "mxfp4: rank 1 failed: ValueError: bad tokenizer path" in lines
    assert f"mxfp4: log: {failed.paths.log_path(1)}" in lines


def test_bar_is_full_only_at_the_target(running, snapshot):
    running.captures(1, 5)
    assert " ███████░ 9/10 " in show(render_status([snapshot(running)]))
    running.captures(0, 1, folder="iter00001/")
    assert " ████████ 10/10 " in show(render_status([snapshot(running)]))


@pytest.mark.parametrize("name", ["run[red]x", "a [", "[bold]"])
def test_brackets_in_names_are_shown_as_they_are(make_run, snapshot, name):
    run = make_run(name)
    run.record(quant_type=name, recipe_name="[/x/y]", state="failed", reason="r")
    run.rank_error(0, time=1.0, type="RuntimeError", message="[/bold] [1, 2]")
    text = show(render_status([snapshot(run)]), width=300, terminal=True)
    assert name in text
    assert "[/x/y]" in text
    assert "rank 0 failed: RuntimeError: [/bold] [1, 2]" in text
    assert name in plain_line(snapshot(run))


def test_control_characters_never_reach_the_terminal(make_run, snapshot):
    run = make_run()
    run.record(state="failed", reason="a\x1b[31mred\nline\u202e\x9b", quant_type="q\x07")
    run.rank_error(0, time=1.0, message="\x1b]0;title\x07\r\nsecond \u2028line")
    for text in (show(render_status([snapshot(run)]), width=400), plain_line(snapshot(run)) + "\n"):
        assert not set("\x1b\x07\x9b\u202e\u2028\r") & set(text)
    assert plain_line(snapshot(run)).endswith(r"  a\x1b[31mred line\u202e\x9b")


def test_plain_line_is_one_line_of_any_length(running, snapshot):
    running.record(state="stopped", exit_code=7, reason="word " * 100, quant_type="x" * 150)
    line = plain_line(snapshot(running))
    assert "\n" not in line
    assert line.startswith("x" * 150 + "  stopped  4/10  ")
    assert f"  4.0 KiB  iteration 3  loss -  ranks 2/2  exit 7  {'word ' * 100}".rstrip() in line


def test_printable_keeps_text_of_all_scripts():
    assert printable("été 量化 😀 [x]") == "été 量化 😀 [x]"
    assert printable("a\tb\udcff") == "a b\\udcff"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0s"), (59.7, "1m00s"), (125, "2m05s"), (3720, "1h02m"), (90000, "1d01h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes(count, text):
    assert format_bytes(count) == text


def test_what_a_run_waits_for_and_what_triggered_it_is_shown(running, snapshot):
    running.progress(0, trigger={"waiting_for": ["signal"], "nearest": {}})
    assert "mxfp8  running (waiting for signal)  4/10  " in plain_line(snapshot(running))
    assert "waiting for signal" in show(render_status([snapshot(running)]), width=200)
    record_event(running.paths, TriggerEvent(on=Trigger.SIGNAL, iteration=3, rank=0))
    assert plain_line(snapshot(running)).endswith("  triggered by signal at iteration 3 (rank 0)")
    assert "triggered by signal at iteration 3 (rank 0)" in show(render_status([snapshot(running)])).splitlines()
