"""A run that stores what its captures have in common once: the same tensors, fewer bytes, and it says so."""

import re

import pytest

import qcollect
from qcollect.store.compact import is_same

pytestmark = pytest.mark.integration

ARGUMENTS = ("run", "mxfp8", "--recipe", "tiny", "--nproc", "2", "--target", "200")
SETTINGS = ("--set", "launch.device=cpu", "--set", "capture.layers=3", "--set", "train.micro_batches=2")


@pytest.fixture(scope="module")
def runs(qcollect_here, tmp_path_factory):
    """Without and with it: what the command printed, and the run's folder."""
    found = []
    for name, more in (("plain", ()), ("deduped", ("--set", "capture.dedupe=true"))):
        out_dir = tmp_path_factory.mktemp(name)
        result = qcollect_here(*ARGUMENTS, *SETTINGS, *more, "--out", str(out_dir))
        assert result.exit_code == 0, result.err
        found.append((result, out_dir / "mxfp8"))
    return found


def test_every_tensor_is_that_of_a_run_without_it(runs):
    plain, deduped = ({c.key: c.load() for c in qcollect.open_run(run_dir)} for _, run_dir in runs)
    assert plain.keys() == deduped.keys() and len(plain) == 200
    assert all(is_same(deduped[key], plain[key]) for key in plain)


def test_statistics_and_metadata_are_those_of_a_run_without_it(runs):
    plain, deduped = ({c.key: c for c in qcollect.open_run(run_dir)} for _, run_dir in runs)
    own = ("storage", "stored_in", "run_id", "save_time")
    for key, capture in deduped.items():
        assert capture.tensor_info == plain[key].tensor_info
        for name in capture.metadata.keys() - set(own):
            assert capture.metadata[name] == plain[key].metadata[name], name


def test_references_lead_to_files_of_the_same_rank_and_iteration(runs):
    run_dir = runs[1][1]
    captures = {c.path.name: c for c in qcollect.open_run(run_dir)}
    references = [c for c in captures.values() if c.metadata["storage"] == "reference"]
    assert {c.metadata["rank"] for c in references} == {0, 1}
    for capture in references:
        target = captures[capture.metadata["stored_in"]]
        assert target.metadata["storage"] == "values" and target.metadata["stored_in"] is None
        assert [target.metadata[n] for n in ("rank", "iteration")] == [
            capture.metadata[n] for n in ("rank", "iteration")
        ]


def test_the_bytes_saved_are_told_and_true(runs, qcollect_here):
    (_, plain_dir), (result, run_dir) = runs
    (run,) = qcollect_here("status", "--json", str(run_dir)).json
    before, after = (sum(path.stat().st_size for path in folder.glob("*.pt")) for folder in (plain_dir, run_dir))
    num, saved = (sum(rank[name] for rank in run["ranks"]) for name in ("num_deduped", "deduped_bytes"))
    assert num == len(qcollect.open_run(run_dir).select(storage="reference"))
    # of each rank q, k and v's, gate and up's inputs in two micro-batches, and seven weights in the second
    assert num >= 2 * (2 * 3 + 7)
    # the references' own words are the rest
    assert 0 <= after + saved - before < 500 * num and saved > 1_000_000
    note = f"{num} of 200 captures refer to another that is the same, which saved {saved:,} bytes"
    assert run["notes"] == [note] and run["warnings"] == []
    assert f"mxfp8: {note}" in re.sub(r"\s+", " ", result.err)
    (plain,) = qcollect_here("status", "--json", str(plain_dir)).json
    assert plain["notes"] == [] and not re.search("refer to another", runs[0][0].err)


def test_commands_work_as_they_do_without_it(runs, qcollect_here):
    run_dir = runs[1][1]
    verified = qcollect_here("verify", str(run_dir))
    assert verified.exit_code == 0 and "200 of 200 planned: all is well" in verified.out
    listed = qcollect_here("ls", str(run_dir), "--where", "storage=reference", "--json").json
    assert listed


def test_a_run_is_overwritten_and_resumed(runs, qcollect_here, tmp_path):
    """After one without it and one with it, with a file lost that others refer to."""
    settings = (*SETTINGS, "--out", str(tmp_path))
    assert qcollect_here(*ARGUMENTS, *settings).exit_code == 0
    settings = (*settings, "--set", "capture.dedupe=true")
    result = qcollect_here(*ARGUMENTS, *settings, "--overwrite")
    assert result.exit_code == 0, result.err
    run_dir = tmp_path / "mxfp8"
    lost = qcollect.open_run(run_dir).select(storage="reference")[0].metadata["stored_in"]
    (run_dir / lost).unlink()
    assert qcollect_here("verify", str(run_dir)).exit_code == 4
    result = qcollect_here(*ARGUMENTS, *settings, "--resume")
    assert result.exit_code == 0, result.err
    verified = qcollect_here("verify", str(run_dir))
    assert verified.exit_code == 0 and "200 of 200 planned: all is well" in verified.out
    plain, resumed = ({c.key: c.load() for c in qcollect.open_run(folder)} for folder in (runs[0][1], run_dir))
    assert resumed.keys() == plain.keys()
    assert all(is_same(resumed[key], plain[key]) for key in plain)
