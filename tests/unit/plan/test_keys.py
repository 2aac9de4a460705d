from qcollect.plan.keys import planned_keys
from qcollect.plan.schedule import Cut, PlannedCapture, Schedule
from qcollect.vocab import CaptureKey, Gemm, LayerType, Operation, Values


def capture(tensor_name: str, gemm: Gemm | None) -> PlannedCapture:
    return PlannedCapture(
        module="model.layers.0.mlp.up_proj",
        layer_type=LayerType.LINEAR,
        layer_idx=0,
        operation=Operation.FORWARD,
        phase="pre",
        tensor_name=tensor_name,
        gemm=gemm,
        values=Values.ORIGINAL if gemm is None else Values.QUANTIZED,
        num_bytes=8,
    )


def test_every_cut_of_every_rank_gives_its_captures():
    captures = (capture("input", None), capture("input", Gemm.FPROP), capture("input", Gemm.WGRAD))
    cuts = (
        (Cut(iteration=0, micro_batch=0, count=3, start=0), Cut(iteration=4, micro_batch=1, count=1, start=3)),
        (Cut(iteration=0, micro_batch=0, count=2, start=0),),
    )
    keys = planned_keys(Schedule(captures=captures, cuts=cuts))
    assert {(k.rank, k.iteration, k.micro_batch, k.gemm, k.values) for k in keys} == {
        (0, 0, 0, None, "original"),
        (0, 0, 0, "fprop", "quantized"),
        (0, 0, 0, "wgrad", "quantized"),
        (0, 4, 1, None, "original"),
        (1, 0, 0, None, "original"),
        (1, 0, 0, "fprop", "quantized"),
    }
    assert {k.sample_idx for k in keys} == {0}


def test_a_key_is_that_of_the_capture_once_it_is_taken():
    schedule = Schedule(
        captures=(capture("input", Gemm.WGRAD),), cuts=((Cut(iteration=0, micro_batch=0, count=1, start=0),),)
    )
    metadata = {
        "rank": 0, "iteration": 0, "micro_batch": 0, "sample_idx": 0, "module": "model.layers.0.mlp.up_proj",
        "operation": "forward", "phase": "pre", "tensor_name": "input", "values": "quantized",
        "consumers": [{"gemm": "wgrad"}],
    }  # fmt: skip
    assert planned_keys(schedule) == {CaptureKey.from_metadata(metadata)}


def test_a_schedule_may_count_from_a_later_iteration():
    cuts = ((Cut(iteration=0, micro_batch=0, count=1, start=0), Cut(iteration=1, micro_batch=0, count=1, start=1)),)
    keys = planned_keys(Schedule(captures=(capture("input", None),), cuts=cuts), start=121)
    assert {key.iteration for key in keys} == {121, 122}
