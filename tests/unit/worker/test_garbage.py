"""Objects from before training are left out of garbage collections while a collector is there."""

import gc
import weakref

import pytest
import torch
from torch import nn

import qcollect

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Node:
    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()  # as it was


def collect(out_dir):
    return qcollect.collect(nn.Linear(2, 2), "none", out_dir, 1)


def test_full_collections_find_what_is_new_and_look_at_nothing_else(tmp_path):
    before, num_before = Node(), len(gc.get_objects())
    with collect(tmp_path):
        assert gc.get_freeze_count() > num_before / 2
        assert len(gc.get_objects()) < num_before / 10
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        old = weakref.ref(before)
        del before
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_an_error_in_training_thaws_too(tmp_path):
    with pytest.raises(RuntimeError), collect(tmp_path):
        raise RuntimeError
    assert gc.get_freeze_count() == 0


def test_what_a_script_froze_stays_frozen(tmp_path):
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    with collect(tmp_path):
        assert num_frozen - 1000 < gc.get_freeze_count() <= num_frozen  # a few have gone
    assert num_frozen - 1000 < gc.get_freeze_count() <= num_frozen


def test_a_script_that_collects_by_itself_is_let_alone(tmp_path):
    gc.disable()
    with collect(tmp_path):
        assert gc.get_freeze_count() == 0
        assert not gc.isenabled()


def test_the_target_thaws_while_training_goes_on(tmp_path):
    model = nn.Linear(2, 2)
    with qcollect.collect(model, "none", tmp_path, 2) as run:
        assert gc.get_freeze_count()
        model(torch.ones(1, 2)).sum().backward()
        assert run.step()
        assert gc.get_freeze_count() == 0


def test_nothing_is_frozen_where_nothing_is_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "false")
    with collect(tmp_path):
        assert gc.get_freeze_count() == 0
