"""Experts' products on Hopper: which cuts are chosen, their machine code, and on a GPU every path against the
reference. test_grouped_walk.py is about how programs divide the work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.gemm.experts import op
from ridgeline.kernels.gemm.experts.cases import ExpertsCase
from ridgeline.kernels.gemm.experts.hopper_plans import Stream, Tiles, choose, stream
from ridgeline.kernels.gemm.plain.choose import RING

pytest.importorskip("triton")
from ridgeline.kernels.gemm.experts import hopper

# Plans


def test_every_cut_chosen_fits_the_device() -> None:
    for experts, used, width, inner in (
        (128, 8, 2048, 768),
        (60, 4, 2048, 1408),
        (32, 4, 2880, 2880),
        (8, 2, 4096, 14336),
        (8, 2, 128, 72),
    ):
        for tokens in (1, 2, 8, 33, 64, 200, 512, 1024, 3000, 8192):
            for gated, inputs in ((True, width), (False, inner)):
                plan = choose(tokens * used, experts, inputs, gated=gated)
                if isinstance(plan, Tiles):
                    assert tokens * used > 24 * experts
                    continue
                parts = 2 if gated else 1
                assert (plan.rows * parts + plan.tokens) * plan.block * 2 * plan.stages <= RING
                assert plan.stages >= 3
                assert inputs > plan.block  # Triton 3.6 cannot compile a single block of inputs
                assert plan.tokens % plan.narrow == 0
                assert plan.narrow % 8 == 0
                assert plan.tokens * parts <= 256  # sums in registers, 16 rows a warp


def test_two_programs_on_a_multiprocessor_share_its_registers() -> None:
    plan = stream(64, 32, 8, 64, 2048, gated=True, resident=2)
    assert plan.registers is not None
    assert plan.registers * 32 * (plan.warps + 8) * 2 <= 65_536
    assert plan.stages * (2 * 64 + 32) * 64 * 2 * 2 <= RING


# Machine code


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["first", pytest.param("all", marks=pytest.mark.thorough)])
def test_machine_code_uses_warpgroup_products_and_wide_copies(which: str) -> None:
    """Compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", __file__, which]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[0])
    assert len(found) == {"first": 2, "all": 13}[which]
    for name, counts in found.items():
        eight, coded, promoted = "KIND=fp8" in name, "KIND=e2m1" in name, "SPAN=128" in name
        assert counts["QGMMA" if eight else "HGMMA"] >= 8, name
        assert counts["HMMA"] == counts["HGMMA" if eight else "QGMMA"] == 0
        assert counts["UTMALDG"]
        assert counts["USETMAXREG"]
        wide = counts["LDGSTS.E.BYPASS.128"]  # 16 bytes at a time, past the first-level cache
        assert bool(wide) == ("GATHER=True" in name or "stream" in name)
        assert (counts["LDGSTS.E"] > wide) == (promoted and "stream" in name)  # scales of rows: 4 bytes
        # Two loops, or one for each width of tiles; a product that ptxas serializes has a wait of its own. Promoted
        # sums are awaited at once for each panel, and operands are made while four products are under way.
        parts, panels = 1 + ("GATE=," not in name), 2 if "BLOCK=256" in name else 1
        awaited = 2 * (2 * parts + 1) if coded else 2 * panels if promoted else 4
        assert counts["WARPGROUP.DEPBAR"] == awaited, name
        assert counts["stack"] <= 64  # a role's arguments may be kept there, sums may not


# On a GPU

PLANS = [
    *(stream(64, 16, 8, 64, 2048, gated=True, resident=resident) for resident in (1, 2)),
    stream(64, 32, 16, 64, 2048, gated=True),
    stream(64, 128, 32, 64, 2048, gated=True),
    stream(128, 64, 16, 64, 2048, gated=True),
    Tiles(),
]
CASES = [
    ExpertsCase(1, 256, 128, experts=8, used=2),
    ExpertsCase(8, 2048, 768, experts=128, used=8, add=True),
    ExpertsCase(64, 2048, 768, experts=128, used=8, add=True, skew=3.0, dead=5),
    ExpertsCase(40, 512, 1408, experts=60, used=4, bias=True, gate="gelu_tanh", dead=40),
    ExpertsCase(333, 256, 1536, experts=16, used=1, gate="gelu", skew=9.0, dead=7),
    ExpertsCase(300, 2880, 2880, experts=32, used=4, bias=True, gate="swiglu_clamped"),
    ExpertsCase(1000, 1032, 200, experts=4, used=2, bias=True, add=True, skew=0.5, dead=1),
    ExpertsCase(3000, 512, 264, experts=1, used=1),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "plan", "dtype"),
    [
        *((case, None, torch.bfloat16) for case in CASES),
        *((case, plan, torch.bfloat16) for case in (CASES[2], CASES[6]) for plan in PLANS),
        *((CASES[2], plan, torch.float16) for plan in (None, Tiles())),
    ],
    ids=str,
)
def test_both_ops_equal_the_reference(
    case: ExpertsCase, plan: Stream | Tiles | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NaN in every row of x and h that belongs to no pair, and in memory that was never written."""
    device = torch.device("cuda")
    x_TM, weight_EGM, bias_EG, routes, gate = case.gate_up_inputs(dtype, device)
    h_PF, weight_EMF, bias_EM, _, add_TM = case.down_inputs(dtype, device)
    if not hopper.supports(x_TM, weight_EGM):
        pytest.skip("not a Hopper GPU")
    kept = int(routes.start_E1[-1])
    x_TM[case.tokens - case.dead :] = torch.nan
    h_PF[kept:] = torch.nan
    up = op.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate)
    down = op.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM)
    eps = torch.finfo(dtype).eps
    for _ in range(2):  # the second time flags and tickets must be where the first needed them
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", nan)
            got_up = hopper.grouped_gate_up(x_TM, weight_EGM, bias_EG, routes, gate, plan)
            got_down = hopper.grouped_down(h_PF, weight_EMF, bias_EM, routes, add_TM, plan)
        torch.testing.assert_close(got_up[:kept], up[:kept], rtol=4 * eps, atol=8 * eps)
        torch.testing.assert_close(got_down, down, rtol=4 * eps, atol=8 * eps)


@pytest.mark.gpu
def test_the_sum_of_a_tokens_pairs_is_in_float32_and_in_the_order_of_its_choice() -> None:
    device = torch.device("cuda")
    case = ExpertsCase(50, 2880, 64, experts=16, used=4, add=True, dead=3)
    h_PF, weight_EMF, _, routes, add_TM = case.down_inputs(torch.bfloat16, device)
    y_PM = torch.randn(len(h_PF), case.width, device=device).bfloat16()
    y_PM[int(routes.start_E1[-1]) :] = torch.nan
    assert add_TM is not None
    total = torch.zeros(case.tokens, case.width, device=device)
    for k in range(case.used):
        real_T = routes.expert_TK[:, k] < case.experts
        rows_TM = y_PM[routes.place_TK[:, k].long()].float()
        total[real_T] = torch.addcmul(total, routes.weight_TK[:, k, None], rows_TM)[real_T]
    got = hopper.combine(y_PM, routes, add_TM, len(weight_EMF))
    torch.testing.assert_close(got, (total + add_TM).bfloat16(), rtol=2**-7, atol=0)


def nan(*shape: int, **options: Any) -> Tensor:
    """Fresh memory: what a kernel leaves unwritten, or reads before writing, shows."""
    return torch.full(shape, torch.nan, **options)


def machine_code(which: str) -> dict[str, dict[str, int]]:
    """How often instructions occur, and bytes of stack, in each entry of the list that is for Hopper alone."""
    import triton

    from ridgeline.kernels.base.aot import build

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    wanted = ("HGMMA", "QGMMA", "HMMA", "UTMALDG", "LDGSTS.E", "LDGSTS.E.BYPASS.128", "USETMAXREG", "WARPGROUP.DEPBAR")
    found = {}
    first = {kernel.fn.fn: kernel for kernel in reversed(hopper.AOT)}.values()
    for kernel in first if which == "first" else hopper.AOT:
        if kernel.options.archs != ("sm_90",):
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(build(kernel, "sm_90").asm["cubin"])
            file.flush()

            def run(tool: str, option: str, path: str = file.name) -> str:
                return subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout

            listing, usage = run("nvdisasm", "-c"), run("cuobjdump", "-res-usage")
        counts = {name: len(re.findall(rf"(?<![A-Z]){re.escape(name)}", listing)) for name in wanted}
        counts["stack"] = int(re.findall(r"STACK:(\d+)", usage)[0])
        found[kernel.name] = counts
    return found


if __name__ == "__main__":
    print(json.dumps(machine_code(sys.argv[1])), flush=True)
