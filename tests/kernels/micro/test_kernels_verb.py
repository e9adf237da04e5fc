"""`ridgeline kernels` and `ridgeline bench kernels --ladder micro`, run as a user runs them, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from ridgeline.kernels.base.inspection import Inspection
from ridgeline_bench.ladders.micro import tables
from tests.command import run_here

PAGE = Path(__file__).parents[3] / "docs" / "kernels" / "micro.md"


def test_occupancy_says_what_keeps_more_blocks_away() -> None:
    done = run_here("kernels", "occupancy", "--threads", 384, "--registers", 168, "--shared", 196_672, "--json")
    found = json.loads(done.stdout)
    assert (found["blocks"], found["share"], found["limits"]) == (1, 0.1875, ["registers", "shared memory"])
    table = run_here("kernels", "occupancy", "--arch", "gfx1100", "--registers", 96).stdout
    assert "gfx1100: 8 blocks, 100 %" in table


@pytest.mark.parametrize(("arguments", "wrong"), [
    (("occupancy", "--arch", "sm_75"), "the limits of sm_75 are not listed"),
    (("occupancy", "--threads", 2000), "a block has 1 to 1024 threads"),
    (("layout", "hmma"), "no instruction's name contains 'hmma'"),
])  # fmt: skip
def test_a_mistake_gives_one_sentence(arguments: tuple[object, ...], wrong: str) -> None:
    done = run_here("kernels", *arguments)
    assert done.returncode == 2
    assert wrong in done.stderr
    assert "Traceback" not in done.stderr


def test_layouts_are_listed_and_printed() -> None:
    assert "v_mfma_f32_32x32x8_bf16" in run_here("kernels", "layout").stdout.splitlines()
    assert run_here("kernels", "layout", "m64n8").stdout.startswith("wgmma.m64n8k16, bfloat16, since sm_90a\n")


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton compiles the kernels")
NORM = "norm_kernel"


@needs_triton
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "arch", "machine"), [
    (NORM, "sm_90", "sass"), ("merge_kernel", "gfx942", "amdgcn"),
])  # fmt: skip
def test_a_kernel_is_inspected_for_a_gpu_that_is_not_here(name: str, arch: str, machine: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "ridgeline", "kernels", "inspect", name, "--arch", arch]
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = partial(subprocess.run, env=inherited, capture_output=True, text=True, check=False)
    found = json.loads(run([*command, "--json"]).stdout)
    assert {"ttir", "ttgir", "llir", machine} <= found["stages"].keys()
    assert found["spilled"] == 0
    assert 0 < found["registers"] <= 255
    assert sum(found["stages"][machine]["instructions"].values()) > 50
    assert 0 < found["blocks"] <= 64
    assert "no stage 'sasss'" in run([*command, "--stage", "sasss"]).stderr
    passes = [json.loads(line) for line in run([*command, "--passes", "--json"]).stdout.splitlines()]
    assert any(each["removed"].get("tt.load") for each in passes), "a pass makes loads of a GPU of them"
    assert "\n-" in run([*command, "--diff", "tritongpu-remove-layout-conversions"]).stdout
    assert "no pass 'sasss' changed" in run([*command, "--diff", "sasss"]).stderr


@needs_triton
def test_kernels_are_found_by_a_part_of_their_names() -> None:
    assert all("norm" in name for name in run_here("kernels", "list", "norm").stdout.splitlines())
    assert "no kernel's name contains 'nothing such'" in run_here("kernels", "inspect", "nothing such").stderr
    assert f"no kernel whose name contains '{NORM}'" in run_here("kernels", "inspect", NORM, "--arch", "sm_42").stderr


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP0 LDG.E.128 R8, desc[UR4][R2.64] ;
"""


def test_instructions_are_counted_in_machine_code_and_ptx_alone() -> None:
    stages = {"ttir": "tt.load", "ptx": "\tld.global.v4.b32 {%r1}, [%rd1];\n\t@%p1 bra $L;\n", "sass": SASS}
    found = Inspection("kernel", "sm_90", stages, registers=32, spilled=0, shared=1024, threads=128)
    assert found.counts("sass") == {"LDG.E.128": 2, "LDC": 1}
    assert found.counts("ptx") == {"ld.global.v4.b32": 1, "bra": 1}
    assert found.counts("ttir") == {}
    assert found.occupancy.blocks == 16


def test_micros_are_listed_with_their_predictions(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run_here("bench", "kernels", "--ladder", "micro", "--op", "banks", "--device", "cpu", "--out", out)
    assert done.returncode == 0
    assert done.stdout.count("banks") >= 12
    assert not out.exists() or out.read_text() == "", "nothing was measured"
    wrong = run_here("bench", "kernels", "--ladder", "micro", "--op", "bank5", "--device", "cpu", "--out", out)
    assert "no micro's name contains 'bank5'" in wrong.stderr


def test_the_page_has_every_question_with_its_stored_answers() -> None:
    assert tables().strip() in PAGE.read_text()
