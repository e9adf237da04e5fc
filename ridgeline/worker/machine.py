"""The machine at hand: its names, as drivers and systems give them, and what is known of its rates."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf import calibration
from ridgeline.perf.hardware import Hardware, find, from_device_name


def pci_address(device: torch.device) -> str:
    """Return the address of a GPU on the PCI bus, as "0000:3b:00.0"."""
    known: Any = torch.cuda.get_device_properties(device)  # torch declares no types of these
    return f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the CPU, which is the key of its calibration."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def driver_version(device: torch.device) -> str:
    """Return the version of the GPU driver, or "" if the system does not tell it."""
    version = Path("/proc/driver/nvidia/version")
    if device.type != "cuda" or not version.exists():
        return ""
    words = version.read_text().split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "")


def hardware_of(device: torch.device) -> Hardware | None:
    """Return the rates that this device attains: those of its own calibration, else those known of its
    kind, else None."""
    return hardware_named(device_name(device), device)


def hardware_named(name: str, device: torch.device) -> Hardware | None:
    """Return the hardware of a device by its name, as `hardware_of`; this process need not reach the device."""
    known = _known(device, name)
    own = calibration.load(name)
    if own is not None:
        return (known or find("CPU")).with_calibration(own)
    return known.attained() if known is not None else None


def datasheet(device: torch.device, quantity: str) -> float | None:
    """Return the maker's figure for a probe's quantity, or None where there is no such figure, as for every CPU."""
    known = _known(device, device_name(device))
    if known is None:
        return None
    if quantity in ("read", "write", "copy"):
        return known.bandwidth
    if quantity.startswith("gemm "):
        return known.matrix.get(quantity.split()[1])
    return known.pcie if quantity.endswith("pinned") else None


def _known(device: torch.device, name: str) -> Hardware | None:
    """Return the entry of a known GPU, or None. CPUs have no entries: they differ too much, and need a calibration."""
    if device.type != "cuda":
        return None
    try:
        return from_device_name(name)
    except InvalidConfig:
        return None
