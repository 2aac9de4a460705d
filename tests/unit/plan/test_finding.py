import json

import pytest

from qcollect.errors import DatasetError, MissingExtraError
from qcollect.plan.finding import Finding, Level, texts
from qcollect.plan.inspection import Device, Inspection


def test_a_finding_is_one_sentence():
    assert Finding.warning("space", "little is free", "remove something").text == "little is free; remove something"
    assert Finding.ok("space", "much is free").text == "much is free"


@pytest.mark.parametrize(
    ("error", "message", "advice"),
    [
        (DatasetError("a: b; c"), "a: b", "c"),
        (DatasetError("a; b; c"), "a; b", "c"),
        (DatasetError("no advice"), "no advice", ""),
        (MissingExtraError("torch", "hf", "x"), "x needs torch", "pip install 'qcollect[hf]'"),
        ("a warning; do this", "a warning", "do this"),
    ],
)
def test_what_follows_the_last_semicolon_of_an_error_is_what_to_do(error, message, advice):
    assert Finding.of_error("data", error) == Finding.problem("data", message, advice)


def test_findings_survive_json():
    finding = Finding.problem("data", "é", "x")
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


def test_each_sentence_is_told_once():
    same = Finding.problem("data", "a", "b")
    assert texts([same, Finding.ok("data", "c"), same], Level.PROBLEM) == ("a; b",)


def inspection(**changes):
    fields = {
        "modules": (), "excluded": (), "vocab_size": 1, "num_parameters": 1, "device": "cuda", "device_names": ("A",),
    }  # fmt: skip
    return Inspection(**fields | changes)


def test_an_inspection_survives_json():
    full = inspection(
        devices=(Device(name="A", free_bytes=1, total_bytes=2, capability="9.0", uuid="8932f937"),),
        torch_accelerator="CUDA 13.0",
        num_samples=3,
        findings=(Finding.problem("data", "a", "b"), Finding.warning("data", "c", "d"), Finding.ok("data", "e")),
    )
    assert Inspection.from_dict(json.loads(json.dumps(full.to_dict()))) == full
    assert (full.problems, full.warnings, full.device_uuids) == (("a; b",), ("c; d",), ("8932f937",))


def test_what_earlier_versions_wrote_is_read():
    fields = {key: inspection().to_dict()[key] for key in ("modules", "excluded", "vocab_size", "num_parameters")}
    fields |= {"device": "cuda", "device_names": ["A"], "problems": ["no data; get some"], "warnings": ["odd"]}
    read = Inspection.from_dict(fields)
    assert (read.problems, read.warnings) == (("no data; get some",), ("odd",))
    assert (read.devices, read.num_samples, read.torch_accelerator) == ((), None, None)
