import pytest
import torch

from qcollect import tensor_saver
from qcollect.worker import state

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "CUSTOM_QUANT_TYPE",
    "TENSOR_SAVE_DIR",
    "TENSOR_SAVE_ENABLED",
    "TENSOR_SAVER_ITERATION",
    "CURRENT_SAMPLE_IDX",
    "QCOLLECT_LOG",
)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch, tmp_path):
    """As in a process that has saved nothing yet, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(state, "_warned_default_rank", True)
    monkeypatch.setattr(tensor_saver, "_saver", None)
    state.STATE.clear()
    torch.set_num_threads(1)
    yield
    state.STATE.clear()
