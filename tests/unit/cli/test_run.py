import signal

import pytest

import qcollect.cli
from qcollect.cli import planning, run
from qcollect.errors import OutputError, UsageError
from qcollect.launch.outcome import Outcome
from qcollect.monitor.run_record import RunState


def load(*settings, target=None, nproc=None, gpu_ids=None, types=()):
    return planning.load("tiny", settings, target, nproc, gpu_ids, types)


def test_a_flag_wins_over_a_setting_and_a_setting_over_the_recipe():
    assert load().capture.num_wanted == 50
    assert load("capture.target=7").capture.target == 7
    assert load("capture.target=7", target=8).capture.target == 8


def test_flags_reach_the_recipe():
    recipe = load(nproc=3, gpu_ids="0, GPU-8932f937", types=["hifp8", "mxfp8"])
    assert (recipe.launch.nproc, recipe.launch.gpu_ids, recipe.quant.type) == (3, ("0", "GPU-8932f937"), "hifp8")


def test_settings_are_checked_against_the_type_of_the_run_not_that_of_the_recipe():
    assert load("quant.type=hifp8", "quant.scale_rule=ceil", types=["mxfp4"]).quant.scale_rule == "ceil"


@pytest.mark.parametrize("out", ["", "~", "~/x"])
def test_an_output_folder_that_is_surely_not_meant_is_refused(out):
    with pytest.raises(UsageError, match="--out is "):
        planning.resolve_out(out)


def test_an_output_folder_is_absolute_and_otherwise_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planning.resolve_out("a [/x/y] b") == tmp_path / "a [/x/y] b"
    assert planning.resolve_out("a~b") == tmp_path / "a~b"


def test_a_dry_run_tells_what_would_forbid_the_run(capsys):
    with planning._refusing(dry_run=True):
        raise OutputError("/x holds a run")
    assert capsys.readouterr().err == "warning: as it is, the run would be refused: /x holds a run\n"
    with pytest.raises(OutputError), planning._refusing(dry_run=False):
        raise OutputError("/x holds a run")


@pytest.mark.parametrize(
    ("state", "exit_code", "text"),
    [
        (RunState.COMPLETED, 0, "mxfp8: why\n"),
        (RunState.INTERRUPTED, 130, "mxfp8: why; they are in {run_dir}\n"),
        (RunState.STOPPED, 7, "mxfp8: why; they are in {run_dir}\n"),
        (RunState.FAILED, 4, "error: mxfp8: why\n  | last\n  | [red]\n"),
    ],
)
def test_an_error_is_called_one_and_a_stop_is_not(make_plan, capsys, state, exit_code, text):
    plan = make_plan()
    run._show_outcome(plan, Outcome(state=state, exit_code=exit_code, reason="why", log_tail=("last", "[red]")))
    assert capsys.readouterr().err == text.format(run_dir=plan.run_dir)


def test_a_message_of_several_lines_is_one_headline(make_plan, capsys):
    outcome = Outcome(state=RunState.FAILED, exit_code=4, reason="rank 0 failed: ValueError: one\ntwo\x1b[2J")
    run._show_outcome(make_plan(), outcome)
    assert capsys.readouterr().err == "error: mxfp8: rank 0 failed: ValueError: one two\\x1b[2J\n"


def test_arguments_behind_the_dashes_are_not_looked_at(monkeypatch):
    seen = {}

    def app(args, obj, prog_name):
        seen.update(args=args, obj=obj)

    monkeypatch.setattr(qcollect.cli, "app", app)
    before = signal.getsignal(signal.SIGTERM)
    qcollect.cli.main(["run", "mxfp8", "--", "--set", "a b", "", "--", "-n"])
    signal.signal(signal.SIGTERM, before)
    assert seen == {"args": ["run", "mxfp8"], "obj": ("--set", "a b", "", "--", "-n")}


def test_sigterm_ends_a_command_with_its_code():
    with pytest.raises(SystemExit) as ended:
        qcollect.cli._terminate(signal.SIGTERM, None)
    assert ended.value.code == 143
