"""How a run stands is told from names and sizes: however many captures there are, none is opened."""

import sys

import pytest

from qcollect.monitor.snapshot import read_snapshot


@pytest.fixture(scope="module")
def opened():
    """The files that are opened, noted while the list that is given holds a first entry of None."""
    files: list[str | None] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and files:
            files.append(str(arguments[0]))

    sys.addaudithook(note)  # stays until the interpreter ends
    yield files
    files.clear()


@pytest.mark.parametrize("folder", ["", "iter00000/"])
def test_the_files_opened_do_not_grow_with_the_captures(make_run, opened, now, folder):
    counts = []
    for number, name in ((20, "few"), (200, "many")):
        run = make_run(name)
        run.record(target=number)
        run.captures(0, number, num_bytes=1, folder=folder)
        opened[:] = [None]
        snapshot = read_snapshot(run.paths, now, hostname="here", is_process=lambda who: True)
        files = opened[1:]
        opened.clear()
        assert (snapshot.captured, snapshot.num_files) == (number, number)
        assert not [file for file in files if file.endswith(".pt")]
        counts.append(len(files))
    assert counts[0] == counts[1] > 0
