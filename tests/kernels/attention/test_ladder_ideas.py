"""The ideas of the fast rungs of attention beside float64, in NumPy; their instructions; their machine code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline.kernels.attention.ladder import ideas
from ridgeline.kernels.attention.ladder.ideas import attend_fp8, attend_tiles, makespan, rotation, tile_order

# ---- powers of 2 ----------------------------------------------------------------------------------------------------

EXPONENTS = np.concatenate([np.linspace(-125, 0, 400_001), np.linspace(0, 8, 20_001)]).astype(np.float32)


def test_a_polynomial_gives_powers_of_two() -> None:
    found, exact = ideas.exp2_polynomial(EXPONENTS).astype(np.float64), np.exp2(EXPONENTS.astype(np.float64))
    worst = np.abs(found / exact - 1).max()
    assert ideas.EXP2_ERROR / 2 < worst <= ideas.EXP2_ERROR
    assert ideas.EXP2_ERROR < 2**-9 / 25, "far below the rounding of weights to bfloat16"
    assert 0 <= ideas.exp2_polynomial(np.float32([-np.inf, -1e30, -200])).max() <= 2.0**-124


def run_ptx(text: str, inputs: list[np.float32]) -> list[np.float32]:
    """Run the few instructions of PTX that rung 7 has, on one lane."""
    found: dict[str, np.uint32] = {f"${i + 4}": np.float32(x).view(np.uint32) for i, x in enumerate(inputs)}

    def bits(name: str) -> np.uint32:
        return np.uint32(int(name[2:], 16)) if name.startswith("0f") else found.get(name, np.uint32(0))

    def number(name: str) -> np.float32:
        return bits(name).view(np.float32)

    for line in re.findall(r"(?<![.\w])[a-z][\w.]+ [^;{}]+(?=;)", text):
        op, _, rest = line.strip().partition(" ")
        to, *of = [each.strip() for each in rest.split(",")]
        if op.startswith("mov"):
            found[to] = bits(of[0])
        elif op == "shl.b32":
            found[to] = np.uint32((int(bits(of[0])) << int(of[1])) & 0xFFFFFFFF)
        elif op == "add.s32":
            found[to] = np.uint32((int(bits(of[0])) + int(bits(of[1]))) & 0xFFFFFFFF)
        else:
            x = [number(each) for each in of]
            value = {
                "ex2": lambda x: np.exp2(x[0]),
                "max": max,
                "add": lambda x: x[0] + x[1],
                "sub": lambda x: x[0] - x[1],
                "fma": lambda x: np.float32(np.float64(x[0]) * np.float64(x[1]) + np.float64(x[2])),
            }[op.partition(".")[0]](x)
            found[to] = np.float32(value).view(np.uint32)
    return [found[f"${i}"].view(np.float32) for i in range(4)]


@pytest.mark.parametrize("polynomials", [1, 2])
def test_the_instructions_of_the_kernel_are_that_polynomial(polynomials: int) -> None:
    tile = pytest.importorskip("ridgeline.kernels.attention.ladder.tile")
    text = tile._assembly(polynomials)
    assert text.count("ex2.approx") == 4 - polynomials
    for x in (-124.9, -30.25, -1.5, -0.4999, 0.0, 0.3, 7.7):
        found = run_ptx(text, [np.float32(x - i * 0.01) for i in range(4)])
        for i, each in enumerate(found):
            exact = np.exp2(np.float64(np.float32(x - i * 0.01)))
            assert abs(each / exact - 1) <= (ideas.EXP2_ERROR if i >= 4 - polynomials else 1e-6)
    assert all(each <= 2.0**-124 for each in run_ptx(text, [np.float32(-np.inf)] * 4)[4 - polynomials :])


# ---- outputs that are seldom rescaled -------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 10.0, 60.0])
def test_a_threshold_changes_no_result(spread: float) -> None:
    draw = np.random.default_rng(3)
    scores, values = draw.normal(size=(16, 256)) * spread, draw.normal(size=(256, 8))
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    exact = weights @ values / weights.sum(1, keepdims=True)
    counts = []
    for threshold in (0.0, 8.0, 1e9):
        if threshold * 1e-6 > spread:
            continue
        found, rescaled = attend_tiles(scores, values, 16, threshold)
        np.testing.assert_allclose(found, exact, rtol=1e-11, atol=1e-13)
        counts.append(rescaled)
    assert counts[1] < counts[0]
    assert spread > 1 or counts[1] == 0, "scores as normal numbers have them never reach the threshold"


# ---- the order of tiles ---------------------------------------------------------------------------------------------


def lengths_of(order: list[tuple[int, int]]) -> Iterator[float]:
    return (tile + 1 for tile, _ in order)


@pytest.mark.parametrize("at_once", [1, 4, 5, 7])
def test_each_tile_begins_once(at_once: int) -> None:
    for longest in (False, True):
        order = tile_order(6, 7, at_once, longest)
        assert sorted(order) == [(tile, head) for tile in range(6) for head in range(7)]
    assert [tile for tile, head in tile_order(6, 7, at_once, True) if head == 6] == [5, 4, 3, 2, 1, 0]


def test_the_longest_tiles_first_end_sooner() -> None:
    for heads in (16, 48, 192):
        first, order = (makespan(lengths_of(tile_order(64, heads, heads, x)), 132) for x in (True, False))
        least = heads * 64 * 65 / 2 / 132
        assert least <= first < order
        assert first <= least * 1.05


# ---- fp8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 64, 128])
def test_a_rotation_keeps_products(size: int) -> None:
    turned = rotation(size, seed=size)
    torch.testing.assert_close(turned @ turned.mT, torch.eye(size, dtype=torch.float64))
    assert torch.unique(turned.abs()).numel() == 1
    with pytest.raises(ValueError, match="48"):
        rotation(48)


def error_of(outliers: float, *options) -> float:
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 4, 512, 64, dtype=torch.float64) for _ in range(3))
    for x in (q, k):
        x[..., 7] *= outliers  # one channel is large in every token
    v[:, :, 100] *= outliers  # and one token's values
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = attend_fp8(q, k, v, *options)
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("outliers", [1.0, 12.0])
def test_blocks_and_a_rotation_are_no_worse_than_plain_fp8(outliers: float) -> None:
    """Plain: one scale for all tokens of a head."""
    plain, both = error_of(outliers, 512, 512), error_of(outliers, 64, 128, rotation(64))
    assert both <= plain * (1.02 if outliers == 1 else 0.4)
    assert both <= 0.05


# ---- machine code ---------------------------------------------------------------------------------------------------

SWITCHES = [
    {},
    {"polynomials": 1},
    {"threshold": True},
    {"longest": True},
    {"fp8": True},
    {"fp8": True, "ahead": True, "threshold": True},
    {"threshold": True, "longest": True, "beside": True},
    {"fp8": True, "threshold": True, "longest": True, "polynomials": 1, "beside": True},
]


@pytest.mark.thorough
def test_machine_code_of_each_switch() -> None:
    """Compiled in a process of its own: in this one kernels may be interpreted."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", __file__, json.dumps(SWITCHES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    plain, polynomial, threshold, _, fp8, _, beside, fp8_beside = found = [
        json.loads(line) for line in run.stdout.splitlines()
    ]
    for each in found:
        assert each["stack"] == 0, "registers are spilled"
        assert each["registers"] <= 168  # of 384 threads that share 65,536; setmaxnreg moves them to the consumers
        assert each["USETMAXREG"]
        assert each["UTMALDG"]
        # Where ptxas fears for the sums, it waits behind every product.
        assert each["WARPGROUP.DEPBAR"] <= (each["HGMMA"] + each["QGMMA"]) / 4
        assert each["MUFU.EX2"] >= 128 * 3 / 4
    assert plain["HGMMA"] == 2 * 2 * (8 + 8)  # both products of two tiles, one of them peeled, in both consumers
    assert fp8["QGMMA"] == plain["HGMMA"] / 2
    assert fp8["HGMMA"] == plain["QGMMA"] == 0
    assert (
        polynomial["MUFU.EX2"] == plain["MUFU.EX2"] - 2 * 64 / 4
    )  # a quarter of a consumer's 64, but not where masked
    assert threshold["FMUL"] >= plain["FMUL"] / 2  # they are there, behind a branch
    # Exponentials between the wait for scores and that for outputs, of 64, and of 48 where others are polynomials.
    assert plain["between"] <= 8
    assert beside["between"] >= 24
    assert fp8_beside["between"] >= 40


def machine_code(switches: dict[str, object]) -> dict[str, int]:
    from ridgeline.kernels.attention.ladder.pingpong import PingpongSwitches, ahead_of_time
    from ridgeline.kernels.base.aot import build, nvidia_code

    compiled = build(ahead_of_time(128, PingpongSwitches(**switches)), "sm_90")
    registers, stack, listing = nvidia_code(compiled.asm["cubin"], True)
    wanted = ("HGMMA", "QGMMA", "UTMALDG", "USETMAXREG", "WARPGROUP.DEPBAR", "MUFU.EX2", "FMUL")
    found = {name: len(re.findall(rf"(?<![A-Z]){re.escape(name)}", listing)) for name in wanted}
    after_scores = listing.split("DEPBAR.LE gsb0, 0x1")[1:]
    between = max((part.split("DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") for part in after_scores), default=0)
    return {**found, "registers": registers, "stack": stack, "between": between}


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print(json.dumps(machine_code(each)), flush=True)
