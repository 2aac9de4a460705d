import tracemalloc

import pytest

from qcollect.launch import log_follower
from qcollect.launch.log_follower import LogFollower
from qcollect.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path)
    paths.logs_dir.mkdir(parents=True)
    return paths


@pytest.fixture
def write(paths):
    def write(rank, content):
        with paths.log_path(rank).open("ab") as log:
            log.write(content)

    return write


def test_lines_are_told_once_they_are_whole(paths, write):
    follower = LogFollower(paths, [0])
    assert list(follower.read()) == []  # no log yet
    write(0, b"one\ntw")
    assert list(follower.read()) == [(0, "one")]
    assert list(follower.read()) == []
    write(0, b"o\n\nthree\n")
    assert list(follower.read()) == [(0, "two"), (0, ""), (0, "three")]


def test_lines_of_several_ranks_do_not_mix(paths, write):
    follower = LogFollower(paths, [0, 2])
    write(0, b"zero ")
    write(2, b"two ")
    write(1, b"not asked for\n")
    assert list(follower.read()) == []
    write(2, b"ends\n")
    write(0, b"ends\n")
    assert sorted(follower.read()) == [(0, "zero ends"), (2, "two ends")]


def test_last_piece_without_a_newline_is_told_at_the_end_and_once(paths, write):
    follower = LogFollower(paths, [0])
    write(0, b"one\nno end")
    assert list(follower.finish()) == [(0, "one"), (0, "no end")]
    assert list(follower.finish()) == []


def test_end_takes_all_of_a_long_log(paths, write, monkeypatch):
    monkeypatch.setattr(log_follower, "_MAX_BYTES", 7)
    follower = LogFollower(paths, [0])
    write(0, b"".join(b"line %d\n" % number for number in range(50)) + b"last")
    assert [line for _, line in follower.finish()] == [*(f"line {number}" for number in range(50)), "last"]


def test_what_was_in_the_log_before_is_not_told(paths, write):
    write(0, b"of an earlier run\n")
    follower = LogFollower(paths, [0])
    write(0, b"new\n")
    assert list(follower.finish()) == [(0, "new")]


def test_line_that_redraws_itself_is_what_it_showed_last(paths, write):
    follower = LogFollower(paths, [0])
    write(0, b"\r  1%\r 50%\r100%\nnext\r\n 1%\r 2%\r")
    assert list(follower.finish()) == [(0, "100%"), (0, "next"), (0, " 2%")]


def test_bytes_that_are_no_utf8_are_replaced_and_a_character_in_two_pieces_is_whole(paths, write):
    follower = LogFollower(paths, [0])
    write(0, "é".encode()[:1])
    assert list(follower.read()) == []
    write(0, "é".encode()[1:] + b" \xff\n")
    assert list(follower.read()) == [(0, "é \ufffd")]


@pytest.mark.parametrize("piece", [b"\r" + b"#" * 999, b"#" * 1000], ids=["progress_bar", "endless_line"])
def test_line_without_an_end_takes_bounded_memory(paths, write, piece):
    follower = LogFollower(paths, [0])
    tracemalloc.start()
    for _ in range(20):
        write(0, piece * 500)  # half a megabyte
        list(follower.read())
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3 << 20


def test_progress_bar_that_never_ends_its_line_is_what_it_showed_last(paths, write):
    follower = LogFollower(paths, [0])
    for percent in range(1000):
        write(0, b"\r%3d%%" % percent)
        assert list(follower.read()) == []
    assert list(follower.finish()) == [(0, "999%")]
