"""ThunderKittens' kernels as peers: what they get of our arguments, and what is compiled of a checkout."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import paged_attention_reference
from ridgeline_bench.sweep import thunderkittens
from ridgeline_bench.sweep.peers import PeerKernel

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [5, 384, 400])
def test_prompts_are_taken_out_of_the_pages_and_padded(length: int) -> None:
    case = AttentionCase(rows=((length, length),) * 2, head_dim=32, num_heads=4, num_kv_heads=2)
    arguments, options = case.inputs(torch.float32, CPU), case.options(torch.float32, CPU)
    rows = thunderkittens.packed(*arguments, **options)
    assert rows.q_BHND.shape == (2, 4, -(-length // 384) * 384, 32)
    assert rows.k_BGND.shape == rows.v_BGND.shape == (2, 2, *rows.q_BHND.shape[2:])
    out_BHND = F.scaled_dot_product_attention(*rows[:3], is_causal=True, enable_gqa=True)
    want = paged_attention_reference(*arguments, **options)
    torch.testing.assert_close(rows.unpacked(out_BHND), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (AttentionCase(rows=((1, 9),), head_dim=128), "whole prompts"),
        (AttentionCase(rows=((7, 7), (8, 8)), head_dim=128), "one length"),
        (AttentionCase(rows=((7, 7),), head_dim=128, window=3), "plain softmax"),
        (AttentionCase(rows=((7, 7),), head_dim=64), "heads of 128"),
    ],
)
def test_other_attention_is_refused(case: AttentionCase, words: str) -> None:
    peer = PeerKernel(thunderkittens.paged_attention)
    with pytest.raises(AssertionError, match=words):
        peer(*case.inputs(torch.bfloat16, CPU), **case.options(torch.bfloat16, CPU))


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(64, 64, 256), (128, 64, 128), (128, 32, 256)])
def test_a_product_that_is_no_whole_tiles_is_refused(tokens: int, inputs: int, outputs: int) -> None:
    with pytest.raises(ValueError, match="multiples of 128 x 256 x 64"):
        thunderkittens.linear(torch.ones(tokens, inputs), torch.ones(outputs, inputs), None)
    thunderkittens.linear(torch.ones(128, 64), torch.ones(256, 64), None)


def checkout_in(folder: Path) -> Path:
    for file in (thunderkittens.GEMM, thunderkittens.ATTENTION):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"// {file.name}\n#ifdef TORCH_COMPILE\nits binding\n#endif\n")
    return folder


def test_the_build_gets_the_kernels_without_their_bindings(tmp_path: Path) -> None:
    checkout, library = checkout_in(tmp_path / "kittens"), tmp_path / "build" / "some.so"
    nvcc = tmp_path / "nvcc"  # it notes its arguments, and what it would compile
    included = """$(sed -n 's/^#include "\\(.*\\)"/\\1/p' "$each")"""
    nvcc.write_text(
        f'#!/bin/sh\nfor each; do case $each in *.cu) cat "$each" {included};; esac; done > {tmp_path}/seen\n'
        f'echo "$@" > {tmp_path}/asked; touch {library}\n'
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    assert thunderkittens.build(checkout, library, str(nvcc)) == library
    seen, asked = (tmp_path / "seen").read_text(), (tmp_path / "asked").read_text()
    assert "// bf16_h100_gemm.cu" in seen
    assert "// mha_h100.cu" in seen
    assert "its binding" not in seen
    assert {name for name in ("product", "attend") if f'extern "C" int {name}(' in seen} == {"product", "attend"}
    assert "code=sm_90a" in asked
    assert f"-I{checkout}/include" in asked


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no kernels/gemm/bf16_h100"):
        thunderkittens.build(tmp_path, tmp_path / "some.so")
    with pytest.raises(SystemExit, match="nvcc failed"):
        thunderkittens.build(checkout_in(tmp_path), tmp_path / "build" / "some.so", "false")
