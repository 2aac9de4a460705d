"""Which payloads of an iteration are on disk, and in which files: for ``capture.dedupe``.

q, k and v read one input, gate and up another, and a weight is the same in every micro-batch: what a writer is about
to store may be in a file already, or in one that another writer is just writing.
"""

import threading
from dataclasses import dataclass, field

from qcollect.store.capture import StoredFile

MIN_BYTES = 1024  # of a payload: a reference to less is hardly smaller
_NUM_ITERATIONS = 2  # that are known of: writers finish one while others begin the next

_Key = tuple[int, str]  # rank, hash of a payload


@dataclass(slots=True, eq=False)
class Claim:
    """A payload that one writer stores, and others wait for; ``settle`` it whatever happens."""

    stored: StoredFile | None = None
    _settled: threading.Event = field(default_factory=threading.Event)

    def settle(self, stored: StoredFile | None) -> None:
        """The payload is in this file, whole and listed; None: it could not be written, and is the next writer's."""
        self.stored = stored
        self._settled.set()

    def wait(self) -> StoredFile | None:
        """Where the payload is, once that is known; None: nowhere."""
        self._settled.wait()
        return self.stored


class Payloads:
    """The payloads of the last two iterations; what is older is forgotten, and what comes late of it not shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._iterations: dict[int, dict[_Key, Claim]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._iterations.values()))

    def find_or_claim(self, iteration: int, rank: int, xxh3_128: str) -> StoredFile | Claim:
        """The file of this rank and iteration that stores a payload; or a claim, and the caller is to store it.

        Waits while another thread is about it. A claim that came to nothing is passed on to one of those that wait.
        """
        key = rank, xxh3_128
        failed: Claim | None = None
        while True:
            with self._lock:
                claims = self._claims_of(iteration)
                claim = claims.get(key)
                if claim is None or claim is failed:
                    claims[key] = claim = Claim()
                    return claim
            stored = claim.wait()
            if stored is not None:
                return stored
            failed = claim

    def _claims_of(self, iteration: int) -> dict[_Key, Claim]:
        claims = self._iterations.setdefault(iteration, {})
        for old in sorted(self._iterations)[:-_NUM_ITERATIONS]:
            del self._iterations[old]
        return claims
