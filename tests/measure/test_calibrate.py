"""Probes give rates of the machine they run on, from buffers no cache can hold."""

from __future__ import annotations

import time

import pytest
import torch

from ridgeline.measure.calibrate import measure, probes
from ridgeline.measure.matmul import operands, precision, product, runs
from ridgeline.measure.probes import Bench, cpu_threads
from ridgeline.measure.timing import QUICK, median_seconds

CPU = torch.device("cpu")


def test_the_median_is_that_of_the_call() -> None:
    assert median_seconds([lambda: time.sleep(0.005)], CPU, QUICK) == pytest.approx(0.0052, rel=0.15)


def test_a_batch_counts_each_of_its_calls() -> None:
    calls = [lambda: time.sleep(0.002), lambda: time.sleep(0.006)]
    assert median_seconds(calls, CPU, QUICK) == pytest.approx(0.0042, rel=0.15)


def test_buffers_exceed_the_cache_and_hold_no_zeros() -> None:
    bench = Bench.of(CPU, QUICK)
    buffer = bench.buffer()
    assert min(8 * bench.cache, 0.09 * bench.free) <= buffer.nbytes <= 0.1 * bench.free
    assert buffer.std() > 0.2
    assert bench.copies(bench.cache) == 4


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


def test_rates_are_of_a_real_machine() -> None:
    """A core moves between 1 GB/s and 1 TB/s, and does between 1 GFLOP/s and 100 TFLOP/s."""
    for probe, value in measure(CPU, quick=True):
        low, high = {"B/s": (1e9, 1e12), "FLOP/s": (1e8, 1e14)}[probe.unit]
        assert low < value < high, probe.name


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
