import json
import os
import re
import warnings

import pytest
import torch
from torch import nn

import qcollect
from qcollect.errors import CaptureError, FormatError, OutputError, ScheduleError, SelectionError, UsageError
from qcollect.paths import RunPaths
from qcollect.tensor_saver import TensorSaver
from qcollect.vocab import RankInfo
from qcollect.worker import collect as collect_module
from qcollect.worker.attention import TAP_ATTRIBUTE


def two_linears():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def step(run, model, x, **metrics):
    model(x).square().sum().backward()
    return run.step(**metrics)


# ---- the target ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [1, 5, 7, 10, 11])
def test_target_is_exact_although_the_first_input_needs_no_grad(train_plain, read_files, tmp_path, target):
    """Both layers together have 12 captures; grad_input of the first does not exist, and nobody knew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = train_plain(two_linears(), torch.randn(3, 4), "mxfp8", tmp_path / "run", target)
    files = read_files(tmp_path / "run")
    assert len(files) == run.num_captured == target
    assert ("0", "grad_input", None, 0, 0, 0) not in files
    assert sorted(int(path.name.split("_")[2]) for path in (tmp_path / "run").glob("*.pt")) == [*range(1, target + 1)]


def test_missing_gradient_is_replaced_by_the_next_of_the_list_in_the_next_iteration(train_plain, read_files, tmp_path):
    run = train_plain(two_linears(), torch.randn(3, 4), "none", tmp_path / "run", 12)
    files = read_files(tmp_path / "run")
    assert run.iteration == 2
    assert [key for key in files if key[3] == 1] == [("2", "input", None, 1, 0, 0)]


def test_target_that_needs_what_does_not_exist_again_and_again_is_an_error(tmp_path, train_plain):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(CaptureError) as error:
        train_plain(model, torch.randn(3, 4), "none", tmp_path / "run", 1, tensor_names="grad_input")
    assert str(error.value) == (
        "rank 0: 1 captures, first number 1, 0 backward grad_input do not come up in the model's training forward"
    )


def test_module_that_never_runs_gives_its_places_to_others(train_plain, read_files, tmp_path):
    class WithSpare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear1, self.spare, self.linear2 = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.linear2(self.linear1(x))

    run = train_plain(WithSpare(), torch.randn(2, 3, 8), "mxfp8", tmp_path / "run", 14)
    files = read_files(tmp_path / "run")
    assert len(files) == 14
    assert run.iteration == 2
    assert {key[0] for key in files} == {"linear1", "linear2"}


def test_micro_batch_that_does_not_come_is_made_up_for(read_files, tmp_path):
    model, x = two_linears(), torch.randn(3, 4, requires_grad=True)
    with qcollect.collect(model, "none", tmp_path / "run", 15, micro_batches=2) as run:
        assert not step(run, model, x)  # one micro-batch only
        assert step(run, model, x)
    assert sorted(key[3] for key in read_files(tmp_path / "run")) == [0] * 12 + [1] * 3


def test_iterations_share_the_target(train_plain, read_files, tmp_path):
    x = torch.randn(3, 4, requires_grad=True)
    settings = {"iterations": "spread:2", "num_iterations": 8}
    run = train_plain(two_linears(), x, "none", tmp_path / "run", 7, **settings)
    assert run.iteration == 5
    assert sorted(key[3] for key in read_files(tmp_path / "run")) == [0] * 4 + [4] * 3


def test_training_goes_on_quantized_after_the_target(tmp_path):
    model, x = two_linears(), torch.randn(3, 4)
    plain = model(x)
    with qcollect.collect(model, "mxfp4", tmp_path / "run", 5) as run:
        assert step(run, model, x)
        assert step(run, model, x)
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)
    assert run.num_captured == 5


def hooks_of(model):
    """Whatever collect puts on a model, by module."""
    return {
        name: (module.__dict__.get("forward"), module._forward_pre_hooks, module._forward_hooks)
        for name, module in model.named_modules()
        if "forward" in module.__dict__ or module._forward_pre_hooks or module._forward_hooks
    }


def test_what_only_captures_is_off_the_model_once_the_target_is_reached(make_llama, tokens, tmp_path):
    model, ids = make_llama(), tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    with qcollect.collect(model, "none", tmp_path / "none", 50) as run:
        for _ in range(3):
            assert hooks_of(model) or run.num_captured == 50
            model(input_ids=ids, labels=ids).loss.backward()
            assert run.step()
        assert hooks_of(model) == {}
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model.model.layers[0].self_attn, TAP_ATTRIBUTE)
    with qcollect.collect(model, "mxfp8", tmp_path / "mxfp8", 50) as run:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            assert run.step()
        # seven linears go on being quantized; the head, which is not, and the model itself are as they were
        assert [name.rsplit(".", 1)[-1] for name in hooks_of(model)] == [
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ]  # fmt: skip
        assert all(not pre and not post for _, pre, post in hooks_of(model).values())
        assert run.frame is None
    assert hooks_of(model) == {}


def test_draws_go_on_with_the_micro_batches_after_the_target(tmp_path):
    """Where they do not, all micro-batches of an iteration are rounded by the same draws."""
    outputs = {}
    for target in (2, 16):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(32, 4)), torch.randn(3, 32)
        settings = {"operations": "forward", "iterations": "0-7", "micro_batches": 2, "tensor_names": "input"}
        with qcollect.collect(model, "mxfp4", tmp_path / str(target), target, rounding="stochastic", **settings) as run:
            outputs[target] = []
            for _ in range(8):
                outputs[target] += [model(x).detach() for _ in range(2)]
                run.step()
    for a, b in zip(*outputs.values(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*outputs[2][-2:])


FORWARD_IN_TEN_ITERATIONS = {"operations": "forward", "iterations": "0-9"}


def test_stop_file_ends_the_run(tmp_path):
    model, x = two_linears(), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qcollect.collect(model, "none", tmp_path / "run", 20, **FORWARD_IN_TEN_ITERATIONS) as run:
            assert not step(run, model, x)
            stop_path = RunPaths(tmp_path / "run").stop_path
            stop_path.parent.mkdir()
            stop_path.touch()
            assert step(run, model, x)
    assert run.num_captured == 4


def test_ending_below_the_target_is_warned_of(tmp_path):
    model, x = two_linears(), torch.randn(3, 4)
    run = qcollect.collect(model, "none", tmp_path / "run", 20, **FORWARD_IN_TEN_ITERATIONS)
    with pytest.warns(UserWarning) as caught, run:
        step(run, model, x)
    assert [str(w.message) for w in caught] == [
        "qcollect: rank 0: 2 of 20 captures in 1 iteration(s); train longer, or lower the target"
    ]


def test_ending_with_nothing_captured_is_an_error(tmp_path):
    run = qcollect.collect(two_linears(), "none", tmp_path / "run", 12, iterations="3")
    with pytest.raises(CaptureError) as error, run:
        assert not run.step()
    assert str(error.value) == (
        "rank 0: 0 of 12 captures in 1 iteration(s); the model's own forward did not run in training mode "
        "(a compiled copy may have)"
    )


def test_training_that_never_runs_the_model_in_training_mode_is_an_error_soon(tmp_path):
    """As transformers' from_pretrained gives it: in evaluation mode."""
    model, x = two_linears().eval(), torch.randn(3, 4)
    with pytest.raises(CaptureError) as error, qcollect.collect(model, "none", tmp_path / "run", 12) as run:
        for _ in range(100):
            step(run, model, x)
    assert run.iteration == 2
    assert str(error.value) == (
        "rank 0: 12 captures are to come, and for 3 iterations the model's own forward did not run in training mode; "
        "call model.train(), and the model that was given to collect (a compiled copy may have run)"
    )


def test_small_target_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="qcollect: the target 2 is too small to reach a backward capture on rank"):
        qcollect.collect(two_linears(), "none", tmp_path / "run", 2)


# ---- selectors -----------------------------------------------------------------------------------


def test_selectors_choose(make_llama, tokens, train_llama, read_files, tmp_path):
    model = make_llama(num_hidden_layers=3)
    train_llama(model, tokens(), "none", tmp_path / "run", 8, layers=[0, 2], modules=["*_proj"], tensor_names="weight",
                operations="forward")  # fmt: skip
    files = read_files(tmp_path / "run")
    assert {key[1] for key in files} == {"weight"}
    assert {content["metadata"]["layer_idx"] for content in files.values()} == {0, 2}


def test_samples_choose_micro_batches(make_llama, tokens, read_files, tmp_path):
    model = make_llama()
    settings = {"samples": [5], "micro_batches": 2, "micro_batch_size": 2, "iterations": "all", "num_iterations": 4}
    with qcollect.collect(model, "none", tmp_path / "run", 6, **settings) as run:
        for iteration in range(2):
            for micro_batch in range(2):
                ids = tokens(2, 5, 2 * iteration + micro_batch)
                model(input_ids=ids, labels=ids).loss.backward()
            assert run.step() == (iteration == 1)
    files = read_files(tmp_path / "run")
    assert {key[3:5] for key in files} == {(1, 0)}
    assert {content["metadata"]["sample_idx"] for content in files.values()} == {4}
    assert {content["metadata"]["num_samples"] for content in files.values()} == {2}


# ---- refusals ------------------------------------------------------------------------------------


def test_folder_that_holds_a_run_is_refused_and_left_alone(train_plain, tmp_path):
    run_dir = tmp_path / "run"
    train_plain(two_linears(), torch.randn(3, 4), "none", run_dir, 5)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(OutputError) as error:
        qcollect.collect(two_linears(), "none", run_dir, 5)
    assert str(error.value) == f"{run_dir} holds a run already; give another out_dir, or remove that run"
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError) as error:
        qcollect.collect(two_linears(), "none", tmp_path / "file" / "run", 5)
    assert str(error.value) == f"{tmp_path}/file/run cannot be written: Not a directory"


@pytest.mark.parametrize(
    ("settings", "error_type", "text"),
    [
        ({"vals": "both"}, UsageError, "collect has no setting 'vals'; capture settings: layers, modules, "),
        ({"types": ["mxfp8"]}, UsageError, "collect has no setting 'types'; "),
        (
            {"values": "all"},
            UsageError,
            "collect: capture.values is 'all'; known: original, quantized, both.",
        ),
        ({"attention": "qk"}, UsageError, "collect: quant.attention is 'qk'; known: qkv, none."),
        ({"layout": "flatt"}, UsageError, "collect: capture.layout is 'flatt'; known: flat, by_iteration."),
        ({"mode": "stats"}, UsageError, "collect: capture.target is 5, and capture.mode stats takes everything its "),
        ({"shadow": ["mxfp4"]}, UsageError, "collect: capture.shadow is mxfp4, and shadow types are measured with "),
        ({"mode": "all"}, UsageError, "collect: capture.mode is 'all'; known: tensors, stats"),
        ({"hifp8_scale": "always"}, UsageError, "collect: quant.hifp8_scale is 'always'; known: "),
        (
            {"overrides": {"wgard": {"type": "bf16"}}},
            UsageError,
            "collect: unknown key 'quant.overrides.wgard'; known: fprop, dgrad, wgrad. Did you mean 'wgrad'?",
        ),
        ({"overrides": {"wgrad": {"type": "bf17"}}}, UsageError, "collect: quant.overrides.wgrad.type is 'bf17'"),
        ({"scale_rule": "floor", "quant_type": "hifp8"}, UsageError, "collect: quant.scale_rule is 'floor', and hifp8"),
        ({"quant_type": "mxfp9"}, FormatError, "quant type 'mxfp9' is not known; known: bf16, fp16, fp8_e4m3, "),
        ({"target": 0}, UsageError, "collect: capture.target is 0; must be at least 1"),
        ({"modules": "*.q_proj"}, SelectionError, "capture.modules: '*.q_proj' matches nothing; there are: 0, 2"),
        ({"layers": [5]}, SelectionError, "capture.layers is [5]: index 5 does not exist, there are 3 (0-2)"),
        ({"exclude": "*.o_proj"}, SelectionError, "exclude: '*.o_proj' matches nothing; there are: 0, 1, 2"),
        ({"target": 13}, ScheduleError, "target 13 is more than this run can produce: 12 files = 12 captures a "),
        ({"iterations": "0-3", "num_iterations": 2}, SelectionError, "capture.iterations is '0-3': index 2 does not "),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_written(tmp_path, settings, error_type, text):
    arguments = {"quant_type": "mxfp8", "target": 5} | settings
    with pytest.raises(error_type, match="^" + re.escape(text)):
        qcollect.collect(two_linears(), out_dir=tmp_path / "run", **arguments)
    assert os.listdir(tmp_path) == []


def test_exclude_may_name_what_is_high_precision_anyway(make_llama, tmp_path):
    qcollect.collect(make_llama(), "mxfp8", tmp_path / "run", 5, exclude=["model.embed_tokens", "*.o_proj"])


@pytest.mark.parametrize("compiled", ["whole", "part", "in_place"])
def test_compiled_model_is_refused_before_anything_is_written(tmp_path, compiled):
    model = two_linears()
    if compiled == "whole":
        model = torch.compile(model, backend="eager")
    elif compiled == "part":
        model[2] = torch.compile(model[2], backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(UsageError) as error:
        qcollect.collect(model, "none", tmp_path / "run", 5)
    name = {"whole": "OptimizedModule", "part": "2", "in_place": "Sequential"}[compiled]
    assert str(error.value) == (
        f"the model is compiled already ({name}) and its hooks would never fire; collect before torch.compile"
    )
    assert os.listdir(tmp_path) == []


def test_data_parallel_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError) as error:
        qcollect.collect(nn.DataParallel(two_linears()), "none", tmp_path / "run", 5)
    assert str(error.value) == (
        "nn.DataParallel runs copies of the model, made anew in every forward, that nothing can be captured from; "
        "use torch.nn.parallel.DistributedDataParallel"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("order", ["compile_first", "collect_first"])
def test_compiled_copy_of_the_model_gives_every_capture(tmp_path, read_files, order):
    """Hooks added after torch.compile that never fire: pytorch/pytorch issue 117758."""
    model, x = two_linears(), torch.randn(3, 4, requires_grad=True)
    expected = model(x).detach()
    torch._dynamo.reset()
    copy = None
    if order == "compile_first":
        copy = torch.compile(model, backend="eager")
        copy(x)
    with qcollect.collect(model, "none", tmp_path / "run", 12) as run:
        copy = copy or torch.compile(model, backend="eager")
        output = copy(x)
        output.sum().backward()
        assert run.step()
        assert torch.equal(copy(x), expected)  # hooks are gone, and the copy notices
    assert torch.equal(output, expected)
    assert len(read_files(tmp_path / "run")) == 12
    with qcollect.collect(model, "mxfp4", tmp_path / "quantized", 12):
        assert not torch.equal(copy(x), expected)
    assert torch.equal(copy(x), expected)
    torch._dynamo.reset()


def test_model_that_is_collected_from_already_is_refused(tmp_path):
    model = two_linears()
    second = qcollect.collect(model, "mxfp8", tmp_path / "b", 5)
    with qcollect.collect(model, "none", tmp_path / "a", 5), pytest.raises(UsageError) as error, second:
        pass
    assert str(error.value) == "the model is collected from already; leave that context first"
    assert "forward" not in model[0].__dict__


# ---- the model afterwards ------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [False, True])
def test_leaving_the_context_restores_the_model(make_llama, tokens, tmp_path, raises):
    model, ids = make_llama(), tokens()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    plain = model(input_ids=ids).logits
    try:
        with qcollect.collect(model, "mxfp8", tmp_path / "run", 50) as run:
            assert model.config._attn_implementation == "qcollect_sdpa"
            assert "forward" in model.model.layers[0].self_attn.q_proj.__dict__
            model(input_ids=ids, labels=ids).loss.backward()
            run.step()
            if raises:
                raise RuntimeError("of the user")
    except RuntimeError as error:
        assert str(error) == "of the user"
    model.zero_grad()
    assert model.config._attn_implementation == "sdpa"
    for name, module in model.named_modules():
        assert "forward" not in module.__dict__, name
        assert not hasattr(module, TAP_ATTRIBUTE), name
        assert not module._forward_pre_hooks and not module._forward_hooks and not module._backward_hooks, name
        assert module.__dict__.keys() == before[name].keys(), name
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_forward_of_another_tool_is_put_back(train_plain, tmp_path):
    model = two_linears()
    wrapper = lambda x: x  # noqa: E731
    model[0].forward = wrapper
    train_plain(model, torch.randn(3, 4), "none", tmp_path / "run", 5)
    assert model[0].forward is wrapper


# ---- what is written -----------------------------------------------------------------------------


def test_saving_switched_off_writes_nothing_and_training_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    model, x = two_linears(), torch.randn(3, 4)
    plain = model(x)
    with qcollect.collect(model, "mxfp4", tmp_path / "run", 5) as run:
        assert not torch.equal(model(x), plain)  # still quantized
        for _ in range(3):
            assert step(run, model, x, loss=1.0) is False
    assert run.num_captured == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("text", "enabled"), [("true", True), ("1", True), ("", True), ("False", False), ("0", False)])
def test_saving_is_on_but_for_a_word_for_no(monkeypatch, tmp_path, text, enabled):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", text)
    qcollect.collect(two_linears(), "none", tmp_path / "run", 5)
    assert (tmp_path / "run").exists() is enabled


def test_environment_gives_type_and_folder(monkeypatch, tmp_path, train_plain, read_files):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "logs"))
    train_plain(two_linears(), torch.randn(3, 4), target=5)
    files = read_files(tmp_path / "logs")
    assert {content["metadata"]["quant_type"] for content in files.values()} == {"mxfp4"}


def test_defaults_are_hifp8_and_tensor_logs_as_it_stands(monkeypatch, tmp_path, train_plain, read_files):
    monkeypatch.chdir(tmp_path)
    train_plain(two_linears(), torch.randn(3, 4), target=5)
    assert len(list((tmp_path / "tensor_logs").glob("*.pt"))) == 5
    files = read_files(tmp_path / "tensor_logs")
    assert {content["metadata"]["quant_type"] for content in files.values()} == {"hifp8"}


def test_relative_folder_is_that_of_the_start(monkeypatch, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    model = two_linears()
    with qcollect.collect(model, "none", "rel", 5) as run:
        monkeypatch.chdir(tmp_path / "b")
        assert step(run, model, torch.randn(3, 4))
    assert len(list((tmp_path / "a" / "rel").glob("*.pt"))) == 5
    assert os.listdir(tmp_path / "b") == []


def test_start_values_of_iteration_and_sample_are_moved_on(monkeypatch, make_llama, tokens, read_files, tmp_path):
    monkeypatch.setenv("TENSOR_SAVER_ITERATION", "100")
    monkeypatch.setenv("CURRENT_SAMPLE_IDX", "7")
    model = make_llama()
    with qcollect.collect(model, "none", tmp_path / "run", 6, iterations="0-1", operations="forward") as run:
        for _ in range(2):
            model(input_ids=tokens(2), labels=tokens(2)).loss.backward()
            done = run.step()
    assert done
    found = {(c["metadata"]["iteration"], c["metadata"]["sample_idx"]) for c in read_files(tmp_path / "run").values()}
    assert found == {(100, 7), (101, 9)}


def test_process_alone_on_the_fourth_card_takes_the_whole_target(monkeypatch, train_plain, read_files, tmp_path):
    """The device index is its rank where nothing else says one; there are no three others before it."""
    alone = RankInfo(rank=3, local_rank=3, world_size=1, source="device")
    monkeypatch.setattr(collect_module, "detect_rank", lambda *_: alone)
    train_plain(two_linears(), torch.randn(2, 4, requires_grad=True), "none", tmp_path / "run", 12)
    found = [content["metadata"] for content in read_files(tmp_path / "run").values()]
    assert {(m["rank"], m["world_size"], m["sample_idx"]) for m in found} == {(3, 1, 0)}
    assert len(found) == 12


def test_saves_by_hand_in_the_loop_follow_the_collector(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model, x = two_linears(), torch.randn(2, 4, requires_grad=True)
    saver, found = TensorSaver(tmp_path / "by_hand", quant_type="none"), []
    with qcollect.collect(model, "none", tmp_path / "run", 24, iterations="0-1") as run:
        for _ in range(2):
            for _ in range(2):
                output = model(x)
                path = saver.save_tensor(output, "linear", "forward", tensor_name="output", layer_idx=0)
                found.append(torch.load(path, weights_only=True)["metadata"])
                output.sum().backward()
            run.step()
    assert [(m["iteration"], m["micro_batch"], m["sample_idx"], m["num_samples"]) for m in found] == [
        (0, 0, 0, 2), (0, 1, 2, 2), (1, 0, 4, 2), (1, 1, 6, 2),
    ]  # fmt: skip


def test_layout_by_iteration(train_plain, tmp_path):
    x = torch.randn(3, 4, requires_grad=True)
    train_plain(two_linears(), x, "none", tmp_path / "run", 10, iterations="0-1", layout="by_iteration")
    folders = {path.parent.name for path in (tmp_path / "run").rglob("*.pt")}
    assert folders == {"iter00000", "iter00001"}
    assert all(capture.path.exists() for capture in qcollect.open_run(tmp_path / "run"))


def test_manifest_lists_what_the_files_say(train_plain, tmp_path, read_files):
    train_plain(two_linears(), torch.randn(3, 4), "mxfp8", tmp_path / "run", 11, values="both")
    run = qcollect.open_run(tmp_path / "run")
    assert len({capture.key for capture in run}) == len(run) == 11
    for capture in run:
        assert capture.path.stat().st_size == capture.record.bytes
        content = torch.load(capture.path, weights_only=True)
        assert content["metadata"] == capture.metadata
        assert content["tensor_info"] == capture.tensor_info


def test_metrics_and_progress_are_written(tmp_path):
    model, x = two_linears(), torch.randn(3, 4)
    with qcollect.collect(model, "none", tmp_path / "run", 5) as run:
        assert step(run, model, x, loss=float("nan"), num_tokens=12)
    paths = RunPaths(tmp_path / "run")
    (line,) = [json.loads(line) for line in paths.metrics_path.read_text().splitlines()]
    assert (line["iteration"], line["loss"], line["num_tokens"]) == (0, "nan", 12)
    assert line["tokens_per_s"] == pytest.approx(12 / line["time_s"])
    progress = json.loads(paths.progress_path(0).read_text())
    assert progress["state"] == "done"
    assert (progress["captured"], progress["share"], progress["loss"]) == (5, 5, None)
    assert progress["pid"] == os.getpid()


def test_debug_prints_a_line_a_save(monkeypatch, capsys, train_plain, tmp_path):
    monkeypatch.setenv("QCOLLECT_LOG", "debug")
    train_plain(two_linears(), torch.randn(3, 4), "none", tmp_path / "run", 4, operations="forward")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    said = r"\[TensorSaver\] \S+_rank0_sample0_0_input\.pt: rank 0 sample 0 layer linear L0 forward pre input"
    assert any(re.fullmatch(said, line) for line in lines)
