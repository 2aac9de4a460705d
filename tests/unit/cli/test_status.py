from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from qcollect.cli import status
from qcollect.errors import OutputError


def of_state(is_active):
    return SimpleNamespace(state=SimpleNamespace(is_active=is_active))


@pytest.fixture
def watch(monkeypatch, tmp_path):
    """How often a watched folder is looked at, when its runs are active as given."""

    def run(*is_active):
        states = iter(is_active)
        monkeypatch.setattr(status, "REFRESH_S", 0.0)
        monkeypatch.setattr(status, "out", Console(force_terminal=True, width=40, quiet=True))
        monkeypatch.setattr(
            "qcollect.monitor.snapshot.summarize_directory", lambda folder, now: [of_state(next(states))]
        )
        monkeypatch.setattr("qcollect.monitor.render.render_status", lambda snapshots: Text("dashboard"))
        status._watch(tmp_path)
        return len(is_active) - len(list(states))

    return run


def test_a_folder_without_an_active_run_is_shown_once(watch):
    assert watch(False, False) == 1


def test_runs_are_watched_until_none_is_active(watch):
    assert watch(True, True, False, False, False) == 4


def test_the_pause_between_two_runs_of_a_sweep_does_not_end_the_watch(watch):
    assert watch(True, False, True, False, False, False) == 5


def test_a_folder_that_goes_away_ends_the_watch_with_its_message(monkeypatch, tmp_path):
    monkeypatch.setattr(status, "out", Console(force_terminal=True, width=40, quiet=True))
    with pytest.raises(OutputError, match="does not exist"):
        status._watch(tmp_path / "gone")
