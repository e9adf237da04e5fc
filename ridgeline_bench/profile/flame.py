"""Flame graphs by sampling, as one SVG file: the functions that the threads were in, as stacks.

The form is that of Brendan Gregg, "The Flame Graph", CACM 59(6), 2016: width is time, and callees stand on their
callers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import FrameType

from ridgeline_bench.profile.trace import NESTED, Event, Kind

Stack = tuple[str, ...]

WIDTH, ROW, LETTER = 1400.0, 17, 6.6  # pixels
NARROWEST = 0.5  # pixels; narrower boxes are not drawn


class Sampler:
    """A sampler: `with Sampler(): …` looks at every thread's Python stack each `interval` seconds. `stacks` maps a
    stack to its samples."""

    def __init__(self, interval: float = 1e-3) -> None:
        self.stacks: Counter[Stack] = Counter()
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self._switch_interval = sys.getswitchinterval()

    def __enter__(self) -> Sampler:
        sys.setswitchinterval(self._interval / 5)  # otherwise a busy thread keeps the interpreter for 5 ms at a time
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)

    def _watch(self) -> None:
        own = threading.get_ident()
        while not self._stop.wait(self._interval):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != own and ident in names:
                    self.stacks[(names[ident], *_frames(frame))] += 1


def _frames(frame: FrameType | None) -> Stack:
    """Return the frames as "file:function", outermost first."""
    names = []
    while frame is not None:
        names.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(names))


def collapsed(stacks: Counter[Stack]) -> str:
    """Return one line per stack, "a;b;c samples", as flame-graph tools read them."""
    return "".join(f"{';'.join(stack)} {count}\n" for stack, count in sorted(stacks.items()))


@dataclass
class _Node:
    samples: int = 0
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return 1 + max((child.depth for child in self.children.values()), default=0)


def of_trace(events: Sequence[Event]) -> Counter[Stack]:
    """Return the stacks of a trace, in µs without those of calls inside: of the host's threads from outermost range to
    innermost call, and of the device from its ranges to its kernels. Events come in the order of their starts."""
    stacks: Counter[Stack] = Counter()
    threads = list(dict.fromkeys(each.thread for each in events if each.kind in NESTED))
    around: dict[object, list[tuple[float, Stack]]] = {}
    for event in events:
        on_host = event.kind in NESTED
        root = f"host: thread {threads.index(event.thread)}" if on_host else "device"
        open_ones = around.setdefault(event.thread if on_host else root, [])
        while open_ones and open_ones[-1][0] <= event.start:
            open_ones.pop()
        above = open_ones[-1][1] if open_ones else (root,)
        stack = (*above, event.name)
        stacks[stack] += round(event.elapsed)
        if open_ones:
            stacks[above] -= round(event.elapsed)
        if on_host or event.kind is Kind.DEVICE_RANGE:  # a kernel of another stream is not inside of this one
            open_ones.append((event.end, stack))
    return Counter({stack: micros for stack, micros in stacks.items() if micros > 0})


def svg(stacks: Counter[Stack], title: str, unit: str = "samples") -> str:
    """Return a flame graph that stands alone. Hovering over a box shows its share. unit: of the counts."""
    root = _Node(sum(stacks.values()))
    for stack, count in stacks.items():
        node = root
        for name in stack:
            node = node.children.setdefault(name, _Node())
            node.samples += count
    height = ROW * (root.depth + 2)
    boxes: list[str] = []
    if root.samples:
        _draw(root, 0.0, 0, root.samples, height, boxes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{height}" '
        f'font-family="monospace" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="8" y="14">{escape(title)}, {root.samples:,} {unit}, {time.strftime("%Y-%m-%d")}</text>'
        + "".join(boxes)
        + "</svg>\n"
    )


def _draw(node: _Node, x: float, level: int, total: int, height: int, boxes: list[str]) -> None:
    for name, child in sorted(node.children.items()):
        width = WIDTH * child.samples / total
        if width >= NARROWEST:
            y = height - ROW * (level + 1)
            hue = 10 + sum(name.partition(":")[0].encode()) % 45  # one colour per file
            label = escape(name[: int(width / LETTER)]) if width > 4 * LETTER else ""
            boxes.append(
                f'<g><title>{escape(name)}: {child.samples / total:.1%}</title><rect x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="{ROW - 1}" fill="hsl({hue},85%,70%)"/>'
                f'<text x="{x + 2:.1f}" y="{y + 12}">{label}</text></g>'
            )
            _draw(child, x, level + 1, total, height, boxes)
        x += width
