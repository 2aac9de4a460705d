import json
import os

import pytest

from qcollect.host.facts import detect_rank, disk_space, environment_report, num_cores, package_versions


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
