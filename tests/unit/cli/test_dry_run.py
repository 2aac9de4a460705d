import json
import shlex
from dataclasses import replace
from pathlib import Path

from qcollect.cli.dry_run import describe_plan, print_plans
from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut


def lines_of(plan):
    return list(describe_plan(plan))


def test_the_command_can_be_pasted(make_plan):
    plan = make_plan(Path('/my runs/été "x" $HOME;ls/mxfp8'))
    plan = replace(
        plan,
        env={"TENSOR_SAVE_DIR": str(plan.run_dir), "EMPTY": ""},
        unset=("RANK", "MASTER_PORT"),
        torchrun_argv=("torchrun", "-m", "qcollect.worker", "two words", "", "$HOME;ls", "'"),
    )
    lines = lines_of(plan)
    assert shlex.split(lines[lines.index("command:") + 1]) == [
        *("env", "-u", "RANK", "-u", "MASTER_PORT", f"TENSOR_SAVE_DIR={plan.run_dir}", "EMPTY="),
        *plan.torchrun_argv,
    ]
    assert f"  TENSOR_SAVE_DIR={plan.run_dir}" in lines
    assert f"  {plan.run_dir}  the captures" in lines


def test_ranks_with_the_same_captures_are_told_together(make_plan):
    plan = make_plan(world_size=3)
    cut = Cut(iteration=0, micro_batch=0, count=1, start=0)
    plan = replace(plan, schedule=replace(plan.schedule, cuts=(*plan.schedule.cuts[:2], (cut,))))
    lines = [line.strip() for line in lines_of(plan)]
    assert "ranks 0 to 1: 3 captures each" in lines
    assert "rank 2: 1 capture" in lines
    assert "1 to    3  model.layers.0.self_attn: query, query, query" in lines


def test_modules_in_high_precision_are_told_once_for_all_layers(make_plan):
    excluded = ("model.layers.0.norm", "model.layers.1.norm", "lm_head")
    assert "left in high precision: model.layers.*.norm, lm_head" in lines_of(replace(make_plan(), excluded=excluded))


def test_several_plans_end_with_their_sum(make_plan, capsys):
    print_plans([make_plan(name="one"), make_plan(name="two")], as_json=False)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("in total: 2 runs, 12 files, about ")
    assert shown.out.endswith("; nothing was started\n")


def test_json_is_one_plan_that_can_be_read_back_or_a_list(make_plan, capsys):
    plan = make_plan()
    print_plans([plan], as_json=True)
    fields = json.loads(capsys.readouterr().out)
    assert Plan.from_dict(fields) == plan
    assert fields["num_bytes"] == plan.schedule.num_bytes()
    print_plans([plan, plan], as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_warnings_go_to_stderr_once(make_plan, capsys):
    plan = replace(make_plan(), warnings=("too small",))
    print_plans([plan, plan], as_json=False)
    assert capsys.readouterr().err == "warning: too small\n"
