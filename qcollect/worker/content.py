"""Which content memory holds: how a value that was seen is known again without keeping it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Identity = tuple[Any, ...]
T = TypeVar("T")


@dataclass(slots=True, eq=False)  # not frozen: that takes twice as long to make
class Content:
    """What the memory of a tensor held when it was seen.

    An address alone does not say so: memory that was given back is another tensor's, and FSDP gives that of a weight
    back while the weight's storage goes on.
    """

    identity: Identity
    storage: StorageWeakRef  # while it is there no other storage gets the id of this one

    @classmethod
    def of(cls, value: Tensor) -> "Content | None":
        """None where nothing tells whether it was changed."""
        identity = identity_of(value)
        if identity is None:
            return None
        return cls(identity, StorageWeakRef(value.untyped_storage()))  # type: ignore[no-untyped-call]

    def is_of(self, value: Tensor) -> bool:
        """Whether ``value`` is the same memory, not changed since."""
        return self.identity == identity_of(value)


class Findings(Generic[T]):
    """What was found out about memory, kept by its content and by what was asked."""

    def __init__(self) -> None:
        # with what keeps the id of a storage from being another's
        self._found: dict[Identity, tuple[StorageWeakRef, dict[Hashable, T]]] = {}

    def of(self, value: Tensor) -> dict[Hashable, T] | None:
        """What is known of a tensor's memory, for what is found later, too; None where nothing tells its content."""
        identity = identity_of(value)
        if identity is None:
            return None
        found = self._found.get(identity)
        if found is None:
            storage = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
            found = self._found[identity] = storage, {}
        return found[1]


def identity_of(value: Tensor) -> Identity | None:
    """What tells that two tensors are the same memory with the same content; None where nothing tells.

    Of two that are not there at the same time, only with a weak reference to the storage of the first (``Content``).
    """
    if value.is_inference() or value.numel() == 0:
        return None
    return (
        value.untyped_storage()._cdata,
        value.storage_offset(),
        value.shape,
        value.stride(),
        value.dtype,
        value._version,
    )
