import os
from dataclasses import replace

import pytest

from qcollect.errors import OutputError, PreflightError, RecipeError, ScheduleError
from qcollect.host.facts import DiskSpace, FolderProbe
from qcollect.launch import preflight
from qcollect.launch.claim import ClaimMode, claim
from qcollect.launch.preflight import (
    check_limits,
    check_output,
    check_script,
    check_space,
    check_types,
    count_files,
    find_end_of_data,
    find_layout,
    find_output,
    find_space,
    refuse,
)
from qcollect.plan.finding import Finding, Level
from qcollect.plan.schedule import Cut, Schedule
from qcollect.recipe.load import load_recipe
from qcollect.recipe.records import TriggerSpec


def test_a_setting_one_type_does_not_take_is_named_with_the_type():
    recipe = load_recipe("tiny", ["quant.scale_rule=ceil"])
    check_types(recipe, ["mxfp8", "mxfp4"])
    with pytest.raises(RecipeError) as refused:
        check_types(recipe, ["mxfp8", "hifp8"])
    assert str(refused.value) == (
        "recipe tiny with quant type hifp8: quant.scale_rule is 'ceil', and hifp8 takes none; leave it out"
    )


def test_a_setting_of_one_gemm_is_named_as_such():
    recipe = load_recipe("tiny", ["quant.overrides={dgrad: {scale_rule: ceil}}"])
    with pytest.raises(RecipeError, match=r"with quant type bf16: quant\.overrides\.dgrad\.scale_rule is 'ceil'"):
        check_types(recipe, ["bf16"])


def test_the_script_must_be_a_file(tmp_path):
    (tmp_path / "train.py").write_text("")
    check_script(load_recipe("tiny", [f"script={tmp_path}/train.py"]))
    for name, problem in (("gone.py", "does not exist"), ("", "is a folder")):
        with pytest.raises(PreflightError) as refused:
            check_script(load_recipe("tiny", [f"script={tmp_path / name}"]))
        assert str(refused.value).startswith(f"script {tmp_path / name} {problem}; name the training script")


@pytest.mark.parametrize("name", ["out/mxfp8", "a/b/c/mxfp8", "run[red]x/mxfp8"])
def test_a_folder_that_is_not_there_can_be_had_and_is_not_made(tmp_path, name):
    check_output(tmp_path / name, mode=ClaimMode.NEW, now=0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_can_be_had(tmp_path):
    check_output(tmp_path, mode=ClaimMode.NEW, now=0.0)


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/mxfp8", "file/a/mxfp8"):
        with pytest.raises(OutputError) as refused:
            check_output(tmp_path / name, mode=ClaimMode.OVERWRITE, now=0.0)
        assert str(refused.value) == (
            f"{tmp_path / name} cannot be made: {tmp_path / 'file'} is not a folder; choose another folder with --out"
        )


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="link is not a folder"):
        check_output(tmp_path / "link" / "mxfp8", mode=ClaimMode.NEW, now=0.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(
        OutputError, match="cannot be written to: Permission denied .*; choose another folder with --out"
    ):
        check_output(tmp_path / "mxfp8", mode=ClaimMode.NEW, now=0.0)


def test_a_folder_where_no_file_can_be_made_is_told_with_what_is_free(tmp_path, monkeypatch):
    problem = "cannot be written to: No space left on device"
    monkeypatch.setattr(preflight, "probe_folder", lambda folder: FolderProbe(folder=folder, problem=problem))
    monkeypatch.setattr(preflight, "disk_space", lambda folder: DiskSpace(free_bytes=4096, free_inodes=0))
    with pytest.raises(OutputError) as refused:
        check_output(tmp_path / "out" / "mxfp8", mode=ClaimMode.NEW, now=0.0)
    assert str(refused.value) == (
        f"{tmp_path} {problem} (4,096 bytes and 0 inodes free); choose another folder with --out"
    )


def test_a_file_system_without_hard_links_is_warned_of_and_taken(tmp_path, monkeypatch):
    probe = FolderProbe(folder=tmp_path, problem=None, can_link=False)
    monkeypatch.setattr(preflight, "probe_folder", lambda folder: probe)
    check_output(tmp_path / "mxfp8", mode=ClaimMode.NEW, now=0.0)
    finding = find_output(tmp_path / "mxfp8", mode=ClaimMode.NEW, now=0.0)
    assert finding.level == Level.WARNING
    assert finding.text == (
        f"{tmp_path} is on a file system without hard links; "
        "captures are renamed there instead, which does not tell two writers of a folder apart: start one only"
    )


def test_a_name_that_is_too_long_is_an_error_of_ours(tmp_path):
    with pytest.raises(OutputError, match="File name too long"):
        check_output(tmp_path / ("a" * 300), mode=ClaimMode.NEW, now=0.0)


def test_a_folder_with_a_run_that_goes_on_is_refused_even_to_be_overwritten(make_plan):
    plan = make_plan()
    claim(plan, mode=ClaimMode.NEW, now=0.0)
    for mode in ClaimMode:
        with pytest.raises(OutputError, match=f"is in use by run run-one .starting, pid {os.getpid()} on "):
            check_output(plan.run_dir, mode=mode, now=1.0)


def test_too_few_bytes_or_inodes_are_told_with_both_numbers(make_plan, tmp_path):
    plan = make_plan()
    check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=1000))
    check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=None))
    with pytest.raises(OutputError, match=rf"^{tmp_path}/out: the captures need about 24,624 bytes and 100 are free"):
        check_space([plan], DiskSpace(free_bytes=100, free_inodes=None))
    with pytest.raises(OutputError, match=r"the run makes 38 files and 3 inodes are free; lower --target"):
        check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=3))


def test_space_that_suffices_is_told_with_what_is_needed(make_plan, tmp_path):
    finding = find_space([make_plan()], DiskSpace(free_bytes=1 << 20, free_inodes=1000))
    assert (finding.level, finding.message) == (
        Level.OK,
        f"{tmp_path}/out: about 24,624 bytes in 38 files are needed, 1,048,576 bytes and 1,000 inodes are free",
    )
    finding = find_space([make_plan()], DiskSpace(free_bytes=1 << 20, free_inodes=None))
    assert finding.message.endswith("are needed, 1,048,576 bytes are free")


def spread(plan, iterations, layout="flat"):
    """The plan with its captures in several iterations."""
    capture = replace(plan.recipe.capture, layout=layout)
    cuts = tuple(Cut(iteration=i, micro_batch=0, count=1, start=n) for n, i in enumerate(iterations))
    schedule = Schedule(captures=plan.schedule.captures, cuts=(cuts,) * plan.world_size)
    return replace(plan, schedule=schedule, recipe=replace(plan.recipe, capture=capture))


def test_a_folder_for_each_iteration_takes_an_inode(make_plan):
    flat, folders = (spread(make_plan(), [0, 4, 9], layout) for layout in ("flat", "by_iteration"))
    assert count_files(folders) == count_files(flat) + 3


@pytest.mark.parametrize(
    ("share", "layout", "num_warnings"), [(5000, "flat", 0), (5001, "flat", 1), (5001, "by_iteration", 0)]
)
def test_more_than_ten_thousand_files_in_one_folder_are_warned_of(make_plan, share, layout, num_warnings):
    plan = make_plan(share=share)
    plan = replace(plan, recipe=replace(plan.recipe, capture=replace(plan.recipe.capture, layout=layout)))
    findings = find_layout(plan)
    assert [f.text for f in findings] == [
        f"{plan.run_dir} gets 10,002 files, all in one folder; a folder for each iteration is easier on file systems "
        "and tools: --set capture.layout=by_iteration"
    ] * num_warnings


def test_captures_of_samples_that_were_seen_before_are_warned_of(make_plan):
    plan = spread(make_plan(), [0, 4])
    assert find_end_of_data(plan, None) == find_end_of_data(plan, 10) == []
    (finding,) = find_end_of_data(plan, 9)
    assert (finding.check, finding.level) == ("data", Level.WARNING)
    assert finding.text == (
        "up to its last capture the run takes 10 samples (5 iterations of 2), and the data hold 9: then they are seen "
        "again, in another order; take more data, a shorter data.sequence_length, or earlier capture.iterations"
    )


def test_all_problems_refuse_together_and_nothing_else_does():
    fine, odd = Finding.ok("a", "b"), Finding.warning("c", "d", "e")
    refuse([fine, odd])
    with pytest.raises(PreflightError, match=r"^one; do this\ntwo; do that$"):
        refuse([fine, Finding.problem("x", "one", "do this"), odd, Finding.problem("y", "two", "do that")])
    with pytest.raises(OutputError):
        refuse([Finding.problem("output", "one", "")], OutputError)


def test_with_a_trigger_nobody_knows_which_samples_are_captured(make_plan):
    plan = make_plan()
    capture = replace(plan.recipe.capture, trigger=TriggerSpec(on=("nan",)))
    assert find_end_of_data(replace(plan, recipe=replace(plan.recipe, capture=capture)), 1) == []


def test_max_bytes_must_hold_the_first_iteration_after_a_trigger(make_plan):
    plan = make_plan()
    capture = replace(plan.recipe.capture, trigger=TriggerSpec(on=("nan",)))
    recipe = replace(plan.recipe, capture=capture, launch=replace(plan.recipe.launch, max_bytes=1))
    text = r"the captures of the first iteration alone .* --set capture\.trigger\.iterations=K$"
    with pytest.raises(ScheduleError, match=text):
        check_limits(replace(plan, recipe=recipe))
