"""The program of a process that writes the captures of another: ``python -m qcollect.worker.write_shipments``.

A message is a list of encoded shipments, an answer the outcome of one.
"""

import os
from typing import Any

from qcollect.worker.child import Tell, serve
from qcollect.worker.saver import Saver
from qcollect.worker.shipment import Memories, Scribe, Shipment
from qcollect.worker.writers import WriterPool, encode_outcome


class ShipmentWorker:
    """Writes shipments by threads.

    Args:
        settings: of the saver; how many threads; whether they go on after a failure.
    """

    def __init__(self, settings: dict[str, Any], tell: Tell) -> None:
        scribe = Scribe(
            Saver(**settings["saver"]),
            Memories(os.getppid()),
            goes_on=settings["goes_on"],
            tell=lambda outcome: tell(encode_outcome(outcome)),
        )
        self._pool: WriterPool[Shipment] = WriterPool(settings["num_threads"], scribe.write)

    def work(self, message: list[tuple[Any, ...]]) -> None:
        for fields in message:
            self._pool.submit(Shipment.decode(fields))

    def close(self) -> None:
        self._pool.close()


if __name__ == "__main__":
    serve(ShipmentWorker)
