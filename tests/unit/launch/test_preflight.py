import os

import pytest

from qcollect.errors import OutputError, PreflightError, RecipeError
from qcollect.host.facts import DiskSpace
from qcollect.launch.claim import claim
from qcollect.launch.preflight import check_output, check_script, check_space, check_types
from qcollect.recipe.load import load_recipe


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
    check_output(tmp_path / name, overwrite=False, now=0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_can_be_had(tmp_path):
    check_output(tmp_path, overwrite=False, now=0.0)


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/mxfp8", "file/a/mxfp8"):
        with pytest.raises(OutputError) as refused:
            check_output(tmp_path / name, overwrite=True, now=0.0)
        assert str(refused.value) == (
            f"{tmp_path / name} cannot be made: {tmp_path / 'file'} is not a folder; choose another folder with --out"
        )


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="link is not a folder"):
        check_output(tmp_path / "link" / "mxfp8", overwrite=False, now=0.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written to; choose another folder with --out"):
        check_output(tmp_path / "mxfp8", overwrite=False, now=0.0)


def test_a_name_that_is_too_long_is_an_error_of_ours(tmp_path):
    with pytest.raises(OutputError, match="File name too long"):
        check_output(tmp_path / ("a" * 300), overwrite=False, now=0.0)


def test_a_folder_with_a_run_that_goes_on_is_refused_even_to_be_overwritten(make_plan):
    plan = make_plan()
    claim(plan, overwrite=False, now=0.0)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=f"is in use by run run-one .starting, pid {os.getpid()} on "):
            check_output(plan.run_dir, overwrite=overwrite, now=1.0)


def test_too_few_bytes_or_inodes_are_told_with_both_numbers(make_plan, tmp_path):
    plan = make_plan()
    check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=1000))
    check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=None))
    with pytest.raises(OutputError, match=rf"^{tmp_path}/out: the captures need about 24,624 bytes and 100 are free"):
        check_space([plan], DiskSpace(free_bytes=100, free_inodes=None))
    with pytest.raises(OutputError, match=r"the run makes 26 files and 3 inodes are free; lower --target"):
        check_space([plan], DiskSpace(free_bytes=1 << 30, free_inodes=3))
