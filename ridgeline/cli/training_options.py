"""Parts that the commands of `ridgeline train` share: modules that take seconds to import, devices, amounts of text."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    import torch


def imported(*names: str) -> dict[str, ModuleType]:
    """Return modules of `ridgeline.training`, imported when they are needed: torch takes seconds, and matplotlib is an
    extra.

    Raise InvalidConfig if that extra is not installed.
    """
    try:
        return {name: importlib.import_module(f"ridgeline.training.{name}") for name in names}
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InvalidConfig("training needs matplotlib for its loss curve: pip install 'ridgeline[train]'.") from error


def bytes_of(megabytes: float | None) -> int | None:
    """Return the bytes. Raise InvalidConfig for an impossible amount."""
    if megabytes is None:
        return None
    if not 0 < megabytes < float("inf"):
        raise InvalidConfig(f"megabytes of text must be a number above 0, got {megabytes}.")
    return int(megabytes * 1e6)


def device_of(name: str) -> torch.device:
    """Return the device. Raise InvalidConfig if it does not exist."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise InvalidConfig(f"device {name!r} does not exist; this machine has {torch.cuda.device_count()} GPUs.")
    return device
