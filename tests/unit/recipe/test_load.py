from collections.abc import Callable
from pathlib import Path

import pytest

from qcollect.errors import RecipeError
from qcollect.formats.catalog import QUANT_TYPES
from qcollect.recipe.load import load_recipe
from qcollect.recipe.overrides import Override
from qcollect.recipe.records import CaptureSpec, LaunchSpec, QuantSpec, Recipe, TrainSpec

Write = Callable[[str], str]
Refusals = Callable[..., list[str]]
CONFIG = "vocab_size: 32, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 4"
KNOWN_TYPES = ", ".join(sorted(QUANT_TYPES))
LAUNCH_KEYS = "nproc, gpu_ids, device, omp_num_threads, grace_s, max_time, max_bytes, stall_timeout_s, show_ranks"


def test_defaults_are_those_of_the_records(write_recipe: Write, minimal: str) -> None:
    recipe = load_recipe(write_recipe(minimal))
    assert recipe.train == TrainSpec()
    assert recipe.quant == QuantSpec()
    assert recipe.capture == CaptureSpec()
    assert recipe.launch == LaunchSpec()


def test_section_with_all_keys_commented_out_is_the_default(write_recipe: Write, minimal: str) -> None:
    assert load_recipe(write_recipe(f"{minimal}train:\n  # iterations: 3\n")).train == TrainSpec()


def test_numbers_are_taken_as_meant(write_recipe: Write, minimal: str) -> None:
    train = "train: {learning_rate: '1e-5', weight_decay: 0, iterations: 1e3, micro_batches: 2.0, loss_scale: 65536}\n"
    spec = load_recipe(write_recipe(minimal + train)).train
    assert (spec.learning_rate, spec.weight_decay, spec.iterations, spec.micro_batches) == (1e-5, 0.0, 1000, 2)
    assert [type(v) for v in (spec.weight_decay, spec.iterations, spec.loss_scale)] == [float, int, float]


def test_byte_order_mark_and_windows_lines_are_taken(tmp_path: Path, minimal: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + minimal.replace("\n", "\r\n").encode())
    assert load_recipe(path).data.sequence_length == 8


# -- what is refused, and how it is said ------------------------------------------------------


def test_unknown_key_names_file_line_and_the_known_ones(refusals: Refusals, minimal: str) -> None:
    assert refusals(f"{minimal}capture:\n  target: 5\n  layer: [3]\n") == [
        "r.yaml:5: unknown key 'capture.layer'; known: target, layers, modules, layer_types, operations, phases, "
        "tensor_names, iterations, ranks, samples, tokens, values, mode, shadow, layout, host_memory_gb, durability, "
        "on_error, storage, scales, compress, trigger, dedupe. "
        "Did you mean 'layers'?"
    ]


def test_unknown_section_is_refused(refusals: Refusals, minimal: str) -> None:
    assert refusals(f"{minimal}captures: {{}}\n") == [
        "r.yaml:3: unknown key 'captures'; known: description, script, model, data, train, quant, capture, launch. "
        "Did you mean 'capture'?"
    ]


def test_key_in_the_wrong_section_is_sent_to_the_right_one(refusals: Refusals, minimal: str) -> None:
    assert refusals(f"{minimal}target: 5\n") == [
        "r.yaml:3: unknown key 'target'; known: description, script, model, data, train, quant, capture, launch. "
        "Did you mean 'capture.target'?"
    ]


def test_misspelt_size_of_the_model_is_refused(refusals: Refusals) -> None:
    lines = refusals(f"model:\n  config: {{{CONFIG}, num_hidden_layer: 6}}\ndata: {{path: d, sequence_length: 8}}\n")
    assert len(lines) == 1
    assert lines[0].startswith("r.yaml:2: unknown key 'model.config.num_hidden_layer'; known: vocab_size, ")
    assert lines[0].endswith(" Did you mean 'num_hidden_layers'?")


def test_duplicate_key_names_both_lines(refusals: Refusals, minimal: str) -> None:
    assert refusals(f"{minimal}quant:\n  type: mxfp8\n  attention: none\n  type: mxfp4\n") == [
        "r.yaml:6: duplicate key 'quant.type', first on line 4"
    ]


def test_all_errors_are_listed_in_the_order_of_the_file_then_of_the_overrides(refusals: Refusals) -> None:
    text = (
        "model: {checkpoint: m, seed: -1}\n"
        "data:\n"
        "  sequence_length: long\n"
        "train:\n"
        "  iterations: 4\n"
        "  iterations: 0\n"
        "quant: {type: mxfp9}\n"
    )
    assert refusals(text, "capture.valuess=both", "capture.target=0") == [
        "r.yaml:1: model.seed is -1; must be at least 0",
        "r.yaml:2: data.path is missing",
        "r.yaml:3: data.sequence_length is 'long'; must be a whole number",
        "r.yaml:6: duplicate key 'train.iterations', first on line 5",
        "r.yaml:6: train.iterations is 0; must be at least 1",
        f"r.yaml:7: quant.type is 'mxfp9'; known: {KNOWN_TYPES}. Did you mean 'mxfp8'? See 'qcollect formats'.",
        "--set capture.valuess: unknown key; did you mean 'capture.values'?",
        "--set capture.target: capture.target is 0; must be at least 1",
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("train: {iterations: 2.5}", "train.iterations is 2.5; must be a whole number"),
        ("train: {iterations: '20'}", "train.iterations is '20'; must be a whole number"),
        ("train: {iterations: true}", "train.iterations is true; must be a whole number"),
        ("train: {iterations: null}", "train.iterations is null; must be a whole number"),
        ("train: {seed: 9223372036854775808}",
         "train.seed is 9223372036854775808; must be at most 9223372036854775807"),
        ("train: {learning_rate: fast}", "train.learning_rate is 'fast'; must be a number"),
        ("train: {learning_rate: .nan}", "train.learning_rate is '.nan'; must be a number"),
        ("train: {learning_rate: nan}", "train.learning_rate is 'nan'; must be a finite number"),
        ("train: {learning_rate: -1}", "train.learning_rate is -1; must be at least 0"),
        ("train: {grad_clip: 0}", "train.grad_clip is 0; must be above 0"),
        ("train: {deterministic: yes}", "train.deterministic is 'yes'; must be true or false"),
        ("train: {deterministic: 1}", "train.deterministic is 1; must be true or false"),
        ("train: {loss_scale: 3}", "train.loss_scale is 3; must be a power of two above 0, like 1, 1024 or 65536"),
        ("train: {loss_scale: -2}", "train.loss_scale is -2; must be a power of two above 0, like 1, 1024 or 65536"),
        ("train: {betas: 0.9}", "train.betas is 0.9; must be a list of two numbers"),
        ("train: {betas: [0.9, 1]}", "train.betas is [0.9, 1]; must be two numbers from 0 to below 1"),
        ("train: {compute: fp16}", "train.compute is 'fp16'; known: bf16, fp32."),
        ("launch: 5", f"launch is 5; must be a section with keys of: {LAUNCH_KEYS}"),
        ("launch: [a]",
         f"launch is ['a']; must be a section with keys of: {LAUNCH_KEYS}"),
        ("quant: {scale_rule: flor}",
         "quant.scale_rule is 'flor'; known: floor, ceil, even, rceil, nearest. Did you mean 'floor'?"),
        ("quant: {block_size: 0}", "quant.block_size is 0; must be a whole number, 1 or more, or two of them "
         "(rows and columns), like [16, 16]"),
        ("quant: {type: 8}", f"quant.type is 8; known: {KNOWN_TYPES}. See 'qcollect formats'."),
        ("quant: {types: []}", "quant.types is []; must name at least one quant type"),
        ("quant: {types: [mxfp8, mxfp8]}", "quant.types is ['mxfp8', 'mxfp8']; a quant type is named twice"),
        ("quant: {types: [mxfp8, mxfp5]}", "quant.types is ['mxfp8', 'mxfp5']; 'mxfp5' is not one; "
         f"known: {KNOWN_TYPES}. Did you mean 'mxfp8'? See 'qcollect formats'."),
        ("quant: {type: hifp8, scale_rule: even}", "quant.scale_rule is 'even', and hifp8 takes none; leave it out"),
        ("quant: {type: hifp8, rounding: nearest_even}", "quant.rounding is 'nearest_even', and hifp8 takes half_away, "
         "hybrid, stochastic"),
        ("quant: {type: bf16, block_size: 32}", "quant.block_size is 32, and bf16 has no blocks; leave it out"),
        ("quant: {overrides: {wgrad: {type: bf16, scale_rule: floor}}}",
         "quant.overrides.wgrad.scale_rule is 'floor', and bf16 takes none; leave it out"),
        ("quant: {overrides: {bprop: {}}}",
         "unknown key 'quant.overrides.bprop'; known: fprop, dgrad, wgrad. Did you mean 'fprop'?"),
        ("capture: {target: 0}", "capture.target is 0; must be at least 1"),
        ("capture: {target: '50'}", "capture.target is '50'; must be a whole number"),
        ("capture: {layers: 3-1}", "capture.layers is '3-1': '3-1' runs backwards; write 1-3"),
        ("capture: {layers: []}",
         "capture.layers is an empty list and selects nothing; leave it out for the default, or "
         "write an index (3), a range (0-3), every:N, spread:K, all, or a list of these"),
        ("capture: {ranks: first}", "capture.ranks is 'first': 'first' is not an index (3), a range (0-3), every:N, "
         "spread:K, all, or a list of these"),
        ("capture: {modules: []}", "capture.modules is []; it selects nothing; leave it out to select all"),
        ("capture: {modules: [3]}", "capture.modules is [3]; must be a list of texts"),
        ("capture: {operations: sideways}",
         "capture.operations: 'sideways' matches nothing; there are: forward, backward"),
        ("capture: {tensor_names: [querry]}",
         "capture.tensor_names: 'querry' matches nothing; did you mean 'query' or 'grad_query'?"),
        ("capture: {mode: stats, target: 9}", "capture.target is 9, and capture.mode stats takes everything its "
         "selectors leave; leave it out (capture.target=null), and bound the run by train.iterations"),
        ("capture: {mode: stats, scales: true}",
         "capture.scales is True, and with capture.mode stats no file has it; leave it out"),
        ("capture: {mode: stats, durability: file}",
         "capture.durability is 'file', and with capture.mode stats there are no files; use none or all"),
        ("capture: {mode: stats, shadow: [mxfp4, mxfp4]}",
         "capture.shadow is ['mxfp4', 'mxfp4']; a quant type is named twice"),
        ("capture: {mode: stats, shadow: none}", "capture.shadow names none, which quantizes nothing; leave it out"),
        ("capture: {shadow: mxfp4}", "capture.shadow is mxfp4, and shadow types are measured with capture.mode stats "
         "only; set it, or leave them out"),
        ("capture: {mode: stats, values: original, shadow: mxfp4}", "capture.shadow is mxfp4, and capture.values "
         "'original' measures no errors; set capture.values to quantized or both"),
        ("capture: {mode: all}", "capture.mode is 'all'; known: tensors, stats."),
        ("capture: {tokens: 4-9}",
         "capture.tokens is '4-9': index 8 does not exist, there are 8 (0-7); see data.sequence_length"),
        ("capture: {tokens: half}", "capture.tokens is 'half': 'half' is not an index (3), a range (0-3), every:N, "
         "spread:K, all, or a list of these"),
        ("capture: {storage: bits}", "capture.storage is 'bits'; known: values, codes."),
        ("capture: {storage: codes}",
         "capture.storage is 'codes', and with capture.values 'original' nothing that has codes is captured; "
         "set capture.values to quantized or both"),
        ("capture: {compress: gzip}", "capture.compress is 'gzip'; known: none, zstd."),
        ("capture: {scales: 1}", "capture.scales is 1; must be true or false"),
        ("capture: {iterations: [1000]}",
         "capture.iterations is [1000]: index 1000 does not exist, there are 1000 (0-999); see train.iterations"),
        ("launch: {nproc: 0}", "launch.nproc is 0; must be at least 1"),
        ("launch: {gpu_ids: [0, 0]}", "launch.gpu_ids is [0, 0]; a device is named twice"),
        ("launch: {gpu_ids: []}", "launch.gpu_ids is []; must be a list of device indices or UUIDs, like [0, 2]"),
        ("launch: {gpu_ids: [-1]}", "launch.gpu_ids is [-1]; must be a list of device indices or UUIDs, like [0, 2]"),
        ("launch: {device: gpu}", "launch.device is 'gpu'; known: auto, cpu, cuda."),
        ("launch: {grace_s: 0}", "launch.grace_s is 0; must be above 0"),
        ("launch: {port: 5}", f"unknown key 'launch.port'; known: {LAUNCH_KEYS}."),
        ("launch: {stall_timeout_s: 0}", "launch.stall_timeout_s is 0; must be above 0"),
        ("launch: {max_time: soon}",
         "launch.max_time is 'soon'; must be a duration, like 90 (seconds), 45m, 1h30m or 01:30:00"),
        ("launch: {max_time: 0}", "launch.max_time is 0; must be a duration above 0"),
        ("launch: {max_time: ''}",
         "launch.max_time is ''; must be a duration, like 90 (seconds), 45m, 1h30m or 01:30:00"),
        ("launch: {max_bytes: 5 apples}",
         "launch.max_bytes is '5 apples'; must be a size, like 500000000 (bytes), 20GB or 20GiB"),
        ("launch: {max_bytes: true}",
         "launch.max_bytes is true; must be a size, like 500000000 (bytes), 20GB or 20GiB"),
        ("launch: {max_bytes: 0}", "launch.max_bytes is 0; must be a size above 0"),
        ("launch: {show_ranks: first}",
         "launch.show_ranks is 'first': 'first' is not an index (3), a range (0-3), every:N, spread:K, all, "
         "or a list of these"),
        ("script: [a]", "script is ['a']; must be a path (text)"),
        ("script: ~/train.py", "script is '~/train.py'; '~' is not expanded; write the whole path"),
        ("description: 5", "description is 5; must be text"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_with_line_key_and_what_it_must_be(
    section: str, message: str, refusals: Refusals, minimal: str
) -> None:
    assert refusals(f"{minimal}{section}\n") == [f"r.yaml:3: {message}"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("seed: 1", "model needs one of checkpoint (a model folder) and config (random weights of a shape)"),
        (
            f"checkpoint: m, config: {{{CONFIG}}}",
            "model has both checkpoint and config, and needs exactly one; "
            "take the other out (--set model.config=null or --set model.checkpoint=null)",
        ),
        ("config: 3", "model.config is 3; must be a section with keys of: vocab_size, "),
        (f"config: {{{CONFIG}, hidden_size: 65}}", "duplicate key 'model.config.hidden_size', first on line 1"),
        (
            f"config: {{{CONFIG}, num_key_value_heads: 3}}",
            "model.config.num_key_value_heads is 3; must divide num_attention_heads (4)",
        ),
        (
            f"config: {{{CONFIG}, rope_parameters: {{rope_type: llama3, factor: 32}}}}",
            "model.config.rope_parameters: rope_type llama3 needs "
            "low_freq_factor, high_freq_factor, original_max_position_embeddings too",
        ),
        ("checkpoint: m, architecture: gpt2", "model.architecture is 'gpt2'; known: llama."),
        ("checkpoint: ''", "model.checkpoint is ''; must be a path (text)"),
    ],
)
def test_model_section_is_checked(model: str, message: str, refusals: Refusals) -> None:
    lines = refusals(f"model: {{{model}}}\ndata: {{path: d, sequence_length: 8}}\n")
    assert lines[0].startswith(f"r.yaml:1: {message}")


def test_hidden_size_must_be_a_multiple_of_the_heads(refusals: Refusals) -> None:
    text = f"model: {{config: {{{CONFIG}}}}}\ndata: {{path: d, sequence_length: 8}}\n"
    assert refusals(text, "model.config.hidden_size=66") == [
        "--set model.config.hidden_size: model.config.hidden_size is 66; must be a multiple of num_attention_heads (4)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: is empty; 'qcollect recipes show tiny' prints one to begin with"),
        ("# nothing\n", "r.yaml: is empty; 'qcollect recipes show tiny' prints one to begin with"),
        ("- a\n", "r.yaml: a recipe is a mapping (model: ..., data: ...), and this is a list"),
        ("hello\n", "r.yaml: a recipe is a mapping (model: ..., data: ...), and this is a single value"),
        ("model: {\n", "r.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
    ],
)
def test_file_that_is_no_mapping_is_refused(text: str, message: str, refusals: Refusals) -> None:
    assert refusals(text) == [message]


def test_file_that_is_not_utf8_is_refused_with_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"a: 1\nb: caf\xe9\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}:2: is not UTF-8 text (byte 0xe9)"


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)


def test_markup_and_control_characters_in_values_are_shown_verbatim(refusals: Refusals, minimal: str) -> None:
    assert refusals(f'{minimal}train: {{compute: "[/bold] \\e[2J"}}\n') == [
        "r.yaml:3: train.compute is '[/bold] \\x1b[2J'; known: bf16, fp32."
    ]


# -- overrides --------------------------------------------------------------------------------


def load_with(write_recipe: Write, *overrides: str | Override) -> Recipe:
    text = "model: {checkpoint: m}\ndata: {path: d, sequence_length: 8}\ncapture: {target: 7, values: both}\n"
    return load_recipe(write_recipe(text), overrides)


def test_recipe_wins_over_default_and_override_over_recipe_and_the_last_override_over_all(write_recipe: Write) -> None:
    assert load_with(write_recipe).capture.target == 7
    assert load_with(write_recipe, "capture.target=8").capture.target == 8
    recipe = load_with(
        write_recipe, "capture.target=8", Override(key="capture.target", value=9, origin="--target"), "quant.type=mxfp4"
    )
    assert (recipe.capture.target, recipe.capture.values, recipe.quant.type) == (9, "both", "mxfp4")


def test_override_with_a_name_of_its_own_is_called_by_it(write_recipe: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        load_with(write_recipe, Override(key="capture.target", value=0, origin="--target"))
    assert str(caught.value) == "--target: capture.target is 0; must be at least 1"


def test_override_values_are_read_as_yaml(write_recipe: Write) -> None:
    recipe = load_with(
        write_recipe,
        "train.learning_rate=1e-4",
        "train.deterministic=false",
        "train.grad_clip=null",
        "capture.layers=[0, 2]",
        "capture.iterations=0,5-7",
        "capture.modules=*.q_proj,*.k_proj",
        "quant.overrides.dgrad={type: mxfp8_e5m2}",
        "launch.gpu_ids=0,2",
    )
    assert recipe.train.learning_rate == 1e-4
    assert (recipe.train.deterministic, recipe.train.grad_clip) == (False, None)
    assert (recipe.capture.layers, recipe.capture.iterations) == ((0, 2), "0,5-7")
    assert recipe.capture.modules == ("*.q_proj", "*.k_proj")
    assert recipe.quant.overrides == {"dgrad": {"type": "mxfp8_e5m2"}}
    assert recipe.launch.gpu_ids == ("0", "2")


def test_override_of_a_section_replaces_it(write_recipe: Write) -> None:
    capture = load_with(write_recipe, "capture={target: 3}").capture
    assert (capture.target, capture.chosen_values) == (3, "original")


def test_checkpoint_is_exchanged_for_random_weights_by_overrides(write_recipe: Write) -> None:
    model = load_with(write_recipe, "model.checkpoint=null", f"model.config={{{CONFIG}}}").model
    assert model.checkpoint is None
    assert model.config is not None
    assert model.config["hidden_size"] == 64


def test_path_in_an_override_is_taken_as_it_stands(write_recipe: Write) -> None:
    path = '/tmp/my runs/été "x" $HOME;ls/ #1: {a}'
    assert load_with(write_recipe, f"model.checkpoint={path}").model.checkpoint == path
    assert load_with(write_recipe, "data.path=@home=1").data.path == (str(Path.cwd() / "@home=1"),)
    assert load_with(write_recipe, "data.path=['a b', c]").data.path == (
        str(Path("a b").resolve()),
        str(Path("c").resolve()),
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture.valuess=both", "--set capture.valuess: unknown key; did you mean 'capture.values'?"),
        ("trian.seed=3", "--set trian.seed: unknown key; did you mean 'train.seed'?"),
        (
            "iterations=3",
            "--set iterations: unknown key; did you mean 'train.iterations' or 'capture.iterations' or "
            "'capture.trigger.iterations'?",
        ),
        ("lunch.nproc=3", "--set lunch.nproc: unknown key; did you mean 'launch.nproc'?"),
        ("zzz=1", "--set zzz: unknown key; known: description, script, model, data, train, quant, capture, launch"),
        ("launch.zzz=1",
         "--set launch.zzz: unknown key; known in launch: nproc, gpu_ids, "),
        ("launch.nproc.x.y.z=1", "--set launch.nproc.x.y.z: unknown key; "),
        ("launch.=1", "--set launch.: unknown key; "),
        ("capture.target", "--set 'capture.target': must be key=value, like capture.target=100"),
        ("=3", "--set '=3': must be key=value, like capture.target=100"),
        ("capture.target=[1", "--set capture.target: not valid YAML: "),
        ("train.iterations=", "--set train.iterations: train.iterations is null; must be a whole number"),
        ("capture={target: 1, target: 2}", "--set capture: duplicate key 'target', first on line 1"),
        ("capture.values=bth",
         "--set capture.values: capture.values is 'bth'; known: original, quantized, both. Did you mean 'both'?"),
    ],
)  # fmt: skip
def test_wrong_override_is_refused(override: str, message: str, write_recipe: Write) -> None:
    with pytest.raises(RecipeError) as caught:
        load_with(write_recipe, override)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(message)


# -- paths ------------------------------------------------------------------------------------


def test_paths_are_relative_to_the_current_directory_wherever_the_recipe_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimal: str
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.yaml").write_text(f"{minimal}script: ./train.py\n")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/r.yaml", ["model.tokenizer=../tok", "data.tokenizer=bytes"])
    assert recipe.model.checkpoint == str(tmp_path / "m")
    assert recipe.model.tokenizer == f"{tmp_path}/../tok"
    assert recipe.data.path == (str(tmp_path / "d"),)
    assert recipe.data.tokenizer == "bytes"
    assert recipe.script == str(tmp_path / "train.py")
    assert recipe.path == str(tmp_path / "recipes" / "r.yaml")
    assert recipe.name == "r"


def test_recipe_dir_at_the_beginning_is_the_folder_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r.yaml").write_text(
        "model: {checkpoint: $RECIPE_DIR/m}\n"
        "data: {path: [$RECIPE_DIR, x/$RECIPE_DIR/y, $RECIPE_DIRS/z, $HOME/w], sequence_length: 8}\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipes/r.yaml", ["script=$RECIPE_DIR/mine.py"])
    assert recipe.model.checkpoint == str(tmp_path / "recipes" / "m")
    assert recipe.script == str(tmp_path / "recipes" / "mine.py")
    assert recipe.data.path == (
        str(tmp_path / "recipes"),
        f"{tmp_path}/x/$RECIPE_DIR/y",
        f"{tmp_path}/$RECIPE_DIRS/z",
        f"{tmp_path}/$HOME/w",
    )


def test_recipe_in_a_folder_with_odd_characters_loads(tmp_path: Path, minimal: str) -> None:
    folder = tmp_path / 'été "x" $HOME;ls [red]'
    folder.mkdir()
    (folder / "-n.yaml").write_text(minimal)
    assert load_recipe(folder / "-n.yaml").path == str(folder / "-n.yaml")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("0.5", 0.5), ("45m", 2700), ("1h30m", 5400), ("1h 30m 5s", 5405), ("2d", 172800),
     ("'01:30:00'", 5400), ("01:30:00", 5400)],
)  # fmt: skip
def test_durations_are_seconds(write_recipe: Write, minimal: str, text: str, seconds: float) -> None:
    recipe = load_recipe(write_recipe(f"{minimal}\nlaunch: {{max_time: {text}}}"))
    assert recipe.launch.max_time == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("2k", 2000), ("1.5MB", 1_500_000), ("20GB", 20 * 10**9), ("20 GiB", 20 << 30), ("1TiB", 1 << 40)],
)
def test_sizes_are_bytes(write_recipe: Write, minimal: str, text: str, num_bytes: int) -> None:
    recipe = load_recipe(write_recipe(f"{minimal}\nlaunch: {{max_bytes: {text}}}"))
    assert recipe.launch.max_bytes == num_bytes


@pytest.mark.parametrize(("text", "ranks"), [("0", (0,)), ("[0, 3]", (0, 3)), ("'0,3'", "0,3"), ("all", "all")])
def test_ranks_to_show_are_a_selector(write_recipe: Write, minimal: str, text: str, ranks: object) -> None:
    assert load_recipe(write_recipe(f"{minimal}\nlaunch: {{show_ranks: {text}}}")).launch.show_ranks == ranks
