"""Probes give rates of the machine they run on, from buffers no cache can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.perf.calibration import GemmRate, read
from ridgeline_bench.machine import matmul, timing
from ridgeline_bench.machine.calibrate import as_calibration, probes
from ridgeline_bench.machine.matmul import operands, precision, product, runs
from ridgeline_bench.machine.probes import Bench, cpu_threads
from ridgeline_bench.machine.timing import QUICK, median_seconds
from tests.command import run_here

CPU = torch.device("cpu")


class Clock:
    """A clock that only `sleep` moves, for times that do not depend on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_the_median_is_that_of_the_call(clock: Clock) -> None:
    assert median_seconds([lambda: clock.sleep(0.005)], CPU, QUICK) == pytest.approx(0.005)


def test_a_batch_counts_each_of_its_calls(clock: Clock) -> None:
    calls = [lambda: clock.sleep(0.002), lambda: clock.sleep(0.006)]
    assert median_seconds(calls, CPU, QUICK) == pytest.approx(0.004)


def test_buffers_exceed_the_cache_and_hold_no_zeros() -> None:
    bench = Bench.of(CPU, QUICK)
    buffer = bench.buffer()
    assert min(1.9 * bench.cache, 0.09 * bench.free) <= buffer.nbytes <= 0.1 * bench.free
    assert buffer.std() > 0.2
    assert bench.copies(bench.cache) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_products_are_products(dtype: str) -> None:
    if not runs(dtype, CPU):
        pytest.skip(f"no {dtype} products here")
    x_MK, w_NK = operands(dtype, 5, 32, 64, CPU)
    exact = x_MK.double() @ w_NK.double().T
    assert torch.allclose(product(dtype, x_MK, w_NK)().double(), exact, rtol=2**-7, atol=0.2)


def test_a_dtype_the_device_cannot_multiply_is_left_out() -> None:
    assert not runs("float4_e2m1fn_x2", CPU)


def test_precision_and_threads_are_restored() -> None:
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    with precision("tf32"), cpu_threads(1):
        assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("high", 1)
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `calibrate --quick --json` prints, of small matrices and as if the cache were small: a large one's buffers
    take a minute of a core."""
    home = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        patch.setattr("ridgeline_bench.machine.probes._cpu_cache", lambda: 1 << 22)
        patch.setitem(matmul.SQUARES, "cpu", (256,))
        patch.setitem(matmul.PROJECTIONS, "cpu", ((2048, 512),))
        done = run_here("calibrate", "--quick", "--json", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        assert Path(printed["path"]).is_relative_to(home)
        yield printed


@pytest.mark.dealt
def test_rates_are_of_a_real_machine(told: dict[str, Any]) -> None:
    """A core moves 1 GB/s to 1 TB/s and does 1 GFLOP/s to 100 TFLOP/s, and a hundredth of the least where
    others have the machine. That seconds are seconds is shown above, on a clock of our own."""
    units = {probe.name: probe.unit for probe in probes(CPU, quick=True)}
    assert told["measured"].keys() == units.keys()
    for name, value in told["measured"].items():
        low, high = {"B/s": (1e7, 1e12), "FLOP/s": (1e7, 1e14)}[units[name]]
        assert low < value < high, name


def test_the_record_keeps_shapes_and_rates() -> None:
    record = as_calibration(CPU, {"read": 2e9, "copy": 3e9, "gemm bfloat16 16x4096x2048": 5e12, "read 1 thread": 1e9})
    assert (record.read, record.copy, record.write) == (2e9, 3e9, None)
    assert record.gemm == (GemmRate(16, 4096, 2048, "bfloat16", 5e12),)
    assert record.device
    assert record.torch == torch.__version__


def test_the_command_keeps_what_it_prints(told: dict[str, Any]) -> None:
    stored = read(Path(told["path"]))
    assert stored.read == told["measured"]["read"] > 0
    assert stored.matrix_rates()["float32"] > 0


def test_an_unknown_device_is_one_sentence() -> None:
    done = run_here("calibrate", "--device", "abacus")
    assert done.returncode == 2
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_two_measurements_of_a_gpu_agree() -> None:
    device = torch.device("cuda")
    wanted = [probe for probe in probes(device) if probe.name in ("read", "copy", "gemm bfloat16 8192x8192x8192")]
    assert len(wanted) == 3
    for probe in wanted:
        assert probe.run() == pytest.approx(probe.run(), rel=0.03)


@pytest.mark.gpu
def test_a_tiny_graph_node_takes_less_than_launching_it() -> None:
    rates = {probe.name: probe.run() for probe in probes(torch.device("cuda"), quick=True) if probe.unit == "s"}
    assert 0 < rates["graph node"] < rates["launch"]
