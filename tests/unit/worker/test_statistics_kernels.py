"""Mode stats as on a CUDA device, with the CPU in the device's place and the kernels in Triton's interpreter."""

import json
from contextlib import nullcontext

import pytest
import torch
from interpreted import interpret, why_not_interpreted

import qcollect
from qcollect.formats import backends, triton_counts
from qcollect.store import summary_cuda
from qcollect.worker.statistics import StatisticsSink
from qcollect.worker.write_lines import LineProcess

if why_not_interpreted():
    pytest.skip(why_not_interpreted(), allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Stream:
    def __init__(self, device=None):
        pass

    def wait_stream(self, stream):
        pass


class Event:
    def __init__(self, blocking=False):
        pass

    def record(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def device(monkeypatch):
    """From now on every tensor is on a device."""
    interpret(monkeypatch)
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "default_stream": lambda device: Stream(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "current_device": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(backends, "_is_on_cpu", lambda x: False)
    monkeypatch.setattr(summary_cuda, "supports", lambda tensor: tensor.dtype in summary_cuda._DTYPES)
    monkeypatch.setattr("qcollect.worker.measured_sites.has_kernel", lambda tensor: True)
    opened = StatisticsSink.open

    def open_on_device(self, device, dtypes):
        opened(self, device, dtypes)
        self._stream = Stream()
        self._writer._process = LineProcess(self._manifest, goes_on=False)

    monkeypatch.setattr(StatisticsSink, "open", open_on_device)


@pytest.fixture
def train(make_llama, tokens, tmp_path):
    def train(name, quant_type, **settings):
        model = make_llama(dtype=torch.bfloat16, num_hidden_layers=1)
        ids = tokens(2, 6)
        settings |= {"mode": "stats", "num_iterations": 2, "modules": ["*q_proj", "*self_attn"]}
        with qcollect.collect(model, quant_type, tmp_path / name, **settings) as run:
            for _ in range(2):  # nothing is known, then all is
                model(input_ids=ids, labels=ids).loss.backward()
                model.zero_grad()
                run.step()
        assert run.sink.counts.num_written == run.num_captured
        (manifest,) = (tmp_path / name).glob(".qcollect/manifest/*.jsonl")
        lines = [json.loads(line) for line in manifest.read_text().splitlines()]
        return {json.dumps([line["metadata"][k] for k in KEY] + gemms(line)): line for line in lines}

    return train


KEY = ("iteration", "module", "tensor_name", "operation", "phase")


def gemms(line):
    return [consumer["gemm"] for consumer in line["metadata"]["consumers"]]


def is_close(found, expected):
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_close(found[k], expected[k]) for k in expected)
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-6, abs=1e-12)
    return found == expected


@pytest.mark.parametrize(("quant_type", "shadow"), [("mxfp8", ["mxfp4", "hifp8"]), ("nvfp4", [])])
def test_lines_are_those_of_plain_torch(train, request, quant_type, shadow, monkeypatch):
    expected = train("plain", quant_type, shadow=shadow)
    request.getfixturevalue("device")
    known = []
    for name in ("consume_known", "consume_both_known", "_consume_at_once"):
        asked = getattr(StatisticsSink, name)

        def ask(self, *args, asked=asked, name=name):
            found = asked(self, *args)
            known.append((name, found is not None))
            return found

        monkeypatch.setattr(StatisticsSink, name, ask)
    counted = []
    for kind in (triton_counts.PreparedCount, triton_counts.PreparedPair):

        def count(self, *args, kind=kind, count=kind.__call__):
            counted.append(kind)
            return count(self, *args)

        monkeypatch.setattr(kind, "__call__", count)
    found = train("kernels", quant_type, shadow=shadow)
    assert found.keys() == expected.keys() and len(found) == 2 * 23
    for key, line in expected.items():
        assert is_close(found[key]["tensor_info"], line["tensor_info"]), key
        assert is_close(found[key].get("errors"), line.get("errors")), key
    # a gradient's two orientations by one launch, unless a scale is left for the gemm's result
    first, second = known[: len(known) // 2], known[len(known) // 2 :]
    if quant_type == "mxfp8":
        assert first.count(("_consume_at_once", True)) == 1 and ("_consume_at_once", True) not in second
        # query, key and value of heads among them, which do not lie side by side
        assert second.count(("consume_known", True)) == 7 and second.count(("consume_both_known", True)) == 1
        # by mxfp4 a tensor is counted along both axes at once, by hifp8 it is the same along either
        assert counted.count(triton_counts.PreparedPair) == 1 + 3
        assert counted.count(triton_counts.PreparedCount) == (4 + 3) + 3 + (3 + 3)
    else:
        assert not any(is_known for _, is_known in known)
