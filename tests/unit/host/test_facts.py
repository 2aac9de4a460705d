import errno
import json
import os
from pathlib import Path

import pytest

from qcollect.host.facts import (
    FolderProbe,
    detect_rank,
    disk_space,
    environment_report,
    num_cores,
    package_versions,
    probe_folder,
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1, "default")),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (3, 1, 8, "RANK")),
        ({"LOCAL_RANK": "2"}, (2, 2, 1, "LOCAL_RANK")),
        ({"RANK": "", "LOCAL_RANK": "0"}, (0, 0, 1, "LOCAL_RANK")),
        ({"RANK": "-1", "WORLD_SIZE": "many"}, (0, 0, 1, "default")),
        ({"RANK": "²"}, (0, 0, 1, "default")),
    ],
)
def test_rank_of_the_shell(environ, expected):
    rank = detect_rank(environ)
    assert (rank.rank, rank.local_rank, rank.world_size, rank.source) == expected


def test_cores_are_those_this_process_may_use():
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_space_is_that_of_the_first_folder_that_exists(tmp_path):
    here, below = disk_space(tmp_path), disk_space(tmp_path / "a" / "b")
    assert here.free_bytes > 0
    assert abs(below.free_bytes - here.free_bytes) < 1 << 30


def test_a_package_that_is_missing_is_told_as_none(monkeypatch):
    monkeypatch.setattr("qcollect.host.facts.PACKAGES", ("typer", "no-such-package"))
    assert package_versions()["no-such-package"] is None
    assert package_versions()["typer"]


def test_the_report_is_json_and_holds_only_the_variables_that_are_set(monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    monkeypatch.delenv("TENSOR_SAVE_DIR", raising=False)
    report = json.loads(json.dumps(environment_report()))
    assert report["variables"]["CUSTOM_QUANT_TYPE"] == "mxfp4"
    assert "TENSOR_SAVE_DIR" not in report["variables"]


def test_a_folder_is_probed_with_a_file_that_is_gone_again(tmp_path):
    probe = probe_folder(tmp_path)
    assert (probe.problem, probe.can_link) == (None, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("touch", "cannot be written to: Read-only file system"),
        ("rename", "cannot be used: a file in it cannot be renamed: Read-only file system"),
    ],
)
def test_what_fails_in_a_folder_is_told_and_nothing_stays(tmp_path, monkeypatch, method, problem):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, method, refuse)
    assert probe_folder(tmp_path).problem == problem
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_hard_links_is_told(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert probe_folder(tmp_path) == FolderProbe(folder=tmp_path, problem=None, can_link=False)
    assert os.listdir(tmp_path) == []
