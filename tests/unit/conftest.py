from pathlib import Path

import pytest

from qcollect.plan.record import Plan
from qcollect.plan.schedule import Cut, PlannedCapture, Schedule
from qcollect.recipe.records import recipe_from_dict
from qcollect.vocab import LayerType, Operation, Values


@pytest.fixture
def make_plan(tmp_path):
    def make(run_dir: Path | None = None, *, name: str = "one", world_size: int = 2, share: int = 3) -> Plan:
        run_dir = tmp_path / "out" / "mxfp8" if run_dir is None else run_dir
        recipe = recipe_from_dict(
            {
                "name": "tiny",
                "path": "tiny.yaml",
                "script": "train.py",
                "model": {},
                "data": {"path": ["text"], "sequence_length": 8},
                "train": {},
                "quant": {},
                "capture": {"target": world_size * share},
                "launch": {"grace_s": 0.5},
            }
        )
        capture = PlannedCapture(
            module="model.layers.0.self_attn",
            layer_type=LayerType.ATTENTION,
            layer_idx=0,
            operation=Operation.FORWARD,
            phase="pre",
            tensor_name="query",
            gemm=None,
            values=Values.ORIGINAL,
            num_bytes=8,
        )
        cut = Cut(iteration=0, micro_batch=0, count=share, start=0)
        return Plan(
            run_id=f"run-{name}",
            run_token=f"token{name}",
            run_dir=run_dir,
            quant_type="mxfp8",
            recipe=recipe,
            world_size=world_size,
            device="cpu",
            torchrun_argv=("torchrun",),
            agent_argv=("true",),
            env={},
            unset=(),
            script_args=(),
            schedule=Schedule(captures=(capture,) * share, cuts=((cut,),) * world_size),
            excluded=(),
        )

    return make
