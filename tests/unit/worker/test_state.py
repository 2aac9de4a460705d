import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qcollect.errors import UsageError
from qcollect.vocab import RankInfo
from qcollect.worker import state
from qcollect.worker.collector import seat
from qcollect.worker.state import STATE, TensorCollectionState, detect_rank, find_rank


@pytest.fixture
def set_env(monkeypatch):
    def set_env(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_env


def on_card(index):
    """Looks like a tensor on the accelerator with this index."""
    return SimpleNamespace(device=torch.device("cuda", index))


def test_process_group_comes_before_the_environment(set_env, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    set_env(RANK=2, LOCAL_RANK=1, WORLD_SIZE=4)
    assert detect_rank(on_card(3)) == RankInfo(rank=5, local_rank=1, world_size=8, source="torch.distributed")


def test_rank_comes_before_local_rank(set_env):
    set_env(RANK=10, LOCAL_RANK=2, WORLD_SIZE=16)
    assert detect_rank(on_card(3)) == RankInfo(rank=10, local_rank=2, world_size=16, source="RANK")


def test_local_rank_comes_before_the_device(set_env):
    set_env(LOCAL_RANK=2)
    assert detect_rank(on_card(3)) == RankInfo(rank=2, local_rank=2, world_size=1, source="LOCAL_RANK")


def test_device_index_comes_before_the_default():
    assert detect_rank(on_card(3)) == RankInfo(rank=3, local_rank=3, world_size=1, source="device")
    assert find_rank(torch.zeros(1)) is None


def test_default_is_rank_0_with_one_warning(monkeypatch):
    monkeypatch.setattr(state, "_warned_default_rank", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [detect_rank(torch.zeros(1)).rank for _ in range(3)] == [0, 0, 0]
    assert [str(w.message) for w in caught] == [
        "qcollect: no rank found (not set by hand, no torch.distributed, RANK or LOCAL_RANK); using rank 0"
    ]


@pytest.mark.parametrize("text", ["", "abc", "1.5"])
def test_rank_that_is_no_number_is_none(set_env, monkeypatch, text):
    set_env(RANK=text, LOCAL_RANK=4)
    assert detect_rank().source == "LOCAL_RANK"


def test_rank_by_hand_comes_before_all(set_env):
    set_env(RANK=1)
    STATE.current_rank = 9
    assert STATE.rank(on_card(3)) == 9


def test_process_alone_takes_the_first_seat_whatever_its_number():
    assert seat(RankInfo(rank=3, local_rank=3, world_size=1, source="device")) == 0
    assert seat(RankInfo(rank=3, local_rank=1, world_size=4)) == 3
    with pytest.raises(UsageError) as error:
        seat(RankInfo(rank=4, local_rank=0, world_size=4, source="RANK"))
    assert str(error.value) == "rank 4 (RANK) is beyond WORLD_SIZE 4; set both or neither"


def test_sample_and_iteration_by_hand_then_tracked_then_environment_then_0(set_env):
    collection = TensorCollectionState()
    assert (collection.sample_idx(), collection.iteration()) == (0, 0)
    set_env(CURRENT_SAMPLE_IDX=4, TENSOR_SAVER_ITERATION=6)
    assert (collection.sample_idx(), collection.iteration()) == (4, 6)
    collection.track(sample_idx=8, iteration=9)
    assert (collection.sample_idx(), collection.iteration()) == (8, 9)
    collection.current_sample_idx, collection.current_iteration = 0, 1
    assert (collection.sample_idx(), collection.iteration()) == (0, 1)
    collection.clear()
    assert (collection.sample_idx(), collection.iteration()) == (4, 6)
