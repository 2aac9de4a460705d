import subprocess
import sys

import pytest
import torch

import qcollect
from qcollect.errors import CaptureError, OutputError
from qcollect.paths import RunPaths
from qcollect.store.capture import describe_tensor, save_capture
from qcollect.store.files import append_line


@pytest.fixture
def run_dir(tmp_path):
    """Two ranks with a query and a key each."""
    paths = RunPaths(tmp_path / "mxfp8")
    paths.manifest_dir.mkdir(parents=True)
    for rank in (1, 0):
        for i, name in enumerate(("query", "key")):
            tensor = torch.full((2,), float(10 * rank + i))
            metadata = {
                "rank": rank,
                "iteration": 0,
                "micro_batch": 0,
                "sample_idx": rank,
                "module": "model.layers.0.self_attn",
                "layer_idx": 0,
                "operation": "forward",
                "phase": "pre",
                "tensor_name": name,
                "values": "original",
                "consumers": [],
            }
            info = describe_tensor(tensor)
            stored = save_capture(paths.run_dir / f"r{rank}_{name}.pt", tensor, info, metadata)
            line = {"file": stored.path.name, "bytes": stored.num_bytes, "xxh3_128": stored.xxh3_128}
            append_line(paths.manifest_path(rank), line | {"metadata": metadata, "tensor_info": info})
    return paths.run_dir


def test_captures_come_by_rank_and_then_as_saved(run_dir):
    run = qcollect.open_run(run_dir)
    assert [c.path.name for c in run] == ["r0_query.pt", "r0_key.pt", "r1_query.pt", "r1_key.pt"]
    assert len(run) == 4
    assert run[-1].load().tolist() == [11.0, 11.0]
    assert run[0].key.tensor_name == "query"
    assert run[0].tensor_info["mean"] == 0.0


def test_fields_select_one_value_or_any_of_several(run_dir):
    run = qcollect.open_run(str(run_dir))
    assert [c.path.name for c in run.select(tensor_name="query")] == ["r0_query.pt", "r1_query.pt"]
    assert [c.path.name for c in run.select(tensor_name=("query", "key"), rank=1)] == ["r1_query.pt", "r1_key.pt"]
    assert len(run.select(rank=[7])) == 0
    assert len(run.select()) == 4


def test_misspelt_field_is_an_error_not_an_empty_run(run_dir):
    with pytest.raises(KeyError, match=r"no capture has the field 'tensorname'; fields: consumers, iteration, "):
        qcollect.open_run(run_dir).select(tensorname="query")


def test_folder_without_a_run_says_which_folder_to_give(tmp_path):
    with pytest.raises(OutputError) as error:
        qcollect.open_run(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} holds no run (no {tmp_path}/.qcollect/manifest); give the folder of one quant type"
    )


def test_capture_whose_file_is_gone_is_named(run_dir):
    (run_dir / "r0_key.pt").unlink()
    with pytest.raises(CaptureError, match=f"^{run_dir}/r0_key.pt: cannot be loaded"):
        qcollect.open_run(run_dir)[1].load()


def test_listing_a_run_needs_no_torch(run_dir):
    program = (
        "import sys, qcollect; run = qcollect.open_run(sys.argv[1]); print(len(run.select(rank=0)));"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=True)
    assert result.stdout == "2\n"
