"""Linear maps on Hopper: which cuts are chosen, their machine code, and on a GPU every path against the reference.

Tolerances as in test_gemm.py: sums in float32, one rounding of the result, several where the gate multiplies.
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

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.cases import LinearCase
from ridgeline.kernels.gemm.plain.choose import Stream, choose
from ridgeline.kernels.gemm.plain.op import LINEAR

pytest.importorskip("triton")
from ridgeline.kernels.gemm.plain import hopper
from ridgeline.kernels.small.activation.op import gated_activation

MODELS: tuple[tuple[int, int, bool], ...] = (  # outputs, inputs, gated
    *((4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False), (151_936, 1024, False)),
    *((3072, 2048, False), (2048, 2048, False), (8192, 2048, True), (2048, 8192, False), (128_256, 2048, False)),
    *((6144, 4096, False), (4096, 4096, False), (14_336, 4096, True), (4096, 14_336, False), (128_256, 4096, False)),
)
ODD = ((100, 64, False), (72, 1032, False), (1000, 200, True), (53_248, 16_384, True))
SHARED = 232_448
CUTS = [
    Stream(rows=64, tokens=16, block=128, stages=4, split=4),
    Stream(rows=64, tokens=64, block=64, stages=8),
    Stream(rows=128, tokens=32, block=128, stages=2),
    Stream(rows=128, tokens=128, block=64, stages=4, split=8),
    Stream(rows=64, tokens=256, block=64, stages=4, split=2),
]


@pytest.mark.parametrize("processors", [132, 78, 16])
@pytest.mark.parametrize("tokens", [5, 16, 17, 48, 64, 100, 128, 129, 256, 300, 512])
def test_every_cut_chosen_fits_the_device(tokens: int, processors: int) -> None:
    for outputs, inputs, gated in (*MODELS, *ODD):
        cut = choose(tokens, inputs, outputs, gated=gated, hopper=processors)
        if not isinstance(cut, Stream):
            continue
        parts = 2 if gated else 1
        assert (cut.rows * parts + cut.tokens) * cut.block * 2 * cut.stages <= SHARED - 6144  # barriers, turned tiles
        assert cut.stages >= 2
        assert cut.rows in (64, 128)
        assert cut.tokens * parts <= 256  # sums in registers, 16 rows a warp
        assert cut.split & (cut.split - 1) == 0
        assert cut.split <= min(cut.tokens, -(-inputs // cut.block))
        tiles = -(-outputs // cut.rows) * -(-tokens // cut.tokens)
        assert cut.split == 1 or tiles * cut.split <= processors  # a share of the inputs is for what would be idle


def test_it_is_for_hopper_only() -> None:
    assert isinstance(choose(64, 4096, 14_336, gated=True, hopper=132), Stream)
    assert choose(64, 4096, 14_336, gated=True) is None
    assert choose(64, 4096, 14_336, gated=True, hopper=132, itemsize=4) is None
    assert (
        choose(64, 4100, 14_336, gated=True, hopper=132) is None
    )  # rows of a bulk copy begin at multiples of 16 bytes


@pytest.mark.dealt
def test_machine_code_uses_warpgroup_products_and_bulk_copies() -> None:
    """Compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    for found in json.loads(run.stdout.splitlines()[0]):
        assert found["HGMMA"] >= 4  # a panel's 64 inputs, 16 at a time
        assert found["HMMA"] == 0
        assert found["UTMALDG"]
        assert found["USETMAXREG"]
        assert found["LDL"] == found["STL"] == 0
        assert found["WARPGROUP.DEPBAR"] == 2  # a product that ptxas serializes is followed by a wait of its own


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gate", "dtype"),
    [
        (None, torch.bfloat16),
        (None, torch.float16),
        ("silu", torch.bfloat16),
        ("gelu", torch.float16),
        ("gelu_tanh", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_cut_equals_the_reference(
    cut: Stream, gate: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    if gate and cut.tokens == 256:
        pytest.skip("more sums than registers")
    eps = torch.finfo(dtype).eps
    for seed, (tokens, inputs, outputs, bias) in enumerate(
        (
            (1, 512, 64, False),
            (cut.tokens - 3, 1032, 72, True),
            (2 * cut.tokens, 2048, 520, True),
            (17, 4096, 1024, False),
            (9 * cut.tokens, 1024, 1024, False),  # more programs than run at once
        )
    ):
        rows = 2 * outputs if gate else outputs
        x_TI, weight_OI, bias_O = LinearCase(tokens, inputs, rows, bias).inputs(dtype, device, seed)
        x_TI = torch.cat([x_TI, torch.full_like(x_TI, torch.nan)], 1)[:, :inputs]  # rows of a wider tensor
        expected = x_TI.double() @ weight_OI.double().T + (0 if bias_O is None else bias_O.double())
        if gate:
            expected = gated_activation(expected, gate)
        buffer = (32 if gate else 4) * eps + 4 * inputs * 2.0**-24
        for _ in range(2):  # the second time the counters must be where the first needed them
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", nan)
                got = hopper.launch_stream(cut, x_TI, weight_OI, bias_O, gate)
            torch.testing.assert_close(got.double(), expected.double(), rtol=4 * eps, atol=buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 64, 128, 200])
def test_chosen_cuts_equal_the_reference(tokens: int) -> None:
    device = torch.device("cuda")
    for case in (
        LinearCase(tokens, 1024, 4096),
        LinearCase(tokens, 3072, 1024, bias=True),
        LinearCase(tokens, 8192, 2048),
    ):
        arguments = case.inputs(torch.bfloat16, device)
        got = LINEAR.choose(Platform.of(device))(*arguments)
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(got, LINEAR.reference(*arguments), rtol=4 * eps, atol=5 * eps)


def nan(*shape: int, **options: Any) -> Tensor:
    """Fresh memory: what a kernel leaves unwritten, or reads before writing, shows."""
    return torch.full(shape, torch.nan, **options)


def machine_code() -> list[dict[str, int]]:
    """How often instructions occur in each kernel of the list."""
    import triton

    from ridgeline.kernels.base.aot import build

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    wanted = ("HGMMA", "HMMA", "UTMALDG", "USETMAXREG", "LDL", "STL", "WARPGROUP.DEPBAR")
    counts = []
    for kernel in hopper.AOT:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(build(kernel, "sm_90").asm["cubin"])
            file.flush()
            listing = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        counts.append({name: len(re.findall(rf"(?<![A-Z]){re.escape(name)}", listing)) for name in wanted})
    return counts


if __name__ == "__main__":
    print(json.dumps(machine_code()), flush=True)
