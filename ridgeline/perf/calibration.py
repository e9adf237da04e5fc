"""The rates that a machine was measured to reach, and their store: one JSON file per device.

The files lie in `$XDG_CACHE_HOME/ridgeline/calibration/` (`~/.cache/ridgeline/calibration/` by default). They are plain
enough to read, to edit and to send to other people.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.user_cache import user_cache


class GemmRate(NamedTuple):
    """The rate of a product [m, k] x [k, n]: `flops` FLOP/s."""

    m: int
    n: int
    k: int
    dtype: str
    flops: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measured rates of one device. Rates are in B/s or FLOP/s, times in seconds; None means not measured.

    device: its name, as the driver gives it.
    date: in ISO 8601.
    copy: bytes read plus bytes written.
    gemm: one entry per shape and dtype.
    launch: host time of one kernel launch.
    graph_node: device time of a tiny kernel inside a graph.
    host_to_device, device_to_host: copies from and to pinned memory.
    l2_read: what L2 gives to all multiprocessors.
    l2_latency, memory_latency: a load that waits for the load before.
    """

    device: str
    read: float
    date: str
    write: float | None = None
    copy: float | None = None
    gemm: tuple[GemmRate, ...] = ()
    launch: float | None = None
    graph_node: float | None = None
    host_to_device: float | None = None
    device_to_host: float | None = None
    l2_read: float | None = None
    l2_latency: float | None = None
    memory_latency: float | None = None
    torch: str = ""
    driver: str = ""

    def matrix_rates(self) -> dict[str, float]:
        """Return FLOP/s by dtype: the rate of the fastest measured product, which is what a large product
        can attain."""
        best: dict[str, float] = {}
        for rate in self.gemm:
            best[rate.dtype] = max(rate.flops, best.get(rate.dtype, 0.0))
        return best


def store_folder() -> Path:
    """Return the folder of calibrations."""
    return user_cache() / "calibration"


def path_for(device: str, folder: Path | None = None) -> Path:
    """Return the file of a device's calibration, whether it exists or not."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unnamed"
    return (folder or store_folder()) / f"{slug}.json"


def save(calibration: Calibration, folder: Path | None = None) -> Path:
    """Write (or replace) the device's calibration, and return its file."""
    path = path_for(calibration.device, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = asdict(calibration) | {"gemm": [rate._asdict() for rate in calibration.gemm]}
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(record, indent=1) + "\n")
    scratch.replace(path)  # a reader sees the old file or the new one, never half of it
    return path


def load(device: str, folder: Path | None = None) -> Calibration | None:
    """Return the device's calibration, or None if it was never measured. Raises InvalidConfig if the file
    is damaged."""
    path = path_for(device, folder)
    return read(path) if path.exists() else None


def read(path: Path) -> Calibration:
    """Return the calibration in a file. Raises InvalidConfig if the file cannot be read or does not hold one."""
    try:
        record = json.loads(path.read_text())
        calibration = _from_record(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(f"calibration {path} is damaged ({error}); delete it and calibrate again.") from error
    _check(calibration, path)
    return calibration


def _from_record(record: dict[str, Any]) -> Calibration:
    known = {field.name for field in fields(Calibration)}
    values = {name: value for name, value in record.items() if name in known}  # a newer version may know more
    return Calibration(**values | {"gemm": tuple(GemmRate(**rate) for rate in record.get("gemm", ()))})


def _check(calibration: Calibration, path: Path) -> None:
    for name, value in _numbers(calibration):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise InvalidConfig(f"calibration {path} sets {name} to {value!r}; delete it and calibrate again.")


def _numbers(calibration: Calibration) -> Iterable[tuple[str, Any]]:
    yield "read", calibration.read
    optional = ("write", "copy", "launch", "graph_node", "host_to_device", "device_to_host")
    for name in (*optional, "l2_read", "l2_latency", "memory_latency"):
        if (value := getattr(calibration, name)) is not None:
            yield name, value
    for rate in calibration.gemm:
        yield f"gemm {rate.m}x{rate.n}x{rate.k} {rate.dtype}", rate.flops
