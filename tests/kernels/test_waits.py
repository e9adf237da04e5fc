"""Planted waits for other programs of a launch are found in machine code, and no other loops.

What `waits` finds in the kernels of `AOT` lists is in test_compile.py, which compiles them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl

from ridgeline.kernels.attention.ladder import short_layer
from ridgeline.kernels.base.aot import AotKernel, build
from ridgeline.kernels.base.waits import waits

KERNELS = Path(__file__).parents[2] / "ridgeline/kernels"


@triton.jit
def counts_arrivals(flag_ptr, out_ptr):
    arrived = tl.atomic_add(flag_ptr, 1, sem="acq_rel")
    while arrived < tl.num_programs(0):
        arrived = tl.atomic_add(flag_ptr, 0, sem="acquire")
    tl.store(out_ptr, arrived)


@triton.jit
def swaps(flag_ptr, out_ptr):
    while tl.atomic_cas(flag_ptr, 0, 1) != 0:
        pass
    tl.store(out_ptr, 1)


@triton.jit
def looks_at_words(flag_ptr, out_ptr):
    at = tl.arange(0, 128)
    found = tl.load(flag_ptr + at, volatile=True)
    while tl.max((found == 0).to(tl.int32), 0) > 0:
        found = tl.load(flag_ptr + at, volatile=True)
    tl.store(out_ptr + at, found)


@triton.jit
def loads_plainly(flag_ptr, out_ptr):
    found = tl.load(flag_ptr, cache_modifier=".cg")
    while found == 0:
        found = tl.load(flag_ptr, cache_modifier=".cg")
    tl.store(out_ptr, found)


@triton.jit
def waits_for_each(flag_ptr, out_ptr):
    for other in range(tl.num_programs(0)):
        done = 0
        while done == 0:
            if tl.atomic_add(flag_ptr + other, 0, sem="acquire") > 7:
                done = tl.load(out_ptr + other) + 1
        tl.store(out_ptr + other, done)


@triton.jit
def takes_tickets(flag_ptr, out_ptr):
    ticket = tl.program_id(0)
    while ticket < 1000:
        tl.store(out_ptr + ticket, ticket)
        ticket = tl.atomic_add(flag_ptr, 1, sem="relaxed") + tl.num_programs(0)


@triton.jit
def follows_a_list(flag_ptr, out_ptr):
    at = tl.load(flag_ptr)
    while at > 0:
        tl.store(out_ptr + at, at)
        at = tl.load(flag_ptr + at)


@triton.jit
def arrives_last(flag_ptr, out_ptr):
    for item in range(tl.program_id(0), 1000, tl.num_programs(0)):
        if tl.atomic_add(flag_ptr + item, 0, sem="acquire") == 7:
            tl.store(out_ptr + item, tl.atomic_add(flag_ptr + item, 1, sem="acq_rel"))


WAIT = (counts_arrivals, swaps, looks_at_words, loads_plainly, waits_for_each)
GO_ON = (takes_tickets, follows_a_list, arrives_last)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """The waits of each kernel here, compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS.parents[1])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout.splitlines()[0]))


@pytest.mark.dealt
@pytest.mark.parametrize("name", [kernel.__name__ for kernel in WAIT])
def test_a_planted_wait_is_found(name: str, found: dict[str, list[str]]) -> None:
    assert found[name], name


@pytest.mark.parametrize("name", [kernel.__name__ for kernel in GO_ON])
def test_a_loop_that_goes_on_is_no_wait(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


def test_sources_in_cuda_wait_in_cooperative_launches_alone() -> None:
    """Of `wait_for_counter`, the one function of CUDA C++ that waits for other blocks, the persistent step alone makes
    use. It and the layer that meets inside a kernel are launched cooperatively."""
    sources = [path for kind in ("*.cu", "*.cuh", "*.hip") for path in KERNELS.rglob(kind)]
    waiting = {path.name for path in sources if "wait_for_counter" in path.read_text()}
    assert waiting == {"ptx.cuh", "persistent.cu"}
    asks = re.compile(r"ld\.(acquire|relaxed|volatile)|atom\.|atomic\w+\(|__ld(cv|cg)|volatile \w+ \*")
    loops = [
        (path.name, line)
        for path in sources
        for line in re.findall(r"\b(?:while|do)\b[^;]*;", path.read_text())
        if asks.search(line)
    ]
    assert [name for name, _ in loops] == ["ptx.cuh"], loops
    launch = (KERNELS / "step/persistent/cuda/run.py").read_text()
    assert re.findall(r"\.launch\([^\n]*", launch)
    assert all("together=True" in line for line in re.findall(r"\.launch\([^\n]*", launch))
    assert '{"launch_cooperative_grid": True} if attend and project' in inspect.getsource(short_layer)


if __name__ == "__main__":
    both = {"flag_ptr": "*i32", "out_ptr": "*i32"}
    print(
        json.dumps(
            {each.__name__: waits(build(AotKernel(each, both, {}), "sm_90").asm["ptx"]) for each in (*WAIT, *GO_ON)}
        )
    )
