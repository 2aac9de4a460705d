import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without their folder: for ``fakes``

from fakes import build_plan, guards, start_launcher

from qcollect.host.processes import find_run, kill_all
from qcollect.plan.record import Plan
from qcollect.store.files import write_json_atomic

TIMEOUT_S = 180  # a supervisor that waits for ever fails its test


def pytest_collection_modifyitems(items):
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            item.add_marker(pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux"))


@pytest.fixture
def make_plan(tmp_path, request):
    """A plan whose torchrun and workers are the stand-ins; what it leaves running is killed at the end."""
    plans: list[Plan] = []

    def make(behaviour: str, *, share: int = 3, name: str = "run", folder: str = "mxfp8", **launch) -> Plan:
        token = f"test-{os.getpid()}-{request.node.name}-{name}"
        plan = build_plan(tmp_path / "out" / folder, token=token, behaviour=behaviour, share=share, launch=launch)
        plans.append(plan)
        return plan

    yield make
    for plan in plans:
        kill_all(lambda plan=plan: [*find_run(plan.run_token), *guards(plan)])


@pytest.fixture
def launch(tmp_path):
    """Starts ``execute`` in a process of its own; it is killed at the end."""
    started = []

    def launch(plan: Plan, *options: str, **popen):
        path = tmp_path / f"plan{len(started)}.json"
        write_json_atomic(path, plan.to_dict())
        process = start_launcher(path, *options, **popen)
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()
