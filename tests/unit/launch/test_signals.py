import os
import signal
import threading

import pytest

from qcollect.errors import QcollectError
from qcollect.launch.signals import StopSignals


def test_signals_are_noted_and_handlers_come_back():
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
        assert signals.count(signal.SIGINT) == 1
    assert {s: signal.getsignal(s) for s in before} == before


def test_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_are_refused():
    errors = []

    def enter():
        try:
            with StopSignals():
                pass
        except QcollectError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == ["a run can be executed from a program's main thread only, where signals arrive"]


@pytest.fixture(autouse=True)
def known_handlers():
    """A harness may have started the tests with signals ignored."""
    kept = {s: signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in kept.items():
        signal.signal(signum, handler)
