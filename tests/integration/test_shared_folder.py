"""Two nodes write into one folder: global ranks differ, local ranks do not (NVIDIA/apex issue 886)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

NUM_RECORDS = 12
PROGRAM = f"""
import sys, torch
from pathlib import Path
from qcollect.tensor_saver import get_tensor_saver, set_global_iteration

sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()  # both write at the same time
for i in range({NUM_RECORDS} // 3):
    set_global_iteration(i)
    saver = get_tensor_saver()
    saver.save_attention_tensors(*(torch.full((4,), float(i)) for _ in range(3)), layer_idx=i)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """What the two have left."""
    folder = tmp_path / "hifp8"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TENSOR_SAVE_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    return folder


def test_no_file_of_one_rank_takes_the_place_of_anothers(folder, qcollect_here):
    import qcollect
    from qcollect.vocab import CaptureName

    names = [path.name for path in folder.glob("*.pt")]
    assert len(names) == 2 * NUM_RECORDS
    assert sorted(CaptureName.parse(name).rank for name in names) == [0] * NUM_RECORDS + [1] * NUM_RECORDS
    run = qcollect.open_run(folder)
    assert sorted(capture.path.name for capture in run) == sorted(names)
    for capture in run:
        metadata = capture.metadata
        assert (metadata["rank"], metadata["local_rank"]) == (CaptureName.parse(capture.path.name).rank, 0)
    assert len({capture.key for capture in run}) == 2 * NUM_RECORDS

    (status,) = qcollect_here("status", str(folder), "--json").json
    assert (status["captured"], status["num_files"]) == (2 * NUM_RECORDS, 2 * NUM_RECORDS)
    assert [(rank["rank"], rank["captured"]) for rank in status["ranks"]] == [(0, NUM_RECORDS), (1, NUM_RECORDS)]
    (report,) = qcollect_here("verify", str(folder), "--json").json
    assert (report["num_files"], report["findings"]) == (2 * NUM_RECORDS, [])
    listed = qcollect_here("ls", str(folder), "--where", "rank=1", "--where", "local_rank=0", "--json").json
    assert len(listed) == NUM_RECORDS
