import os
import signal
import threading

import pytest

from qcollect.errors import UsageError
from qcollect.host.capture_signal import CaptureSignal

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 here")


def test_the_signal_is_noted_and_the_handler_comes_back():
    before = signal.getsignal(signal.SIGUSR1)
    with CaptureSignal() as capture:
        assert not capture.was_received
        os.kill(os.getpid(), signal.SIGUSR1)
        assert capture.was_received
    assert signal.getsignal(signal.SIGUSR1) == before


def test_contexts_inside_each_other_note_for_the_inner_one():
    with CaptureSignal() as outer:
        with CaptureSignal() as inner:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (outer.was_received, inner.was_received) == (False, True)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert outer.was_received


def test_without_being_enabled_nothing_is_touched():
    before = signal.getsignal(signal.SIGUSR1)
    with CaptureSignal(enabled=False):
        assert signal.getsignal(signal.SIGUSR1) == before


def test_other_threads_are_refused():
    errors = []

    def enter():
        try:
            CaptureSignal().__enter__()
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == [
        "trigger 'signal' waits for SIGUSR1, which arrives in a program's main thread only; enter the context there, "
        "or wait for another"
    ]


def test_a_system_without_the_signal_is_refused_by_its_name(monkeypatch):
    monkeypatch.delattr(signal, "SIGUSR1")
    with pytest.raises(UsageError, match="trigger 'signal' waits for SIGUSR1, which this system does not have"):
        CaptureSignal().__enter__()
