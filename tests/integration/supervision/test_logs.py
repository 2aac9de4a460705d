"""Output of workers: whole in the logs, and on the console by whole lines, each with its rank."""

import re

from fakes import run

from qcollect.launch.claim import ClaimMode
from qcollect.paths import RunPaths


class Lines:
    def __init__(self):
        self.seen = []

    def __call__(self, rank, line):
        self.seen.append((rank, line))

    def of(self, rank):
        return [line for r, line in self.seen if r == rank]


def test_shown_ranks_come_line_by_line_whole_and_with_their_rank(make_plan):
    lines = Lines()
    run(make_plan("talk", share=10, show_ranks="all"), on_line=lines)
    for rank in range(2):
        shown = lines.of(rank)
        assert shown[0] == f"rank {rank} starts"
        assert shown[1:201] == [f"rank {rank} line {number} " + "x" * 200 for number in range(200)]
        assert shown[201:] == ["100%", f"rank {rank} ends without a newline"]


def test_only_the_ranks_asked_for_are_shown(make_plan):
    lines = Lines()
    run(make_plan("talk", show_ranks=1), on_line=lines)
    assert {rank for rank, _ in lines.seen} == {1}
    assert len(lines.seen) == 203


def test_without_show_ranks_nothing_is_shown_and_the_logs_hold_everything(make_plan):
    lines, plan = Lines(), make_plan("talk")
    run(plan, on_line=lines)
    assert lines.seen == []
    for rank in range(2):
        log = RunPaths(plan.run_dir).log_path(rank).read_bytes().decode()
        assert len(re.findall(rf"^rank {rank} line \d+ x{{200}}$", log, re.MULTILINE)) == 200
        assert log.endswith(f"\r100%\nrank {rank} ends without a newline")


def test_last_words_of_a_killed_worker_are_in_its_log_and_on_the_console(make_plan):
    lines, plan = Lines(), make_plan("die+endless", show_ranks="all")
    run(plan, on_line=lines)
    assert lines.of(1) == ["rank 1 starts", "one", "two", "three", "no end"]
    assert RunPaths(plan.run_dir).log_path(1).read_bytes() == b"rank 1 starts\none\ntwo\nthree\nno end"


def test_what_an_earlier_run_of_the_folder_wrote_is_not_shown_again(make_plan):
    plan = make_plan("talk+short", show_ranks="all")
    run(plan)
    log = RunPaths(plan.run_dir).log_path(0)
    before = log.read_bytes()
    lines = Lines()
    run(make_plan("short", name="again", show_ranks="all"), mode=ClaimMode.RESUME, on_line=lines)
    assert lines.of(0) == ["rank 0 starts"]
    assert log.read_bytes().startswith(before)
