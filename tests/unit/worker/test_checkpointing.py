"""Activation checkpointing runs forwards again in backward (pytorch/pytorch issue 81296): still one record a key."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])
VOLATILE = ("save_time", "run_id")
# facts of the graph: reentrant checkpointing runs the first pass without one
GRAPH_FACTS = ("requires_grad", "is_leaf")


def assert_same_files(files, expected, *, but_for=()):
    assert files.keys() == expected.keys()
    for key, content in files.items():
        assert torch.equal(content["tensor"], expected[key]["tensor"]), key
        for part, left_out in (("metadata", VOLATILE), ("tensor_info", but_for)):
            a, b = ({k: v for k, v in c[part].items() if k not in left_out} for c in (content, expected[key]))
            assert a == b, key


def names(run_dir):
    return sorted(path.name[16:] for path in run_dir.glob("*.pt"))  # without the time


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.seq(x)
        return checkpoint(self.seq, x, use_reentrant=self.use_reentrant)


@KINDS
@pytest.mark.parametrize(("values", "target"), [("original", 12), ("both", 24)])
def test_plain_checkpoint_gives_the_same_files(train_plain, read_files, tmp_path, use_reentrant, values, target):
    x = torch.randn(3, 4, requires_grad=True)
    for name, kind in (("plain", None), ("checkpointed", use_reentrant)):
        run = train_plain(Checkpointed(kind), x, "mxfp8", tmp_path / name, target, values=values)
        assert run.iteration == 1
    assert_same_files(
        read_files(tmp_path / "checkpointed"),
        read_files(tmp_path / "plain"),
        but_for=GRAPH_FACTS if use_reentrant else (),
    )
    assert len(names(tmp_path / "plain")) == target
    assert names(tmp_path / "checkpointed") == names(tmp_path / "plain")


@KINDS
def test_cut_group_is_cut_at_the_same_place(train_plain, read_files, tmp_path, use_reentrant):
    """A count reached early by the second firing would leave other files."""
    x = torch.randn(3, 4, requires_grad=True)
    for name, kind in (("plain", None), ("checkpointed", use_reentrant)):
        train_plain(Checkpointed(kind), x, "none", tmp_path / name, 17, iterations="0-1")
    assert names(tmp_path / "checkpointed") == names(tmp_path / "plain")
    assert len(read_files(tmp_path / "checkpointed")) == 17


@KINDS
def test_llama_with_gradient_checkpointing_gives_the_same_files(
    make_llama, tokens, train_llama, read_files, tmp_path, use_reentrant
):
    for name in ("plain", "checkpointed"):
        model = make_llama(num_hidden_layers=2)
        if name == "checkpointed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        run = train_llama(model, tokens(2, 6), "mxfp8", tmp_path / name, 2 * 95, values="both")
        assert run.iteration == 1
    assert_same_files(
        read_files(tmp_path / "checkpointed"),
        read_files(tmp_path / "plain"),
        but_for=GRAPH_FACTS if use_reentrant else (),
    )
    assert names(tmp_path / "checkpointed") == names(tmp_path / "plain")


def test_frozen_weight_under_reentrant_checkpointing_has_no_wgrad(train_plain, read_first, tmp_path):
    model = Checkpointed(True)
    model.seq[0].weight.requires_grad_(False)
    train_plain(model, torch.randn(3, 4, requires_grad=True), "mxfp8", tmp_path / "run", 11)
    files = read_first(tmp_path / "run")
    assert ("0", "grad_weight", None) not in files
    assert [c["gemm"] for c in files["0", "input", None]["metadata"]["consumers"]] == ["fprop"]
    assert [c["gemm"] for c in files["0", "weight", None]["metadata"]["consumers"]] == ["fprop", "dgrad"]


def test_wrapper_of_checkpointing_leaves_no_trace_in_the_names(train_plain, read_files, tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))))
    train_plain(model, torch.randn(3, 4, requires_grad=True), "none", tmp_path / "run", 12, modules=["0.*"])
    assert {key[0] for key in read_files(tmp_path / "run")} == {"0.0", "0.2"}
