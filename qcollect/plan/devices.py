"""Which devices a launch uses: CUDA_VISIBLE_DEVICES read as CUDA reads it, ``--gpu-ids``, rank -> GPU.

CUDA's rules, as the driver follows them (580.159 on two GPUs, measured; **Source:** CUDA C++ Programming
Guide, "CUDA Environment Variables"):

- The first entry decides whether the list holds indices (``2,3``) or names (``GPU-8932f937``,
  ``MIG-<uuid>``, ``MIG-GPU-<uuid>/1/2``). A name may be any unique start of a UUID, in either case.
- An entry that is none (empty, negative, of the other kind, a space before a name) hides itself and
  every one after it: of ``0,,1`` there is 0, of ``-1,0`` nothing.
- Digits at the start of an entry are its index, whatever follows (``1gpu`` is 1).
- A device named twice makes all invisible.

What the machine does not have is hidden the same way, which only torch can tell. Pure: the variable's
value comes in, the variables to set go out; names are text and are never taken apart.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from qcollect.errors import DeviceError, UsageError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
# the order of nvidia-smi; CUDA's own is fastest first
PCI_ORDER = "PCI_BUS_ID"

_INDEX = re.compile(r"\s*([+-]?[0-9]{1,9})(?![0-9])")
_NAME = re.compile(r"(GPU|MIG)-\S")
_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleDevices:
    """A value of CUDA_VISIBLE_DEVICES, taken apart.

    Args:
        value: as it was set.
        entries: what CUDA takes for devices, without spaces around; whether they exist is not known here.
        hidden: the first entry that names no device, and every one after it, as they were set.
        reason: what is wrong with the first of them; empty if there is none.
        repeated: an entry that names a device again; CUDA then sees none.
    """

    value: str
    entries: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    reason: str = ""
    repeated: str | None = None

    def __str__(self) -> str:
        # in quotes where the value would not be seen, or seen to end
        shown = self.value if re.fullmatch(r"[\w,./:+-]+", self.value) else repr(self.value)
        return f"{VISIBLE_VARIABLE}={shown}"

    @property
    def are_indices(self) -> bool:
        return bool(self.entries) and _index(self.entries[0]) is not None

    @property
    def hides_by_mistake(self) -> bool:
        """Whether an entry is lost that looks like one: not where ``-1`` or a comma ends the list, or hides all."""
        is_all = not self.entries and len(self.hidden) == 1
        return not is_all and any(entry.strip() and not _is_negative(entry) for entry in self.hidden)

    def explain_hidden(self) -> str:
        """``its entry '' at position 1 is empty, ...``; empty if nothing is hidden."""
        if not self.hidden:
            return ""
        after = " and every entry after it" if len(self.hidden) > 1 else ""
        return f"its entry {self.hidden[0]!r} at position {len(self.entries)} {self.reason}, and CUDA ignores it{after}"


def parse_visible_devices(value: str) -> VisibleDevices:
    """CUDA's reading of ``value``; never raises."""
    items = value.split(",")
    is_name = _NAME.match(items[0]) is not None
    reasons = [_why_not(item, is_name) for item in items]
    end = next((i for i, reason in enumerate(reasons) if reason), len(items))
    entries = tuple(item.strip() for item in items[:end])
    return VisibleDevices(
        value=value,
        entries=entries,
        hidden=tuple(items[end:]),
        reason=reasons[end] if end < len(items) else "",
        repeated=_find_repeated(entries),
    )


def _why_not(item: str, is_name: bool) -> str:
    """What keeps ``item`` from being a device in a list of names or of indices; empty if nothing does."""
    if not item.strip():
        return "is empty"
    if is_name:
        if _NAME.match(item):
            return ""
        if _NAME.match(item.lstrip()):
            return "has a space before its name"
        return "is an index among names" if _index(item) is not None else "names no device"
    if _is_negative(item):
        return "is negative"
    if _index(item) is not None:
        return ""
    return "is a name among indices" if _NAME.match(item.lstrip()) else "names no device"


def _index(entry: str) -> int | None:
    match = _INDEX.match(entry)
    return None if match is None or _is_negative(entry) else int(match[1])


def _is_negative(entry: str) -> bool:
    match = _INDEX.match(entry)
    return match is not None and int(match[1]) < 0


def _find_repeated(entries: Sequence[str]) -> str | None:
    return next((e for i, e in enumerate(entries) if any(_is_same(e, earlier) for earlier in entries[:i])), None)


def _is_same(one: str, other: str) -> bool:
    """Whether two entries name one device: the same index or name, or the start of the other's UUID."""
    if (index := _index(one)) is not None:
        return index == _index(other)
    one, other = sorted((one.casefold(), other.casefold()), key=len)
    # MIG-GPU-<uuid>/1/2 is another instance than MIG-GPU-<uuid>/1/20
    return one == other or ("/" not in one and other.startswith(one))


# ---------------------------------------------------------------------------------------------
# --gpu-ids
# ---------------------------------------------------------------------------------------------


def device_environment(gpu_ids: Sequence[str] | None, user_value: str | None, device: str = "auto") -> dict[str, str]:
    """The variables that make a launch's devices visible to a process: the workers, and who asks torch about them.

    Empty on the CPU. Without ``gpu_ids`` the user's value, unchanged. With them and without a value they
    are what nvidia-smi calls the devices; with one they choose among its entries, by position or by name.

    Args:
        gpu_ids: ``launch.gpu_ids``.
        user_value: CUDA_VISIBLE_DEVICES of the user's shell; None: unset.
        device: ``launch.device``.

    Raises:
        UsageError: an id that can be none, indices and names mixed, a device named twice.
        DeviceError: an id that is not among the user's, or a user's value that names a device twice.
    """
    if device == "cpu":
        return {}
    visible = None if user_value is None else parse_visible_devices(user_value)
    if visible is not None:
        _refuse_repeated(visible)
    if gpu_ids is None:
        return {} if visible is None else {VISIBLE_VARIABLE: visible.value}
    flag = f"--gpu-ids {','.join(gpu_ids)}"
    _check_ids(gpu_ids, flag)
    if visible is None:
        return {ORDER_VARIABLE: PCI_ORDER, VISIBLE_VARIABLE: ",".join(gpu_ids)}
    return {VISIBLE_VARIABLE: ",".join(_choose(gpu_ids, visible, flag))}


def _refuse_repeated(visible: VisibleDevices) -> None:
    if visible.repeated is not None:
        raise DeviceError(f"{visible} names a device twice ({visible.repeated}); CUDA then sees none: name each once")


def _check_ids(gpu_ids: Sequence[str], flag: str) -> None:
    for gpu_id in gpu_ids:
        if re.fullmatch(r"[0-9]{1,9}", gpu_id) is None and _NAME.match(gpu_id) is None:
            raise UsageError(
                f"{flag}: {gpu_id!r} is no device; give an index (0), a GPU's UUID or its start (GPU-8932f937), "
                "or a MIG instance (MIG-...), as nvidia-smi -L shows them"
            )
    if len({_index(gpu_id) is None for gpu_id in gpu_ids}) > 1:
        raise UsageError(f"{flag} mixes indices and names, and CUDA would see the first kind only; use one")
    if (repeated := _find_repeated(gpu_ids)) is not None:
        raise UsageError(f"{flag} names a device twice ({repeated}); name each once")


def _choose(gpu_ids: Sequence[str], visible: VisibleDevices, flag: str) -> list[str]:
    if not visible.entries:
        why = f" ({visible.explain_hidden()})" if visible.hides_by_mistake else ""
        raise DeviceError(
            f"{flag}: {visible} makes no device visible{why}; unset it, or leave --gpu-ids out to run on the CPU"
        )
    chosen = [_entry_of(gpu_id, visible, flag) for gpu_id in gpu_ids]
    if (repeated := _find_repeated(chosen)) is not None:
        raise UsageError(f"{flag} names a device of {visible} twice ({repeated}); name each once")
    return chosen


def _entry_of(gpu_id: str, visible: VisibleDevices, flag: str) -> str:
    position = _index(gpu_id)
    if position is not None:
        if position < len(visible.entries):
            return visible.entries[position]
        raise DeviceError(_out_of_range(gpu_id, visible, flag))
    matching = [entry for entry in visible.entries if _index(entry) is None and _is_same(gpu_id, entry)]
    if len(matching) == 1:
        return matching[0]
    last = len(visible.entries) - 1
    if visible.are_indices:
        problem = f"{visible} holds indices, among which {gpu_id} cannot be found; give positions in it (0 to {last})"
    elif matching:
        problem = f"{gpu_id} is the start of {len(matching)} entries of {visible}; give more of it"
    else:
        problem = f"{gpu_id} is not among {visible}{_also_hidden(visible)}; name one of its entries, or unset it"
    raise DeviceError(f"{flag}: {problem}")


def _out_of_range(gpu_id: str, visible: VisibleDevices, flag: str) -> str:
    num = len(visible.entries)
    indices = [_index(entry) for entry in visible.entries]
    found = f" (device {gpu_id} is at position {indices.index(int(gpu_id))})" if int(gpu_id) in indices else ""
    return (
        f"{flag}: {gpu_id} is out of range: {visible} is set and makes {num} device(s) visible, so ids are positions "
        f"in it, 0 to {num - 1}{found}{_also_hidden(visible)}; give such, or unset it to use nvidia-smi's numbers"
    )


def _also_hidden(visible: VisibleDevices) -> str:
    return f" ({visible.explain_hidden()})" if visible.hides_by_mistake else ""


# ---------------------------------------------------------------------------------------------
# Against what torch sees
# ---------------------------------------------------------------------------------------------


def warn_of_hidden_devices(value: str | None, num_seen: int) -> str | None:
    """The warning for a user's CUDA_VISIBLE_DEVICES that names more than can be used; None if it does not.

    Not for what hides devices on purpose: an empty value, ``-1``, a word alone.
    """
    if value is None:
        return None
    visible = parse_visible_devices(value)
    if visible.entries and num_seen == 0:
        return (
            f"{visible} names {len(visible.entries)} device(s) and torch sees none, so the run uses the CPU; compare "
            "with nvidia-smi -L, and see with 'qcollect env' whether torch is built for them"
        )
    if num_seen < len(visible.entries):
        lost = visible.entries[num_seen]
        return (
            f"{visible} names {len(visible.entries)} device(s) and torch sees {num_seen}: {lost!r} at "
            f"position {num_seen} cannot be used, which hides every one after it; compare with nvidia-smi -L"
        )
    if visible.hides_by_mistake:
        return f"{visible} makes {num_seen or 'no'} device(s) visible: {visible.explain_hidden()}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """Where a rank computes, from torch's name down to the GPU. None: not known, or there is none.

    Args:
        rank: global rank.
        local_rank: index inside the node; it picks the device.
        device: torch's name, ``cuda:0``; ``cpu``.
        device_index: its number there.
        visible_device: the entry of CUDA_VISIBLE_DEVICES behind it; None also where that is not set.
        gpu_name: the model, ``NVIDIA H100 80GB HBM3``.
        gpu_uuid: ``GPU-...``, or ``MIG-...`` of an instance, as nvidia-smi shows it.
        gpu_index: nvidia-smi's index.
    """

    rank: int
    local_rank: int
    device: str
    device_index: int | None = None
    visible_device: str | None = None
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    gpu_index: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)


def assign_devices(
    world_size: int,
    device: str,
    names: Sequence[str],
    uuids: Sequence[str] = (),
    *,
    visible_value: str | None = None,
    is_pci_order: bool = False,
) -> tuple[RankDevice, ...]:
    """The device of each rank of one node, where rank and local rank are the same number.

    Args:
        world_size: at most ``len(names)``, except on the CPU.
        device: torch's device type.
        names: of each device torch sees.
        uuids: likewise; empty if torch does not tell.
        visible_value: CUDA_VISIBLE_DEVICES of the workers.
        is_pci_order: whether CUDA counts devices as nvidia-smi does.
    """
    if device == "cpu":
        return tuple(RankDevice(rank=rank, local_rank=rank, device="cpu") for rank in range(world_size))
    entries = None if device != "cuda" or visible_value is None else parse_visible_devices(visible_value).entries
    return tuple(
        _assign(rank, device, names[rank], uuids[rank] if rank < len(uuids) else None, entries, is_pci_order)
        for rank in range(world_size)
    )


def _assign(
    rank: int, device: str, name: str, uuid: str | None, entries: Sequence[str] | None, is_pci_order: bool
) -> RankDevice:
    # torch and CUDA_VISIBLE_DEVICES may part where a platform has rules of its own: no entry, no claim
    entry = entries[rank] if entries is not None and rank < len(entries) else None
    number = rank if entries is None else _index(entry or "")
    return RankDevice(
        rank=rank,
        local_rank=rank,
        device=f"{device}:{rank}",
        device_index=rank,
        visible_device=entry,
        gpu_name=name,
        gpu_uuid=_full_uuid(entry, uuid),
        gpu_index=number if is_pci_order and device == "cuda" else None,
    )


def _full_uuid(entry: str | None, uuid: str | None) -> str | None:
    """What nvidia-smi shows: the entry where it is whole, else torch's UUID, which has no prefix."""
    if entry is not None and _UUID.fullmatch(entry):
        return entry[:4] + entry[4:].lower()
    if not uuid:
        return None
    if _NAME.match(uuid):
        return uuid
    return f"{'MIG' if entry is not None and entry.startswith('MIG-') else 'GPU'}-{uuid}"
