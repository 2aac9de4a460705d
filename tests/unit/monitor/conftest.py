import pytest

from qcollect.paths import RunPaths
from qcollect.store.files import append_line, write_json_atomic

NOW = 1_733_063_422.0  # 2024-12-01T14:30:22Z


class RunFiles:
    """Writes the files of a run by hand."""

    def __init__(self, run_dir):
        self.paths = RunPaths(run_dir)
        for folder in self.paths.state_dirs():
            folder.mkdir(parents=True)

    def record(self, **changes):
        fields = {
            "schema": 1,
            "run_id": "run-a",
            "run_token": "t",
            "quant_type": "mxfp8",
            "state": "running",
            "reason": None,
            "exit_code": None,
            "host": "here",
            "launcher": {"pid": 10, "create_time": 5.0},
            "agent": None,
            "target": 10,
            "world_size": 2,
            "started_at": "2024-12-01T14:29:22.000+00:00",
            "ended_at": None,
            "recipe_name": "tiny",
        }
        write_json_atomic(self.paths.run_path, fields | changes)

    def progress(self, rank, **changes):
        fields = {
            "rank": rank,
            "local_rank": rank,
            "pid": 100 + rank,
            "create_time": 6.0,
            "state": "training",
            "iteration": 3,
            "captured": 0,
            "share": 5,
            "bytes": 2048,
            "loss": 2.5,
            "device": "cpu",
            "updated_at": NOW - 2,
        }
        write_json_atomic(self.paths.progress_path(rank), fields | changes)

    def captures(self, rank, count, num_bytes=1024, folder=""):
        for i in range(count):
            name = f"{folder}rank{rank}_{i}.pt"
            path = self.paths.run_dir / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * num_bytes)
            fields = {"file": name, "bytes": num_bytes, "xxh3_128": "0", "metadata": {}, "tensor_info": {}}
            append_line(self.paths.manifest_path(rank), fields)

    def rank_error(self, rank, time, type="ValueError", message="bad tokenizer path"):
        fields = {"rank": rank, "local_rank": rank, "type": type, "message": message, "traceback": "", "time": time}
        write_json_atomic(self.paths.error_path(rank), fields)

    def agent_error(self, *entries, **others):
        failures = [
            {
                "rank": r,
                "local_rank": r,
                "pid": 1,
                "exitcode": code,
                "signal": -code if code < 0 else None,
                "time": time,
            }
            for r, code, time in entries
        ]
        write_json_atomic(self.paths.agent_error_path, {"failures": failures, **others})


@pytest.fixture
def make_run(tmp_path):
    return lambda name="mxfp8": RunFiles(tmp_path / "out" / name)


@pytest.fixture
def now():
    return NOW
