"""How many cores there are for us, and how our threads wait for each other on them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ridgeline.core import cores

V2 = "0::/pod/own\n"
V1 = "5:cpuset:/\n3:cpu,cpuacct:/pod/own\n0::/\n"


def system(
    folder: Path, groups: str, kind: str, limits: dict[str, str], *, root: str = "/", options: str = "rw,cpu,cpuacct"
) -> Path:
    """A folder like /proc whose mounted control groups have these files."""
    mount = folder / "mount"
    (mount / "pod" / "own").mkdir(parents=True)
    for path, text in limits.items():
        (mount / path).write_text(text)
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    other = "22 1 0:20 / / rw - ext4 /dev/vda rw\n"
    (proc / "self" / "mountinfo").write_text(f"{other}31 22 0:28 {root} {mount} rw,nosuid - {kind} {kind} {options}\n")
    return proc


@pytest.mark.parametrize(
    ("groups", "kind", "limits", "expected"),
    [
        (V2, "cgroup2", {"pod/own/cpu.max": "150000 100000"}, 1.5),
        (V2, "cgroup2", {"pod/own/cpu.max": "max 100000", "pod/cpu.max": "200000 100000"}, 2),  # the group around ours
        (V2, "cgroup2", {"pod/own/cpu.max": "300000 100000", "pod/cpu.max": "200000 100000"}, 2),
        (V2, "cgroup2", {}, float("inf")),
        (V2, "cgroup2", {"pod/own/cpu.max": "what?"}, float("inf")),
        (V1, "cgroup", {"pod/own/cpu.cfs_quota_us": "50000", "pod/own/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, "cgroup", {"pod/own/cpu.cfs_quota_us": "-1", "pod/own/cpu.cfs_period_us": "100000"}, float("inf")),
        (V1, "cgroup", {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
        ("0::/../elsewhere\n", "cgroup2", {"cpu.max": "100000 100000"}, 1),  # as seen from within a container
    ],
)
def test_the_quota_is_the_least_of_the_groups_around_us(
    groups: str, kind: str, limits: dict[str, str], expected: float, tmp_path: Path
) -> None:
    assert cores.quota(system(tmp_path, groups, kind, limits)) == expected


def test_a_mount_may_begin_within_the_hierarchy(tmp_path: Path) -> None:
    """Docker with version 1 mounts the container's own group, and names it by its path on the host."""
    limits = {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}
    assert cores.quota(system(tmp_path, V1, "cgroup", limits, root="/pod/own")) == 2.5


def test_a_mount_without_the_cpu_controller_limits_nothing(tmp_path: Path) -> None:
    limits = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
    assert cores.quota(system(tmp_path, V1, "cgroup", limits, options="rw,memory")) == float("inf")
    assert cores.quota(tmp_path / "nothing") == float("inf")


@pytest.mark.parametrize(("quota", "expected"), [(0.2, 1), (1.4, 1), (1.5, 2), (2.6, 3), (64, 8)])
def test_cores_are_those_of_affinity_and_quota(
    quota: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    limits = {"pod/own/cpu.max": f"{round(quota * 100000)} 100000"}
    assert cores.available(system(tmp_path, V2, "cgroup2", limits)) == expected


@pytest.mark.parametrize(
    ("idle", "own", "expected"),
    [
        ((100, 100, 100, 100), 0.0, 4),  # ticks of a second each core was idle; seconds that this process worked
        ((0, 0, 0, 0), 4.0, 4),  # no process but this one
        ((0, 0, 0, 0), 2.0, 2),
        ((0, 0, 0, 0), 0.1, 1),  # there is always one
        ((50, 100, 0, 0), 0.6, 2),
    ],
)
def test_cores_are_free_that_are_idle_or_ours(
    idle: tuple[int, ...], own: float, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, spent = [100.0], [7.0]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 4})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(cores.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cores.time, "process_time", lambda: spent[0])

    def told(extra: tuple[int, ...]) -> None:
        lines = ["cpu 9 9 9 9 9 9", "cpu0 5 5 5 99 99 5"]  # of core 0, which is not ours
        lines += [f"cpu{core + 1} 5 5 5 {1000 + more} 7 5 5" for core, more in enumerate(extra)]
        (tmp_path / "stat").write_text("\n".join(lines) + "\nintr 5\n")

    told((0, 0, 0, 0))
    load = cores.Load(tmp_path)
    clock[0] += 0.01
    assert load.free() is None  # too short for ticks
    told(idle)
    clock[0], spent[0] = 101.0, 7.0 + own
    assert load.free() == expected
    assert cores.Load(tmp_path / "nothing").free() is None


SAID = "import ctypes, sys, ridgeline; ctypes.CDLL(sys.argv[1])"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "OMP_WAIT_POLICY = 'PASSIVE'"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY = 'ACTIVE'")],
)
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    environment: dict[str, str], expected: str
) -> None:
    """The library itself tells what it read when it was loaded behind `import ridgeline`."""
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    libraries = sorted(Path(found.origin).parents[1].glob("torch*/**/libgomp*.so*"))
    if not libraries:
        pytest.skip("this torch has another OpenMP library than libgomp")
    kept = {name: value for name, value in os.environ.items() if name not in cores.WAITING}
    told = subprocess.run(
        [sys.executable, "-c", SAID, str(libraries[0])],
        env={**kept, **environment, "OMP_DISPLAY_ENV": "TRUE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in told.stderr


def test_who_set_the_time_to_spin_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5000")
    cores.wait_passively()
    assert "OMP_WAIT_POLICY" not in os.environ


def test_helpers_share_the_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "available", lambda: 12)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert cores.of_helper(4) == {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "3", "RAYON_NUM_THREADS": "3"}
    assert cores.of_helper(24)["RAYON_NUM_THREADS"] == "1"
