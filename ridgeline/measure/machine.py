"""Names of the machine at hand, as drivers and systems give them."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's name; the key under which its calibration is kept."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def driver_version(device: torch.device) -> str:
    """The GPU driver's version where the system tells it, else ""."""
    version = Path("/proc/driver/nvidia/version")
    if device.type != "cuda" or not version.exists():
        return ""
    words = version.read_text().split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "")
