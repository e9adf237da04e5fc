"""The cores that this process may use: how many there are, how many of them other programs leave free, and how the
threads of one program wait for each other there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # each of them says how OpenMP's threads wait
FEWEST_TICKS = 10  # of the system's clock, below which a share of busy time means nothing


def wait_passively() -> None:
    """Let OpenMP's threads sleep while they wait for each other, unless the user has said how they wait.

    By default they spin. On a core that other programs want too, a thread that spins takes the time that the thread it
    waits for would need. The library reads the variable when it is loaded, so this must run before torch is imported.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def available(proc: Path = PROC) -> int:
    """Return the number of cores that this process may use, by its affinity and by the quota of its cgroups."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(quota(proc) + 0.5))) if quota(proc) < cores else cores


def of_helper(processes: int = 1) -> dict[str, str]:
    """Return the environment of one of so many processes that read and write texts, unless the user has set it: they
    multiply no matrices, and share the cores among their tokenizers."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = {**single, "RAYON_NUM_THREADS": str(max(1, available() // processes))}
    return {name: os.environ.get(name, value) for name, value in own.items()}


def quota(proc: Path = PROC) -> float:
    """Return the cores whose time the cgroups of this process grant, of version 1 or 2; infinity without a limit."""
    return min((limit for folder in _groups(proc) for limit in _limits(folder)), default=float("inf"))


def _groups(proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that limit CPU time, and those of the groups around them."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}  # by the kind of file system
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = path
    for line in mounts:
        where, _, what = line.partition(" - ")
        root, mount = where.split()[3:5]
        kind, *options = what.split()
        if kind not in paths or (kind == "cgroup" and "cpu" not in options[-1].split(",")):
            continue
        folder, inner = Path(mount), _below(paths[kind], root)
        yield folder
        for name in inner:
            yield (folder := folder / name)


def _below(path: str, root: str) -> tuple[str, ...]:
    """Return the names of the folders from a mount's root to a path. None if the path lies outside, as it may seem
    from within a container: the mount is then the group itself."""
    inner = Path(path)
    return inner.relative_to(root).parts if inner.is_relative_to(root) and ".." not in inner.parts else ()


def _limits(folder: Path) -> Iterator[float]:
    """Yield the cores' time that one cgroup grants, if it has a limit."""
    try:
        if (v2 := folder / "cpu.max").exists():
            granted, period = v2.read_text().split()
        else:
            granted, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        if granted not in ("max", "-1"):
            yield int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return


class Load:
    """A count of the cores that other programs leave to this process, from one look to the next."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc, self._ticks = proc, os.sysconf("SC_CLK_TCK")
        self._last = self._look()

    def free(self) -> int | None:
        """Return the number of cores that were idle or worked for this process since the look before; at least one.
        None if the system does not say, or if too little time has passed."""
        now, before = self._look(), self._last
        ticks = (now[0] - before[0]) * self._ticks
        if now[1] is None or before[1] is None or ticks < FEWEST_TICKS:
            return None
        self._last = now
        idle, own = now[1] - before[1], (now[2] - before[2]) * self._ticks
        return max(1, round((idle + own) / ticks))

    def _look(self) -> tuple[float, int | None, float]:
        """Return the time, the ticks in which this process's cores were idle, and its own CPU time."""
        return time.monotonic(), self._idle(), time.process_time()

    def _idle(self) -> int | None:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in (self._proc / "stat").read_text().splitlines()]
            idle = [int(line[4]) + int(line[5]) for line in lines if line and line[0] in names]
        except (OSError, ValueError, IndexError):
            return None
        return sum(idle) if len(idle) == len(names) else None
