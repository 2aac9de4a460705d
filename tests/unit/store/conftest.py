from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from qcollect.paths import RunPaths
from qcollect.vocab import GROUPS, LayerType, RankInfo
from qcollect.worker.saver import Observation, Saver


@pytest.fixture
def save_run(tmp_path):
    """A run folder with the attention captures of a layer for each rank, as a worker saves them."""

    def save(run_dir: Path | None = None, *, ranks=(0, 1), by_iteration=False, iterations=(0,), **extra) -> RunPaths:
        run_dir = tmp_path / "out" / "mxfp8" if run_dir is None else run_dir
        for rank in ranks:
            saver = Saver(
                run_dir,
                run_id="one",
                by_iteration=by_iteration,
                clock=lambda: datetime(2024, 12, 1, 14, 30, tzinfo=UTC),
            )
            for iteration in iterations:
                for i, slot in enumerate(GROUPS[LayerType.ATTENTION][:4]):
                    tensor = torch.arange(600.0).reshape(2, 300) + 10 * rank + i
                    saver.save(tensor, observe(slot, rank, iteration, extra))
        return RunPaths(run_dir)

    return save


def observe(slot, rank, iteration, extra):
    return Observation(
        layer_type="attention",
        layer_idx=3,
        operation=slot.operation,
        phase=slot.phase,
        component="FA",
        quant_type="mxfp8",
        tensor_name=slot.tensor_name,
        tensor=slot.tensor_name,
        module="model.layers.3.self_attn",
        rank=RankInfo(rank=rank, local_rank=0, world_size=2),
        iteration=iteration,
        micro_batch=0,
        sample_idx=rank,
        num_samples=1,
        extra=extra,
    )
