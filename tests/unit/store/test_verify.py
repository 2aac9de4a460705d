import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qcollect.errors import CaptureError
from qcollect.paths import RunPaths, temporary_path
from qcollect.store.capture import load_any_capture
from qcollect.store.examine import examine_run, hash_file
from qcollect.store.files import append_line, read_lines
from qcollect.store.manifest import list_manifests, read_manifest, read_manifests
from qcollect.store.verify import Problem, after_repair, count_planned, judge, repair_rank, repair_run
from qcollect.vocab import CaptureKey


@pytest.fixture
def paths(save_run):
    return save_run()


def problems(paths, planned=None, **settings):
    return [str(finding.problem) for finding in judge(examine_run(paths), planned, **settings)]


def findings(paths, planned=None):
    return [str(finding) for finding in judge(examine_run(paths), planned)]


def repair(paths):
    """What a repair does; what it says the folder is like then is what a new examination finds."""
    found = examine_run(paths)
    actions = [str(action) for action in repair_run(found)]
    assert judge(after_repair(found), None) == judge(examine_run(paths), None)
    return actions


def captures(paths):
    return sorted(
        p.relative_to(paths.run_dir).as_posix() for p in paths.run_dir.rglob("*.pt") if paths.state_dir not in p.parents
    )


def tree(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def one(paths, rank=0, position=0):
    """A capture's file, and its line."""
    lines = read_lines(paths.manifest_path(rank))
    return paths.run_dir / json.loads(lines[position])["file"], lines[position]


def keys(paths):
    return [replace(CaptureKey.from_metadata(r.metadata), sample_idx=0) for r in read_manifests(paths)]


def tear(path, how):
    content = path.read_bytes()
    torn = {
        "empty": b"",
        "one byte": content[:1],
        "header": content[:30],
        "half": content[: len(content) // 2],
        "all but the last byte": content[:-1],
        "garbage": os.urandom(4000),
        "text": b"not a capture",
        "zeros at the end": content[: len(content) // 2].ljust(len(content), b"\0"),
    }
    path.write_bytes(torn[how])


TORN = ("empty", "one byte", "header", "half", "all but the last byte", "garbage", "text", "zeros at the end")


# ---- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_iteration", [False, True])
def test_a_run_as_it_was_written_has_nothing_wrong(save_run, by_iteration):
    paths = save_run(by_iteration=by_iteration, iterations=(0, 1))
    found = examine_run(paths)
    planned = set(keys(paths))
    assert judge(found, planned) == []
    assert (len(found.files), count_planned(found, planned), found.num_strangers) == (16, 16, 0)
    assert found.num_bytes == sum((paths.run_dir / file).stat().st_size for file in found.files)
    before = tree(paths.run_dir)
    assert [a.split(": ")[1] for a in repair(paths)] == ["made anew from the manifests"]
    after = tree(paths.run_dir)
    assert repair(paths) == []
    assert tree(paths.run_dir) == after
    assert {path: state for path, state in after.items() if path in before} == before


@pytest.mark.parametrize("how", TORN)
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_torn_file_is_named_and_moved_aside(paths, how, is_listed):
    path, line = one(paths)
    if not is_listed:
        rest = paths.manifest_path(0).read_bytes().replace(line + b"\n", b"")
        paths.manifest_path(0).write_bytes(rest)
    tear(path, how)
    torn = path.read_bytes()
    (finding,) = judge(examine_run(paths), None)
    assert (finding.path, finding.problem) == (path, Problem.TORN)
    assert str(finding).startswith(f"{path}: is torn or no capture (")
    assert str(finding).endswith(f" --repair' moves it to {paths.torn_dir}") and "\n" not in str(finding)
    actions = repair(paths)
    assert actions[0] == f"{path}: moved to {paths.torn_dir / path.name}: it is torn"
    assert (paths.torn_dir / path.name).read_bytes() == torn and not path.exists()
    assert problems(paths) == []
    assert repair(paths) == []


def test_a_whole_archive_with_other_bytes_is_not_the_file_that_was_written(paths):
    path, _ = one(paths)
    content = path.read_bytes()
    position = len(content) // 2
    path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    load_any_capture(path)
    (finding,) = findings(paths)
    assert finding.startswith(f"{path}: is not the file that was written: it has the xxh3-128 ")
    assert repair(paths)[0].endswith("it is not the file that was written")
    assert problems(paths) == [] and len(read_manifest(paths.manifest_path(0))) == 3
    # the line that was dropped can be looked up
    assert len(read_manifest(paths.torn_dir / "rank00000.jsonl")) == 4


def test_a_file_of_another_length_is_not_the_file_that_was_written(paths):
    path, _ = one(paths)
    torch.save({"tensor": torch.zeros(1), "metadata": load_any_capture(path)["metadata"], "tensor_info": {}}, path)
    (finding,) = findings(paths)
    assert f"it has {path.stat().st_size:,} bytes, and its manifest line says " in finding


def test_an_orphan_is_listed_as_its_writer_would_have_listed_it(paths):
    manifest = paths.manifest_path(0)
    before = manifest.read_bytes()
    path, line = one(paths, position=3)
    manifest.write_bytes(before.replace(line + b"\n", b""))
    assert findings(paths) == [
        f"{path}: is whole and in no manifest; 'qcollect verify {paths.run_dir} --repair' lists it"
    ]
    actions = repair(paths)
    assert actions[0] == f"{path}: listed in rank00000.jsonl: it is whole"
    assert manifest.read_bytes() == before
    assert problems(paths) == [] and repair(paths) == []
    assert not paths.torn_dir.exists()


def test_a_line_whose_file_is_gone_is_dropped_and_the_capture_is_missing_then(paths):
    planned = set(keys(paths))
    path, _ = one(paths, rank=1, position=2)
    path.unlink()
    assert findings(paths, planned) == [
        f"{paths.manifest_path(1)}:3: lists {path.name}, which is gone; "
        f"'qcollect verify {paths.run_dir} --repair' drops it; then 'qcollect run --resume' takes it again"
    ]
    assert repair(paths)[0] == f"{paths.manifest_path(1)}:3: dropped: {path.name} is gone"
    assert findings(paths, planned) == [
        f"{paths.run_dir}: is without rank 1 iteration 0 micro-batch 0 model.layers.3.self_attn forward pre value, "
        "which is planned; 'qcollect run --resume' takes it"
    ]
    assert count_planned(examine_run(paths), planned) == 7
    assert repair(paths) == []


def test_a_line_that_says_other_things_than_its_file_is_written_anew(paths):
    manifest = paths.manifest_path(0)
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(b'"layer_idx": 3', b'"layer_idx": 4', 1))
    path, _ = one(paths)
    assert problems(paths) == ["wrong_line"]
    assert f"{manifest}:1: written anew as {path.name} says" in repair(paths)
    assert manifest.read_bytes() == before
    assert problems(paths) == []


def test_a_name_that_disagrees_with_the_metadata_is_named_with_the_fields(paths):
    path, _line = one(paths)
    renamed = path.with_name(path.name.replace("_L3_", "_L7_").replace("query", "key"))
    path.rename(renamed)
    manifest = paths.manifest_path(0)
    manifest.write_bytes(manifest.read_bytes().replace(path.name.encode(), renamed.name.encode()))
    assert findings(paths) == [
        f"{renamed}: its name disagrees with its metadata: layer_idx 7 is 3 in the metadata, "
        "tensor 'key' is 'query' in the metadata; give it back its name, or move it away"
    ]


@pytest.mark.parametrize("is_listed", [True, False])
def test_the_same_capture_twice_is_named_and_the_first_is_kept(paths, is_listed):
    path, line = one(paths)
    repeat = path.with_name(path.name.replace("_0001_", "_0009_"))
    shutil.copy(path, repeat)
    if is_listed:
        append_line(paths.manifest_path(0), json.loads(line) | {"file": repeat.name})
    expected = ["repeated"] if is_listed else ["unlisted", "repeated"]
    assert sorted(problems(paths)) == sorted(expected)
    assert f"{repeat}: moved to {paths.torn_dir / repeat.name}: it holds the same capture as {path.name}" in repair(
        paths
    )
    assert path.exists() and not repeat.exists()
    assert problems(paths) == [] and repair(paths) == []


def test_a_file_that_is_listed_twice_is_listed_once_after_a_repair(paths):
    manifest = paths.manifest_path(0)
    before = manifest.read_bytes()
    path, line = one(paths)
    append_line(manifest, json.loads(line))
    assert findings(paths)[0].startswith(f"{manifest}:5: lists {path.name} once more; ")
    assert repair(paths)[0] == f"{manifest}:5: dropped: {path.name} is listed before"
    assert manifest.read_bytes() == before


def test_what_is_planned_is_compared_by_key_and_named(paths):
    planned = keys(paths)
    extra = replace(planned[0], module="model.layers.9.self_attn")
    found = examine_run(paths)
    missing, surplus = judge(found, {extra, *planned[1:]})
    assert (missing.problem, missing.path) == (Problem.MISSING, paths.run_dir)
    assert "model.layers.9.self_attn forward pre query" in missing.what
    assert (surplus.problem, surplus.path) == (Problem.SURPLUS, one(paths)[0])
    assert count_planned(found, {extra, *planned[1:]}) == 7


def test_the_leftovers_of_a_killed_writer_are_named_and_removed(paths):
    path, _ = one(paths)
    manifest = paths.manifest_path(1)
    before = manifest.read_bytes()
    temporary = temporary_path(path.with_name(path.name.replace("0001", "0077")), "abc")
    temporary.write_bytes(b"half")
    with manifest.open("ab") as file:
        file.write(b'{"file": "2024')
    assert problems(paths) == ["temporary", "unended_line"]
    assert repair(paths)[:2] == [
        f"{temporary}: removed: a capture whose writer ended before it was whole",
        f"{manifest}: dropped the last line, which its writer did not end",
    ]
    assert not temporary.exists() and manifest.read_bytes() == before
    assert problems(paths) == [] and repair(paths) == []


def test_a_damaged_line_is_dropped_and_its_file_listed_again(paths):
    manifest = paths.manifest_path(0)
    before = manifest.read_bytes()
    _, line = one(paths, position=1)
    manifest.write_bytes(before.replace(line, b"\x00" * 50))
    assert sorted(problems(paths)) == ["damaged_line", "unlisted"]
    repair(paths)
    assert manifest.read_bytes() == before
    assert (paths.torn_dir / manifest.name).read_bytes().count(b"\x00") == 50


@pytest.mark.parametrize("file", ["../outside.pt", "/etc/passwd", "a/b.pt", "iter0/../../x.pt", ".."])
def test_a_line_never_leads_out_of_the_run(paths, file):
    outside = paths.run_dir.parent / "outside.pt"
    outside.write_bytes(b"precious")
    _, line = one(paths)
    append_line(paths.manifest_path(0), json.loads(line) | {"file": file})
    assert problems(paths) == ["damaged_line"]
    repair(paths)
    assert outside.read_bytes() == b"precious" and problems(paths) == []


def test_a_line_in_the_manifest_of_another_rank_is_moved(paths):
    before = {path: path.read_bytes() for path in list_manifests(paths)}
    _, line = one(paths, rank=1, position=3)
    paths.manifest_path(1).write_bytes(before[paths.manifest_path(1)].replace(line + b"\n", b""))
    append_line(paths.manifest_path(0), json.loads(line))
    assert problems(paths) == ["misplaced_line"]
    repair(paths)
    assert {path: path.read_bytes() for path in list_manifests(paths)} == before


def test_a_run_that_goes_on_is_not_blamed_for_what_is_on_its_way(paths):
    planned = set(keys(paths))
    path, _line = one(paths)
    temporary_path(path, "abc").write_bytes(b"half")
    paths.manifest_path(0).write_bytes(b"\n".join(read_lines(paths.manifest_path(0))[1:]) + b"\n{")
    one(paths, rank=1)[0].unlink()
    assert problems(paths, planned, is_active=True) == ["gone"]


def test_files_that_are_no_captures_are_left_alone(paths):
    other = paths.run_dir / "checkpoint.pt"
    other.write_bytes(b"the user's own")
    (paths.run_dir / ".notes.pt.abc.tmp").write_bytes(b"the user's own, too")
    assert problems(paths) == []
    assert examine_run(paths).num_strangers == 1
    repair(paths)
    assert other.exists() and (paths.run_dir / ".notes.pt.abc.tmp").exists()


def test_an_unreadable_file_is_named_and_left_where_it_is(paths, monkeypatch):
    path, _ = one(paths)

    def refuse(given):
        if given == path:
            raise PermissionError(13, "Permission denied")
        return hash_file(given)

    monkeypatch.setattr("qcollect.store.examine.hash_file", refuse)
    assert findings(paths) == [f"{path}: cannot be read: Permission denied; make it readable, then verify again"]
    repair(paths)
    assert path.exists() and len(read_manifests(paths)) == 8


def test_moving_aside_never_overwrites(paths):
    path, _ = one(paths)
    for number in range(3):
        path.write_bytes(f"torn {number}".encode())
        repair(paths)
    assert [p.read_bytes() for p in sorted(paths.torn_dir.glob("*.pt*"))] == [b"torn 0", b"torn 1", b"torn 2"]


# ---- everything from the files --------------------------------------------------------------------


@pytest.mark.parametrize("by_iteration", [False, True])
@pytest.mark.parametrize("lost", ["manifests", "state"])
def test_manifests_are_rebuilt_from_the_files_alone(save_run, by_iteration, lost):
    paths = save_run(by_iteration=by_iteration, iterations=(0, 1))
    before = {path: path.read_bytes() for path in list_manifests(paths)}
    shutil.rmtree(paths.manifest_dir if lost == "manifests" else paths.state_dir)
    assert problems(paths) == (["unlisted"] * 16 if lost == "manifests" else [])
    assert len(repair(paths)) == 17
    assert {path: path.read_bytes() for path in list_manifests(paths)} == before
    assert problems(paths) == [] and repair(paths) == []


def test_metadata_of_a_callers_own_come_back_whatever_they_are(save_run):
    paths = save_run(ranks=(0,), text="é\u2028\udcff", shape=torch.Size([2]), odd=float("nan"), nested={"a": (1, None)})
    before = paths.manifest_path(0).read_bytes()
    paths.manifest_path(0).unlink()
    repair(paths)
    assert paths.manifest_path(0).read_bytes() == before


def test_older_captures_are_checked_and_need_no_manifest(tmp_path):
    names = (
        "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt",
        "20250908_095220_0003_attention_LNone_forward_pre_FA_mxfp8_value.pt",
        "20250908_091143_0004_linear_L1_backward_mxfp8_input.pt",
    )
    for i, name in enumerate(names):
        content = {"tensor": torch.ones(3), "tensor_info": {"shape": [3]}, "metadata": {"layer_idx": None}}
        if i == 2:
            content = {"tensor": torch.ones(3), "metadata": {"layer_type": "linear", "tensor_name": "input"}}
        torch.save(content if i else {"tensor": torch.ones(3)}, tmp_path / name)
    paths = RunPaths(tmp_path)
    assert problems(paths) == [] and len(examine_run(paths).files) == 3
    assert repair(paths) == []
    assert os.listdir(tmp_path).count(".qcollect") == 0
    tear(tmp_path / names[1], "half")
    assert problems(paths) == ["torn"]


def test_a_file_with_code_in_it_is_no_capture_and_is_not_run(paths, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path, _ = one(paths)
    torch.save({"tensor": Evil(), "metadata": {}}, path)
    assert problems(paths) == ["torn"]
    assert not (tmp_path / "owned").exists()
    with pytest.raises(CaptureError):
        load_any_capture(path)


def test_a_file_of_a_torch_without_zip_archives_is_read(paths):
    path = paths.run_dir / "20250908_091143_0004_linear_L1_forward_mxfp8_input.pt"
    content = {"tensor": torch.ones(3), "metadata": {"layer_idx": 1}}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert problems(paths) == []
    tear(path, "half")
    assert problems(paths) == ["torn"]


DAMAGES = ("tear", "flip", "delete", "unlist", "relist", "misplace", "junk", "tail", "temporary", "copy", "no manifest")


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(DAMAGES), st.integers(0, 1), st.integers(0, 3)), max_size=8))
def test_after_a_repair_only_what_is_missing_is_wrong_and_nothing_is_left_to_do(save_run, damages):
    with tempfile.TemporaryDirectory() as folder:
        paths = save_run(Path(folder) / "mxfp8")
        planned = set(keys(paths))
        for damage, rank, position in damages:
            inflict(paths, damage, rank, position)
        before = {path.read_bytes() for path in paths.run_dir.glob("*.pt")}
        repair(paths)
        assert set(problems(paths, planned)) <= {"missing"}
        assert sorted(p.name for p in paths.run_dir.glob("*.pt")) == sorted(r.file for r in read_manifests(paths))
        after = tree(paths.run_dir)
        assert repair(paths) == [] and tree(paths.run_dir) == after
        # no bytes of a file under a final name are lost
        assert before <= {path.read_bytes() for path in paths.run_dir.rglob("*.pt*")}


def inflict(paths, damage, rank, position):
    files = sorted(paths.run_dir.glob(f"*_rank{rank}_*.pt"))
    path = files[position % len(files)] if files else None
    manifest = paths.manifest_path(rank)
    lines = read_lines(manifest)
    line = lines[position % len(lines)] if lines else b"{}"
    if damage == "no manifest":
        manifest.unlink(missing_ok=True)
    elif damage in ("junk", "tail", "relist", "unlist"):
        added = {"junk": b"junk\n", "tail": b'{"fi', "relist": line + b"\n", "unlist": b""}[damage]
        kept = [kept for kept in lines if damage != "unlist" or kept != line]
        manifest.write_bytes(b"".join(kept + b"\n" for kept in kept) + added)
    elif damage == "misplace":
        with paths.manifest_path(1 - rank).open("ab") as file:
            file.write(line + b"\n")
    elif path is not None and damage == "temporary":
        temporary_path(path, "abc").write_bytes(b"half")
    elif path is not None and damage == "copy":
        seconds = next(s for s in range(60) if not list(paths.run_dir.glob(f"*_1430{s:02d}_*")))
        shutil.copy(path, path.with_name(f"20241201_1430{seconds:02d}{path.name[15:]}"))
    elif path is not None and damage == "delete":
        path.unlink()
    elif path is not None and path.stat().st_size:
        content = path.read_bytes()
        at = len(content) // 2
        path.write_bytes(content[:at] + (b"" if damage == "tear" else bytes([content[at] ^ 1]) + content[at + 1 :]))


# ---- one rank -------------------------------------------------------------------------------------


def test_a_rank_lists_the_orphans_of_its_own_only(paths):
    before = {path: path.read_bytes() for path in list_manifests(paths)}
    for rank in (0, 1):
        _, line = one(paths, rank=rank, position=3)
        manifest = paths.manifest_path(rank)
        manifest.write_bytes(before[manifest].replace(line + b"\n", b"") + b'{"torn')
        path, _ = one(paths, rank=rank)
        temporary_path(path, "abc").write_bytes(b"half")
    other = paths.manifest_path(1).read_bytes()
    actions = [str(action) for action in repair_rank(paths, 0)]
    assert [action.split(": ", 1)[1].split(":")[0] for action in actions] == [
        "removed",
        "listed in rank00000.jsonl",
        "dropped the last line, which its writer did not end",
    ]
    assert paths.manifest_path(0).read_bytes() == before[paths.manifest_path(0)]
    assert paths.manifest_path(1).read_bytes() == other
    assert [path.name.count("rank1") for path in paths.run_dir.glob(".*.tmp")] == [1]
    assert repair_rank(paths, 0) == []


def test_a_rank_without_faults_reads_none_of_its_files_and_writes_nothing(paths, monkeypatch):
    before = tree(paths.run_dir)
    monkeypatch.setattr("qcollect.store.examine.hash_file", lambda path: pytest.fail(f"{path} was read"))
    assert repair_rank(paths, 0) == repair_rank(paths, 5) == []
    assert tree(paths.run_dir) == before


def test_a_rank_drops_what_is_gone_and_moves_what_is_torn(paths):
    gone, _ = one(paths, position=0)
    torn, _ = one(paths, position=1)
    orphan, line = one(paths, position=2)
    gone.unlink()
    tear(torn, "half")
    tear(orphan, "empty")
    manifest = paths.manifest_path(0)
    manifest.write_bytes(manifest.read_bytes().replace(line + b"\n", b""))
    repair_rank(paths, 0)
    assert len(read_manifest(manifest)) == 1
    assert sorted(p.name for p in paths.torn_dir.glob("*.pt")) == sorted([torn.name, orphan.name])
    assert problems(paths) == []


def test_a_folder_that_is_not_there_needs_no_repair(tmp_path):
    assert repair_rank(RunPaths(tmp_path / "none"), 0) == []
    assert not (tmp_path / "none").exists()
