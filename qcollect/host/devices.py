"""What this shell says about accelerators. Which devices there are, only torch knows (a worker's ``--inspect``)."""

import os


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set; None if it is not, which is another thing than empty."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def device_order() -> str | None:
    """CUDA_DEVICE_ORDER, ``PCI_BUS_ID`` where CUDA counts as nvidia-smi does; None if it is not set."""
    return os.environ.get("CUDA_DEVICE_ORDER")
