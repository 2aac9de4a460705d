"""Lines of statistics by a process of its own."""

import json
import struct

import pytest

from qcollect.errors import CaptureError
from qcollect.formats.error_stats import NUM_TOTALS
from qcollect.store.files import LineFile
from qcollect.vocab import Gemm
from qcollect.worker.lines import ROW_SIZE, LineTemplate, Measured, encode_moment
from qcollect.worker.write_lines import LineProcess, append_lines

MOMENT = dict.fromkeys(("sample_idx", "num_samples", "batch_idx", "sequence_idx", "micro_batch"), 0) | {
    "token_hash": None,
    "save_time": "2026-01-01 00:00:00",
}


def template(number, **fields):
    blanks = ", ".join(["%s"] * (4 + 10 if fields else 10))
    return LineTemplate(number=number, text=f'{{"n": {number}, %s, "all": [{blanks}]}}\n', **known(number), **fields)


def known(number):
    return {"want": ("fc", "input", Gemm.FPROP if number else None), "num_elements": 64}


def measured(iteration, records):
    rows = [
        [64.0, 0.0, 0.0, 1.0, -2.0, 3.0, 0.5, 7.0 + iteration, 0.25, 0.0],
        [*map(float, range(NUM_TOTALS)), 0.0, 0.0],
    ]
    numbers = struct.pack(f"{2 * ROW_SIZE}d", *rows[0], *rows[1])
    return Measured(records, encode_moment({**MOMENT, "iteration": iteration}), numbers, [3.5], [0.25])


TEMPLATES = [template(0), template(1, num_types=1, is_quantized=True)]
RECORDS = [(0, (0,), None, None), (1, (1,), 0, 17)]


def test_lines_are_those_that_a_thread_would_write(tmp_path):
    manifests = [LineFile(tmp_path / name) for name in ("thread.jsonl", "process.jsonl")]
    batches = [measured(i, RECORDS if i != 2 else RECORDS[1:]) for i in range(4)]
    process, appended = LineProcess(manifests[1], goes_on=False), []
    for batch in batches:
        append_lines(manifests[0], batch.lines(TEMPLATES))
        appended += process.write(batch, TEMPLATES)
    appended += process.close()
    written = manifests[1].path.read_text()
    assert written == manifests[0].path.read_text()
    assert [json.loads(line)["n"] for line in written.splitlines()] == [0, 1, 0, 1, 1, 0, 1]
    assert sum(a.num_written for a in appended) == 7 and sum(a.num_bytes for a in appended) == len(written)


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_cannot_be_written_is_told(tmp_path, goes_on):
    (tmp_path / "file").write_text("")
    manifest = LineFile(tmp_path / "file" / "rank.jsonl")
    process = LineProcess(manifest, goes_on=goes_on)
    appended = process.write(measured(0, RECORDS), TEMPLATES) + process.write(measured(1, RECORDS), TEMPLATES)
    appended += process.close()
    assert [a.num_missing for a in appended] == ([2, 2] if goes_on else [2])
    assert all(a.num_written == 0 and str(manifest.path) in a.reason for a in appended)


def test_a_process_that_is_killed_is_an_error_that_names_it(tmp_path):
    process = LineProcess(LineFile(tmp_path / "rank.jsonl"), goes_on=False)
    child = process._child.process
    child.kill()
    child.wait()
    with pytest.raises(CaptureError, match=f"pid {child.pid}.* ended by itself"):
        process.write(measured(0, RECORDS), TEMPLATES)
    process.close()
