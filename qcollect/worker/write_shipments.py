"""The program of a process that writes the captures of another: ``python -m qcollect.worker.write_shipments``.

Its input is a pickle that says how to write, then pickles of lists of shipments, and of None at the end; its output a
line for every outcome. At the end it writes what is left and ends. When the process it works for is gone, it ends at
once, like a thread of that process would; no file is torn by that.
"""

import os
import pickle
import signal
import sys
import threading
import time
from typing import BinaryIO

import torch

from qcollect.worker.saver import Saver
from qcollect.worker.shipment import Memories, Outcome, Scribe, Shipment
from qcollect.worker.writers import WriterPool, encode_outcome

_WATCH_S = 0.25


def main() -> None:
    """Write what comes until nothing more comes."""
    # what ends the one it works for ends it, too, and not before all is written
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    lines = sys.stdin.buffer
    settings = pickle.load(lines)
    owner = settings["owner"]
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    lock = threading.Lock()

    def tell(outcome: Outcome) -> None:
        with lock:
            os.write(output, encode_outcome(outcome))

    saver = Saver(**settings["saver"])
    scribe = Scribe(saver, Memories(owner), goes_on=settings["goes_on"], tell=tell)
    pool: WriterPool[Shipment] = WriterPool(settings["num_threads"], scribe.write)
    while shipments := _load(lines):
        for shipment in shipments:
            pool.submit(shipment)
    pool.close()


def _load(source: BinaryIO) -> list[Shipment] | None:
    try:
        shipments: list[Shipment] = pickle.load(source)
    except EOFError:
        return None
    return shipments


def _end_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(_WATCH_S)
    os._exit(1)


if __name__ == "__main__":
    main()
