import threading

import psutil
import pytest

from qcollect.host import machine
from qcollect.host.machine import available_memory, find_resolve_problem, read_machine


def test_the_facts_of_this_machine_are_read():
    facts = read_machine()
    assert facts.system and facts.host_name
    assert facts.packages["torch"]
    assert facts.loopback_problem is None
    assert 0 < facts.available_bytes <= psutil.virtual_memory().total


def test_a_name_that_does_not_resolve_is_told_with_the_reason():
    def refuse(name):
        raise OSError(-2, "Name or service not known")

    def encode(name):
        raise UnicodeError("label too long")

    assert find_resolve_problem("node7", resolve=lambda name: "127.0.1.1") is None
    assert find_resolve_problem("node7", resolve=refuse) == "Name or service not known"
    assert find_resolve_problem("a" * 70, resolve=encode) == "label too long"


def test_a_name_server_that_does_not_answer_is_not_waited_for():
    answered = threading.Event()
    problem = find_resolve_problem("node7", resolve=lambda name: str(answered.wait(60)), timeout_s=0.05)
    answered.set()
    assert problem == "no answer within 0.05 s"


def test_a_loopback_that_cannot_be_bound_is_told(monkeypatch):
    def refuse(*args):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(machine.socket, "socket", refuse)
    assert machine._find_loopback_problem() == "Cannot assign requested address"


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/box", "box", ("memory.max", "memory.current", "inactive_file")),
        ("0::/outer/box", "outer", ("memory.max", "memory.current", "inactive_file")),
        ("4:cpu,memory:/box", "memory/box", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("4:memory:/elsewhere", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_the_limit_of_a_control_group_counts_without_the_page_cache(tmp_path, line, folder, names):
    limit, used, cache = names
    group = tmp_path / "cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("1000\n")
    (group / used).write_text("700\n")
    (group / "memory.stat").write_text(f"cache 5\n{cache} 200\n")
    (tmp_path / "self").write_text(f"12:pids:/x\n{line}\n")
    assert available_memory(tmp_path / "cgroup", tmp_path / "self") == 500


def test_without_a_limit_the_machine_itself_is_the_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "self").write_text("0::/\n")
    assert available_memory(tmp_path, tmp_path / "self") > 1000
    assert available_memory(tmp_path, tmp_path / "gone") > 1000
