"""Python's cyclic garbage collector, kept from what was there before training while captures are taken.

With torch and transformers loaded a full collection goes through some 400,000 objects and takes a quarter of a second,
more than a whole iteration on a GPU. It comes as soon as enough new ones were counted, be they gone by then: those of
some hundred captures.
"""

import gc

_FROZEN_BY_PYTHON = 10_000  # at most: some hundred from version 3.12 on


class Frozen:
    """All objects that are there, left out of collections between ``freeze`` and ``thaw``; those made since are not.

    Where somebody froze objects before, or collects by himself, nothing is done.
    """

    def __init__(self) -> None:
        self._is_mine = False

    def freeze(self) -> None:
        """Collect what is garbage already, then freeze."""
        if not gc.isenabled() or gc.get_freeze_count() > _FROZEN_BY_PYTHON:
            return
        gc.collect()
        gc.freeze()
        self._is_mine = True

    def thaw(self) -> None:
        """As it was before."""
        if self._is_mine:
            gc.unfreeze()
            self._is_mine = False
