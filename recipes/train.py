"""Train the recipe's causal LM: plain transformers, AdamW on fp32 master weights, any number of ranks.

The launcher runs this file in every rank. It holds no line about number formats or capture but the
``collect`` context and its ``step``; take it as the pattern for a script of your own
(``--set script=my_train.py``).
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import qcollect
from qcollect.plan.record import Plan
from qcollect.recipe.records import Recipe
from qcollect.worker.dataset import make_batches
from qcollect.worker.model import build_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MasterWeights:
    """fp32 copies of a model's weights, which the optimizer works on, and their fp32 gradients.

    A micro-batch's gradients are added up in fp32 and reduced over ranks in fp32; the weights the
    network computes with are rounded from the masters after each step.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        masters = [p.detach().float().clone() for p in model.parameters() if p.requires_grad]
        for parameter in model.parameters():  # not buffers: in bf16 the rotary frequencies would be off by up to 0.4 %
            parameter.data = parameter.data.to(compute_dtype)
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(m) for m in masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def accumulate(self) -> None:
        """Add the weights' gradients to the masters' and drop them."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                master.grad.add_(weight.grad.float())
                weight.grad = None

    def reduce(self, divisor: float) -> None:
        """Sum the masters' gradients over ranks and divide them."""
        for master in self.masters:
            if dist.is_initialized():
                dist.all_reduce(master.grad)
            master.grad.div_(divisor)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights and zero the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad.zero_()


class NoCapture:
    """What ``collect`` gives, without any of it: the same training by itself."""

    def __enter__(self) -> "NoCapture":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, **_: float) -> bool:
        return False


def train(
    recipe: Recipe,
    model: nn.Module,
    batches: Any,
    *,
    world_size: int = 1,
    num_iterations: int | None = None,
    attach: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: NoCapture(),
) -> list[float]:
    """Train ``model`` in place; the loss of each iteration, averaged over micro-batches and ranks.

    Ends after ``num_iterations`` (None: the recipe's), or when ``step`` says so.
    """
    spec = recipe.train
    device = next(model.parameters()).device
    torch.manual_seed(spec.seed)
    masters = MasterWeights(model, DTYPES[spec.compute])
    optimizer = torch.optim.AdamW(
        masters.masters, lr=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay
    )
    enable_checkpointing(model, spec.activation_checkpointing)
    losses: list[float] = []
    with attach(model) as run:
        for iteration in range(spec.iterations if num_iterations is None else num_iterations):
            total = torch.zeros((), device=device)
            num_tokens = 0
            for micro_batch in range(spec.micro_batches):
                batch = batches.batch(iteration, micro_batch)
                mask = batch.attention_mask
                loss = model(
                    input_ids=batch.input_ids.to(device),
                    attention_mask=None if mask is None else mask.to(device),
                    labels=batch.labels.to(device),
                ).loss
                (loss * spec.loss_scale).backward()
                masters.accumulate()
                total += loss.detach().float() / spec.micro_batches
                num_tokens += batch.input_ids.numel()
            masters.reduce(spec.loss_scale * spec.micro_batches * world_size)
            grad_norm = nn.utils.clip_grad_norm_(masters.masters, spec.grad_clip or math.inf)
            optimizer.step()
            masters.publish()
            if dist.is_initialized():
                dist.all_reduce(total)
            losses.append(total.item() / world_size)
            print(f"iteration {iteration}: loss {losses[-1]:.6f}, gradient norm {grad_norm.item():.4f}", flush=True)
            metrics = {"loss": losses[-1], "grad_norm": grad_norm.item(), "num_tokens": num_tokens * world_size}
            if run.step(**metrics, learning_rate=spec.learning_rate):
                break
    return losses


def enable_checkpointing(model: nn.Module, kind: str) -> None:
    if kind != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})


def init_ranks(device_type: str, stall_timeout_s: float | None = None) -> tuple[int, int, torch.device]:
    """(rank, world size, device) of this process; a process group when there is more than one."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(local_rank)
    if world_size > 1:
        backend = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
        # the launcher notices a stuck collective first and says which rank is to blame
        dist.init_process_group(backend, timeout=timedelta(seconds=(stall_timeout_s or 600) + 300))
    return rank, world_size, device


def main() -> None:
    plan = Plan.read(Path(os.environ["QCOLLECT_PLAN"]))
    recipe = plan.recipe
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    rank, world_size, device = init_ranks(plan.device, recipe.launch.stall_timeout_s)
    model = build_model(recipe.model, device=device)
    batches = make_batches(recipe, rank=rank, world_size=world_size, vocab_size=model.config.vocab_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"rank {rank} of {world_size} on {device}: {num_parameters:,} parameters, {batches.num_items:,} samples",
        flush=True,
    )
    train(recipe, model, batches, world_size=world_size, attach=qcollect.collect)
    if dist.is_initialized():
        dist.destroy_process_group()  # on the success path only: peers of a failed rank would hang here


if __name__ == "__main__":
    main()
