"""The findings of a measurement: a figure for every op, way and size, lines through them, records."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.links import OPS, Line, Links, bus_factor, fit
from ridgeline.version import __version__
from ridgeline_bench.communication.cases import OPS as MEASURED
from ridgeline_bench.results import Machine, Record

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 1 << 34


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One op by one way at one size. samples: seconds, of which the median counts; none where `why` says why not."""

    op: str
    backend: str
    ranks: int
    bytes: int
    samples: tuple[float, ...] = ()
    why: str = ""
    wrong: bool = False

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def bus(self) -> float:
        """The bus bandwidth, in B/s, as nccl-tests count it."""
        return bus_factor(_counted(self.op), self.ranks) * self.bytes / self.seconds

    @property
    def as_dict(self) -> dict[str, Any]:
        known = {"op": self.op, "backend": self.backend, "ranks": self.ranks, "bytes": self.bytes}
        if not self.samples:
            return {**known, "why": self.why}
        return {**known, "us": 1e6 * self.seconds, "bus_gb_s": self.bus / 1e9, "samples": len(self.samples)}


def _counted(op: str) -> str:
    """Return the op whose bytes are counted alike: an exchange has two ways, as a sum has."""
    return {"all_reduce_norm": "all_reduce", "exchange": "all_reduce", "copy": "send"}.get(op, op)


def figure(event: dict[str, Any]) -> Figure | None:
    """Return the figure that an event of `runs.run` tells, or None if it tells none."""
    if event["event"] not in ("measured", "left out"):
        return None
    why = "" if event["event"] == "measured" else f"{event['kind']}: {event['why']}"
    return Figure(
        op=event["op"],
        backend=event["backend"],
        ranks=event["ranks"],
        bytes=event["bytes"],
        samples=tuple(event.get("samples", ())),
        why=why,
        wrong=event.get("kind") in ("wrong", "failed"),
    )


def lines(figures: Sequence[Figure]) -> list[Line]:
    """Return a line through the figures of every op and way that has at least two sizes."""
    points: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for each in figures:
        if each.samples and each.op in OPS:
            points[each.op, each.backend, each.ranks].append((each.bytes, each.seconds))
    return [fit(*what, found) for what, found in points.items() if len(found) > 1]


def links(figures: Sequence[Figure], device: str, machine: Machine, date: str, link: str) -> Links:
    """Return the links' times to keep for the planner."""
    found = tuple(lines(figures))
    if not found:
        raise InvalidConfig("no line can be kept: nothing was measured at two sizes.")
    source = f"measured on {device}, {date}"
    return Links(
        device=device, lines=found, source=source, date=date, torch=machine.torch, driver=machine.driver, link=link
    )


def records(figures: Sequence[Figure], machine: Machine, link: str, hardware: Hardware | None) -> list[Record]:
    """Return one record for each figure. Its limit is what the link needs for the bytes alone."""
    found = []
    for each in figures:
        if not each.samples:
            continue
        counted = bus_factor(_counted(each.op), each.ranks) * each.bytes
        limit = 1e6 * counted / hardware.interconnect if hardware is not None and each.backend != "gloo" else 0.0
        found.append(
            Record(
                engine="ridgeline",
                version=__version__,
                workload="communication",
                metric=f"{each.op} {size_name(each.bytes)} {each.backend}",
                value=1e6 * each.seconds,
                unit="µs",
                samples=tuple(1e6 * sample for sample in each.samples),
                limit=limit,
                dtype="float32" if each.backend == "gloo" else "bfloat16",
                machine=machine,
                options={"ranks": each.ranks, "bytes": each.bytes, "bus_gb_s": each.bus / 1e9, "link": link},
            )
        )
    return found


# ---- sizes, ops, topology -------------------------------------------------------------------------------------------


def parse_sizes(text: str) -> list[int]:
    """Return bytes from "8K,64K,1M", or from "1K:1G" in steps of four. Raise InvalidConfig."""
    first, colon, last = text.partition(":")
    if not colon:
        return sorted({_bytes(part) for part in text.split(",") if part.strip()} or {_bytes(text)})
    low, high = _bytes(first), _bytes(last)
    if low > high:
        raise InvalidConfig(f"--sizes {text} runs backwards; give the smaller one first.")
    found = [low]
    while found[-1] * 4 <= high:
        found.append(found[-1] * 4)
    return found


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    size = int(match[1]) * UNITS.get(match[2].upper(), 1) if match else 0
    if not 0 < size <= LARGEST:
        raise InvalidConfig(f"{text!r} is no size; sizes look like 8K, 1M or 1G, and end at 16G.")
    return size


def size_name(nbytes: int) -> str:
    """Return 65536 as "64K"."""
    unit = next((name for name in "GMK" if nbytes >= UNITS[name]), "")
    return f"{nbytes / UNITS.get(unit, 1):.4g}{unit}"


def parse_ops(text: str) -> list[str]:
    """Return the ops' names. put and get are ways of sending. Raise InvalidConfig."""
    if not text:
        return list(MEASURED)
    names = [{"put": "send", "get": "send"}.get(name, name) for name in re.split(r"[\s,]+", text.replace("-", "_"))]
    for name in names:
        if name not in MEASURED:
            raise InvalidConfig(f"{name!r} is no collective that is measured; there are {', '.join(MEASURED)}.")
    return list(dict.fromkeys(names))


def link_between_gpus() -> str:
    """Return the name that `nvidia-smi topo -m` gives the link between the first two GPUs, such as NV18 or PIX, or an
    empty string."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    return link_in(done.stdout)


def link_in(topology: str) -> str:
    """Return the link of the first GPU with the second in that table, whose cells terminals may underline."""
    for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines():
        cells = line.split()
        if len(cells) > 2 and cells[0] == "GPU0" and cells[1] == "X":
            return cells[2]
    return ""
