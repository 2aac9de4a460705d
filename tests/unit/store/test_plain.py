import enum
import json
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from qcollect.store.capture import plain


class Word(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2.5, 2.5),
        ("text", "text"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ((1, (2, 3)), [1, [2, 3]]),
        (torch.Size([2, 3]), [2, 3]),
        ({1}, [1]),
        ({"a": (1,), 2: None}, {"a": [1], "2": None}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (torch.float32, "torch.float32"),
        (torch.device("cuda", 1), "cuda:1"),
        (Path("/a/b"), "/a/b"),
        (Word.A, "a"),
        (Number.ONE, 1),
        (Text("text"), "text"),
        (torch.tensor([[1.0, math.inf]]), [[1.0, "inf"]]),
        (torch.tensor(3), 3),
        (torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
        (np.float32(1.5), 1.5),
        (np.float64(math.nan), "nan"),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (3 + 4j, "(3+4j)"),
        (b"raw", "b'raw'"),
    ],
    ids=repr,
)
def test_values_become_plain(value, expected):
    converted = plain(value)
    assert converted == expected
    assert type(converted) in (str, int, float, bool, type(None), list, dict)
    json.dumps(converted, allow_nan=False)


def test_everything_inside_is_exactly_a_builtin():
    converted = plain({Word.A: [Number.ONE, Text("t"), {"x": np.float64(1.0)}, (torch.Size([1]),)]})
    (key, items), *_ = converted.items()
    assert type(key) is str
    assert [type(item) for item in items] == [int, str, dict, list]
    assert type(items[2]["x"]) is float


def test_plain_values_load_with_weights_only(tmp_path):
    metadata = plain({"shape": torch.Size([1]), "dtype": torch.float8_e4m3fn, "word": Word.A, "n": np.float64(1)})
    torch.save(metadata, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {
        "shape": [1], "dtype": "torch.float8_e4m3fn", "word": "a", "n": 1.0,
    }  # fmt: skip
