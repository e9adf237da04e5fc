"""Four classes of what bounds an op: two roofs, and two times below which no call is, however little it does.

| class | the largest of these times is that of | what helps |
|---|---|---|
| memory | bytes ÷ bandwidth | fewer bytes: fusion, fewer bits, larger batches |
| compute | FLOPs ÷ matrix rate | fewer FLOPs, a faster dtype |
| latency | the shortest kernel: tiles too small and few to fill the device | more work a kernel: fusion, batches |
| launch | starting a kernel from the host, where no graph replays it | CUDA graphs, fusion |

Inside a graph the host starts nothing, so there `launch` is no class. A CPU has no graphs: each op is a call.
"""

from __future__ import annotations

from typing import NamedTuple

NEAR = 2.0  # a measured time up to so many times another is explained by it
UNEXPLAINED = "kernel"  # neither a roof nor a floor explains the time: the kernel itself has room


class Floors(NamedTuple):
    """The least seconds of a call on a device. launch: of the host, for one launch. latency: of the device, for a
    kernel that does nothing."""

    launch: float
    latency: float

    def of(self, *, eager: bool) -> tuple[str, float]:
        """Return the class and the seconds of the floor that counts."""
        return ("launch", max(self)) if eager and self.launch >= self.latency else ("latency", self.latency)


def bottleneck(limit: float, roof: str, floors: Floors, *, eager: bool = False, measured: float | None = None) -> str:
    """Return the class of one call whose roofs allow `limit` seconds, by the larger of them, `roof`.

    With a measured time: what explains it within `NEAR`, the roof first, or `UNEXPLAINED`.
    """
    name, least = floors.of(eager=eager)
    if measured is None:
        return name if least > limit else roof
    if measured <= NEAR * limit:
        return roof
    return name if measured <= NEAR * least else UNEXPLAINED
