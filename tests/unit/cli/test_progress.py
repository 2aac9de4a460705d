import io

import pytest
from rich.console import Console
from rich.text import Text

from qcollect.cli.progress import Display


@pytest.fixture
def times():
    return [0.0]


@pytest.fixture
def output():
    return io.StringIO()


@pytest.fixture
def display(times, output):
    return Display(Console(file=output, markup=False, soft_wrap=True), clock=lambda: times[0])


def show_all(display, times, states):
    with display:
        for time_s, line, key in states:
            times[0] = time_s
            display.show(line, Text("dashboard"), key=key)


def test_lines_come_at_a_bounded_rate(display, times, output):
    show_all(display, times, [(i / 10, f"{i} of 100", None) for i in range(100)])
    assert output.getvalue().splitlines() == ["0 of 100", "20 of 100", "40 of 100", "60 of 100", "80 of 100"]


def test_a_line_is_not_repeated(display, times, output):
    show_all(display, times, [(i * 5, "waiting", None) for i in range(20)])
    assert output.getvalue() == "waiting\n"


def test_what_only_ticks_on_is_told_every_half_minute(display, times, output):
    show_all(display, times, [(i, f"{10 / (i + 1):.2f} files/s", "capturing") for i in range(65)])
    assert output.getvalue().splitlines() == ["10.00 files/s", "0.32 files/s", "0.16 files/s"]


def test_a_change_of_state_is_told_although_the_last_line_is_recent(display, times, output):
    show_all(display, times, [(0, "loading 1", "loading"), (3, "capturing 1", "capturing"), (4, "capturing 2", "x")])
    assert output.getvalue().splitlines() == ["loading 1", "capturing 1"]


def test_a_terminal_shows_the_dashboard_and_is_left_clean(times, output):
    console = Console(file=output, force_terminal=True, width=40, legacy_windows=False, color_system=None)
    show_all(Display(console, clock=lambda: times[0]), times, [(0, "line", None)])
    assert "dashboard" in output.getvalue() and "line" not in output.getvalue()


def test_a_dumb_terminal_gets_lines(times, output):
    console = Console(file=output, force_terminal=True, width=40, _environ={"TERM": "dumb"})
    show_all(Display(console, clock=lambda: times[0]), times, [(0, "line", None)])
    assert output.getvalue() == "line\n"
