"""Which rank is to blame for a stall, out of what the ranks report and where their stacks say they are."""

from dataclasses import replace

import pytest

from qcollect.launch.stall import ProgressWatch, explain_stall, main_frames
from qcollect.monitor.snapshot import RankSnapshot

LIBRARY = "/venv/lib/python3.11/site-packages/torch"
COLLECTIVE = f"{LIBRARY}/distributed/distributed_c10d.py"


def stacks(*frames, threads=()):
    """What faulthandler writes of a process: other threads first, the main thread last; innermost frame first."""

    def thread(header, frames):
        lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
        return "\n".join([header, *lines])

    others = [thread(f"Thread 0x00007f{n:010x} (most recent call first):", t) for n, t in enumerate(threads)]
    return "\n\n".join([*others, thread("Current thread 0x00007fffffffffff (most recent call first):", frames)]) + "\n"


WAITING = stacks(
    (COLLECTIVE, 3007, "all_reduce"), ("/home/me/train.py", 40, "train"), ("/home/me/train.py", 90, "main")
)
WAITING_ELSEWHERE = stacks((COLLECTIVE, 4711, "barrier"), ("/home/me/train.py", 55, "save"))
READING = stacks(("/home/me/data.py", 12, "read"), ("/home/me/train.py", 38, "train"))
WAITING_PLACE = f"{COLLECTIVE}:3007 in all_reduce, called from /home/me/train.py:40 in train"
ELSEWHERE_PLACE = f"{COLLECTIVE}:4711 in barrier, called from /home/me/train.py:55 in save"
READING_PLACE = "/home/me/data.py:12 in read"


def ranks(*iterations, **fields):
    return [
        RankSnapshot(rank=rank, state="training", captured=0, iteration=iteration, num_micro_batches=0, **fields)
        for rank, iteration in enumerate(iterations)
    ]


# ---------------------------------------------------------------------------------------------
# Noticing
# ---------------------------------------------------------------------------------------------


def test_nothing_has_stalled_until_nothing_has_changed_for_the_timeout():
    watch = ProgressWatch(10.0)
    assert not watch.has_stalled(ranks(4, 4), 100.0)
    assert not watch.has_stalled(ranks(4, 4), 109.9)
    assert watch.has_stalled(ranks(4, 4), 110.0)


@pytest.mark.parametrize(
    "change",
    [{"iteration": 5}, {"num_micro_batches": 1}, {"captured": 1}, {"state": "draining"}],
    ids=lambda change: next(iter(change)),
)
def test_one_rank_that_moves_is_progress(change):
    watch = ProgressWatch(10.0)
    first, second = ranks(4, 4)
    moved = replace(second, **change)
    watch.has_stalled([first, second], 100.0)
    assert not watch.has_stalled([first, moved], 115.0)
    assert watch.has_stalled([first, moved], 125.0)


def test_a_report_that_says_the_same_again_is_no_progress():
    watch = ProgressWatch(10.0)
    watch.has_stalled(ranks(4, 4, age_s=0.1, loss=2.0), 100.0)
    assert watch.has_stalled(ranks(4, 4, age_s=0.2, loss=2.5), 110.0)


@pytest.mark.parametrize("state", ["waiting", "loading"])
def test_ranks_that_load_have_ten_minutes_at_least(state):
    loading = [replace(rank, state=state) for rank in ranks(None, None)]
    watch, patient = ProgressWatch(10.0), ProgressWatch(1000.0)
    watch.has_stalled(loading, 0.0)
    patient.has_stalled(loading, 0.0)
    assert not watch.has_stalled(loading, 599.0)
    assert watch.has_stalled(loading, 600.0)
    assert not patient.has_stalled(loading, 600.0)


def test_without_a_timeout_nothing_stalls():
    watch = ProgressWatch(None)
    watch.has_stalled(ranks(4, 4), 0.0)
    assert not watch.has_stalled(ranks(4, 4), 1e9)


# ---------------------------------------------------------------------------------------------
# Stacks
# ---------------------------------------------------------------------------------------------


def test_frames_are_the_main_threads_whatever_other_threads_do():
    text = stacks(("/a/train.py", 3, "main"), threads=[[(COLLECTIVE, 1, "wait")], [("/a/loader.py", 2, "run")]])
    assert main_frames(text) == ["/a/train.py:3 in main"]


def test_file_names_with_quotes_and_blanks_are_kept():
    assert main_frames(stacks(('/my "runs", line 2/x.py', 3, "<module>"))) == ['/my "runs", line 2/x.py:3 in <module>']


@pytest.mark.parametrize(
    "text", ["", "rank 0, pid 12\n", "Current thread 0x0 (most recent call first):\n  <no Python frame>\n"]
)
def test_stacks_without_a_frame_have_none(text):
    assert main_frames(text) == []


# ---------------------------------------------------------------------------------------------
# Blame
# ---------------------------------------------------------------------------------------------


def test_rank_that_is_behind_is_named():
    assert explain_stall(ranks(5, 4), {0: WAITING, 1: READING}) == (
        f"rank 1 differs from the others; rank 1 at {READING_PLACE}; rank 0 at {WAITING_PLACE}"
    )


def test_rank_a_micro_batch_behind_is_named():
    first = RankSnapshot(rank=0, state="training", captured=0, iteration=4, num_micro_batches=1)
    second = RankSnapshot(rank=1, state="training", captured=0, iteration=4, num_micro_batches=2)
    assert explain_stall([first, second], {0: WAITING, 1: WAITING}).startswith("rank 0 differs from the others; ")


def test_rank_outside_the_collective_the_others_wait_in_is_named():
    assert explain_stall(ranks(4, 4), {0: WAITING, 1: READING}) == (
        f"rank 1 differs from the others; rank 1 at {READING_PLACE}; rank 0 at {WAITING_PLACE}"
    )


def test_ranks_outside_the_collective_are_named_together():
    assert explain_stall(ranks(4, 4, 4), {0: READING, 1: WAITING, 2: READING}) == (
        f"ranks 0, 2 differ from the others; ranks 0, 2 at {READING_PLACE}; rank 1 at {WAITING_PLACE}"
    )


def test_rank_outside_the_collective_is_named_though_its_last_report_is_of_a_later_iteration():
    """Reports are written at most twice a second: fast iterations make them differ by chance."""
    text = explain_stall(ranks(31, 44), {0: WAITING, 1: READING})
    assert text == f"rank 1 differs from the others; rank 1 at {READING_PLACE}; rank 0 at {WAITING_PLACE}"


def test_odd_one_out_of_three_is_named():
    assert explain_stall(ranks(4, 4, 4), {0: WAITING, 1: WAITING_ELSEWHERE, 2: WAITING}) == (
        f"rank 1 differs from the others; rank 1 at {ELSEWHERE_PLACE}; ranks 0, 2 at {WAITING_PLACE}"
    )


def test_of_two_in_different_collectives_neither_is_blamed_and_both_places_are_told():
    assert explain_stall(ranks(4, 4), {0: WAITING, 1: WAITING_ELSEWHERE}) == (
        f"rank 0 at {WAITING_PLACE}; rank 1 at {ELSEWHERE_PLACE}"
    )


def test_ranks_at_the_same_place_are_told_together_and_none_is_blamed():
    assert explain_stall(ranks(4, 4), {0: WAITING, 1: WAITING}) == f"ranks 0, 1 at {WAITING_PLACE}"


def test_rank_that_gave_no_stack_is_named():
    assert explain_stall(ranks(4, 4), {0: WAITING}) == f"rank 0 at {WAITING_PLACE}; rank 1 gave no stack"


def test_rank_that_has_left_the_others_in_their_collective_is_the_one_that_differs():
    waiting = RankSnapshot(rank=0, state="training", captured=0, iteration=4)
    left = RankSnapshot(rank=1, state="left", captured=0, iteration=4)
    assert explain_stall([waiting, left], {0: WAITING}).startswith("rank 1 differs from the others; rank 1 has left")


def test_single_rank_is_not_blamed_for_being_alone():
    assert explain_stall(ranks(4), {0: READING}) == f"rank 0 at {READING_PLACE}"


def test_many_ranks_are_told_shortly():
    text = explain_stall(ranks(*[4] * 12), dict.fromkeys(range(12), WAITING))
    assert text == f"ranks 0, 1, 2, 3, 4, 5, 6, 7, ... at {WAITING_PLACE}"
