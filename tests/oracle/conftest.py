"""What the oracles share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quantization_paths import taking
from torch import Tensor

from qcollect.formats.quantizer import fake_quantize as public_call

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without their folder: for what they share


@pytest.fixture
def fake_quantize(request: pytest.FixtureRequest, cache_dir: Path) -> Callable[..., Tensor]:
    """The public call by one path, that of the test's parameter, else plain torch's; another one fails the test."""
    path = getattr(request, "param", "eager")

    def call(x: Tensor, *arguments: object, **settings: object) -> Tensor:
        with taking(path, cache_dir) as asked:
            y = public_call(x, *arguments, **settings)  # type: ignore[arg-type]
        assert asked, f"{path} was not asked for"
        return y

    return call
