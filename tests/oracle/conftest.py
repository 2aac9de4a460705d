"""The ways of computing a format that every oracle is held against."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from qcollect.formats import quantizer

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without their folder: for what they share

# Each takes the arguments of ``quantizer.fake_quantize``. One that cannot run here calls ``pytest.skip`` itself.
BACKENDS: dict[str, Callable[..., Tensor]] = {
    "eager": quantizer.fake_quantize,
}


@pytest.fixture(params=BACKENDS)
def fake_quantize(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """``fake_quantize``, by every backend."""
    return BACKENDS[request.param]
