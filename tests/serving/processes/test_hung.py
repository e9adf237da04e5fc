"""A process that hangs is replaced; one that works, waits for a core, or was suspended with its watcher is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ridgeline.core.silence import Silence
from ridgeline.serving.processes.keeper import ChildProcess, GaveUp, Keeper
from ridgeline.serving.processes.pulse import Patience
from tests.serving.conftest import PATIENCE
from tests.serving.processes.lively import Script

SHORT = Patience(silence=1.0, step=1.0, grace=0.1, period=0.05)


def keeper(script: Script, patience: Patience = SHORT, hung: list[tuple[int, str]] | None = None) -> Keeper:
    """The keeper of a process that does what the script says. hung: gets what the keeper says of those that hang."""
    notes = [] if hung is None else hung
    settings = msgspec.json.encode(script)
    return Keeper(
        ChildProcess("child", "tests.serving.processes.lively", lambda life: settings),
        patience=patience,
        on_hung=lambda pid, why: notes.append((pid, why)),
    )


async def lives_for(kept: Keeper, seconds: float, hung: list[tuple[int, str]]) -> None:
    """Let the keeper work for so long after its process is ready, or until it has said that one hangs, and end it."""
    keeping = asyncio.create_task(kept.keep())
    try:
        await asyncio.wait_for(kept.ready.wait(), PATIENCE)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not hung:
            await asyncio.sleep(0.05)
    finally:
        kept.kill()
        await asyncio.wait_for(keeping, PATIENCE)


@pytest.mark.thorough
def test_what_hangs_again_and_again_is_given_up_in_words() -> None:
    hung: list[tuple[int, str]] = []
    kept = keeper(Script(stop=True), hung=hung)
    with pytest.raises(
        GaveUp, match=r"the child has given no sign of life for .* taken to hang 3 times within"
    ) as ended:
        asyncio.run(asyncio.wait_for(kept.keep(), PATIENCE))
    assert ended.value.code == 1
    assert len({pid for pid, _ in hung}) == 3
    assert not any(os.path.exists(f"/proc/{pid}") for pid, _ in hung)


@pytest.mark.few(1)
@pytest.mark.parametrize("bound", [0.0, 60.0], ids=["silent", "announced"])
def test_a_long_step_is_a_hang_unless_it_was_announced(bound: float) -> None:
    """A step that compiles: 2.5 times as long as steps may take, which the process says before."""
    hung: list[tuple[int, str]] = []
    asyncio.run(lives_for(keeper(Script(step=2.5, bound=bound), hung=hung), 3.0 if bound else PATIENCE, hung))
    told = {why.partition(" for ")[0] for _, why in hung}
    assert told == (set() if bound else {"has not ended a step"})


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    now = [0.0]
    clock = Silence(os.getpid(), 0.25, lambda: now[0])

    def look(after: float, *, heard: bool = False) -> float:
        now[0] += after
        return clock.look(heard=heard)

    assert look(0.25, heard=True) == 0.0
    assert look(0.25) == 0.25
    assert look(86_400.0) == 0.75, "a look that comes late counts two periods"
    assert look(0.25, heard=True) == 0.0
    look(0.1, heard=True)  # before a look is due
    assert look(0.15) == 0.0, "a sign of life between two looks is none that was missed"


@contextlib.contextmanager
def busy(core: int, number: int) -> Iterator[None]:
    """Processes that leave no other process anything of a core."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waits for a core")
def test_a_process_without_a_core_does_not_hang() -> None:
    """It is ready to run all the time, and gets a thousandth of a core that four others keep busy."""
    core = min(os.sched_getaffinity(0))

    async def starve() -> None:
        hung: list[tuple[int, str]] = []
        kept = keeper(Script(spin=True), hung=hung)
        keeping = asyncio.create_task(kept.keep())
        await asyncio.wait_for(kept.ready.wait(), PATIENCE)
        assert kept._process is not None
        longest = 0.0
        with busy(core, 4):
            for thread in os.listdir(f"/proc/{kept._process.pid}/task"):
                os.sched_setaffinity(int(thread), [core])
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
            before, since = 0, time.monotonic()
            until = since + PATIENCE
            while longest < 1.5 and time.monotonic() < until:
                await asyncio.sleep(0.05)
                if (now := turns(kept)) != before:
                    before, since = now, time.monotonic()
                longest = max(longest, time.monotonic() - since)
        kept.kill()
        await asyncio.wait_for(keeping, PATIENCE)
        assert hung == []
        assert longest > 1.0, "nobody took its core away"

    asyncio.run(starve())


def turns(kept: Keeper) -> int:
    """The nanoseconds that the process's first thread has run for."""
    assert kept._process is not None
    return int(Path(f"/proc/{kept._process.pid}/schedstat").read_text().split()[0])


WATCHER = """
import asyncio, sys
from ridgeline.serving.processes.keeper import ChildProcess, Keeper
from ridgeline.serving.processes.pulse import Patience

async def main():
    hung = []
    patience = Patience(silence=1.0, step=1.0, grace=0.1, period=0.05)
    kept = Keeper(ChildProcess("child", "tests.serving.processes.lively", lambda life: b"{}"), patience=patience,
                  on_hung=lambda pid, why: hung.append(why))
    keeping = asyncio.create_task(kept.keep())
    await kept.ready.wait()
    print(kept._process.pid, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await asyncio.sleep(1.5)
    print(kept._process.pid, hung, flush=True)
    kept.kill()
    await keeping

asyncio.run(main())
"""


@pytest.mark.dealt
def test_a_suspended_group_goes_on_as_if_nothing_had_been() -> None:
    """A watcher and its process are stopped for longer than either bound, and go on."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WATCHER], stdin=pipe, stdout=pipe, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        child = int(watcher.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.15)  # so that the watcher has seen the last sign of life
        os.kill(watcher.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(watcher.pid, signal.SIGCONT)  # it finds a process that has not spoken for long
        time.sleep(0.15)
        os.kill(child, signal.SIGCONT)
        watcher.stdin.write("\n")
        watcher.stdin.flush()
        assert watcher.stdout.readline().strip() == f"{child} []"
        assert watcher.wait(PATIENCE) == 0
