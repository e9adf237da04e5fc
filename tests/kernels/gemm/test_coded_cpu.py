"""Weights in codes multiplied by compiled C++ on a CPU, against float64.

The oracle rounds activations itself, each 32 inputs to steps of 1/127 of their largest magnitude, and multiplies in
float64 with the weight that the reference dequantizes. What is left are float32 sums (of terms of order one:
I · 2**-24), scales in float16 (2**-11 of a group's part; eight of these add up), NF4's table in steps of 1/127
(half of one for each weight, so 1/254 · Σ|x| · scale), and the result's own rounding.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base import native
from ridgeline.kernels.base.op import Platform, has_byte_products
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes import cases, op, panels
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.int8.cases import W8A8_CASES, W8A8Case
from ridgeline.kernels.gemm.int8.op import w8a8_linear
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.ops import Ops
from ridgeline.quantization import SCHEMES
from ridgeline.quantization.scheme import scheme
from ridgeline.quantization.w4a16 import round_to_levels

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_compiler = pytest.mark.skipif(
    not (has_byte_products(HERE) and native.has_compiler()), reason="no C++ compiler, or a CPU without AVX2"
)
Q8_0 = CodedFormat(bits=8, group=32)
CASES = [
    *cases.CASES,
    CodedCase(1, 96, 1, CodedFormat(bits=4, group=96)),  # odd sizes: one output, a group of three runs
    CodedCase(5, 48, 17, op.NVFP4, scales=torch.float8_e4m3fn),  # half a run at the end
    CodedCase(3, 40, 33, CodedFormat(bits=8, group=0), bias=True),
    CodedCase(13, 160, 50, Q8_0, bias=True),
    CodedCase(31, 256, 40, op.Q4_K),  # tiles, where the CPU has them
    CodedCase(33, 256, 17, op.Q6_K, bias=True),
    CodedCase(25, 64, 1, op.NF4),
    CodedCase(530, 1152, 280, op.W4),  # tiles of several blocks of tokens, inputs and outputs, none of them whole
]


@pytest.fixture(scope="module", params=["native", "haswell"])
def multiply(request: pytest.FixtureRequest) -> panels.Multiply:
    """The functions for this machine, and for one with AVX2 alone."""
    function = panels.multiply(request.param)
    if function is None:
        pytest.skip("no C++ compiler")
    return function


def rounded(x_TI: Tensor, order_I: Tensor | None) -> Tensor:
    """Each run of 32 inputs in steps of its largest magnitude over 127. Halves are told from less in float32."""
    columns_TI = x_TI.float() if order_I is None else x_TI.float()[:, order_I.long()]
    runs = torch.nn.functional.pad(columns_TI, (0, -columns_TI.shape[1] % 32)).unflatten(1, (-1, 32))
    step = runs.abs().amax(2, keepdim=True) / 127
    steps = torch.where(step == 0, 0, torch.floor(runs / step + 128.5) - 128)
    near_TI = (steps.double() * step.double()).flatten(1)[:, : x_TI.shape[1]]
    return near_TI if order_I is None else torch.empty_like(near_TI).index_copy_(1, order_I.long(), near_TI)


def expected(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    y_TO = x_TI.double() @ weight.dequantized().double().T
    return y_TO if bias_O is None else y_TO + bias_O.double()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_rounded_activations(
    case: CodedCase, dtype: torch.dtype, multiply: panels.Multiply
) -> None:
    x_TI, weight, bias_O = case.inputs(dtype, CPU)
    packed = panels.pack(weight, multiply)
    assert packed is not None
    got_TO = panels.linear(x_TI, packed, bias_O)
    assert got_TO.dtype == dtype
    want_TO = expected(rounded(x_TI, weight.order_I), weight, bias_O)
    eps, inputs = torch.finfo(dtype).eps, case.in_width
    size_TO = x_TI.double().abs() @ weight.dequantized().double().abs().T
    loose_TO = 4 * eps * (1 + want_TO.abs()) + inputs * 2.0**-24 + 2.0**-10 * size_TO
    if case.format.values == "nf4":
        loose_TO += x_TI.double().abs().sum(1, keepdim=True) * weight.scales()[0].abs().max().item() / 254
    if dtype == torch.bfloat16 and case.tokens >= 24:  # in tiles x stays as it is, and weights are rounded to its dtype
        loose_TO += size_TO * (eps + 1 / 127)
    assert ((got_TO.double() - want_TO).abs() <= loose_TO).all()


def assert_exact(packed: panels.Panels, level_OI: Tensor) -> None:
    """Assert that tokens of the largest activations, in the same and in random directions, give what levels say."""
    sign_TI = torch.randint(0, 2, (15, level_OI.shape[1]), generator=torch.Generator().manual_seed(1)) * 2 - 1
    sign_TI[0], sign_TI[1] = 1, -1
    for x_TI in (sign_TI * 127, sign_TI[:1] * 127, sign_TI[1:2] * 127):  # as tiles of 8, 4, 2 and 1 tokens
        assert torch.equal(panels.linear(x_TI.float(), packed, None).long(), x_TI @ level_OI.T)


@needs_compiler
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("bits", "values"), [(2, "levels"), (3, "levels"), (4, "levels"), (5, "levels"), (6, "levels"),
                                              (8, "levels"), (4, "iq4")])  # fmt: skip
def test_sums_of_the_largest_codes_and_activations_are_exact(
    bits: int, values: Any, group: int, multiply: panels.Multiply
) -> None:
    """Sums of few bits, in which a CPU may hold products for a while, would overflow here first. All numbers are whole:
    activations of ±127 have a step of 1."""
    generator = torch.Generator().manual_seed(0)
    code_OI = torch.randint(0, 2, (40, 256), generator=generator) * ((1 << bits) - 1)
    code_OI[0], code_OI[1] = 0, (1 << bits) - 1
    scale_OG, form = torch.ones(40, 256 // group), CodedFormat(bits=bits, group=group, values=values)
    packed = panels.pack(Coded(op.packed(code_OI, bits), scale_OG, None, None, None, None, None, form), multiply)
    level_OI = torch.tensor(op.TABLES["iq4"])[code_OI].long() if values == "iq4" else code_OI - (1 << bits - 1)
    assert packed is not None
    assert_exact(packed, level_OI)


@needs_compiler
def test_sums_of_the_largest_levels_are_exact(multiply: panels.Multiply) -> None:
    level_OI = torch.randint(0, 2, (40, 256), generator=torch.Generator().manual_seed(0)) * 255 - 128
    level_OI[0], level_OI[1] = -128, 127
    packed = panels.pack_levels(Levels(level_OI.to(torch.int8), torch.ones(40)), multiply)
    assert packed is not None
    assert_exact(packed, level_OI)


@needs_compiler
@pytest.mark.parametrize("case", [c for c in CASES if c.in_width >= 256], ids=str)
def test_rounding_activations_costs_less_than_a_hundredth(case: CodedCase) -> None:
    """Of the outputs' norm. Rounding to steps of 1/127 of the largest of 32 normal numbers (about 2.1) errs by a
    standard deviation of 2.1/127/√12 = 0.5 %."""
    x_TI, weight, bias_O = case.inputs(torch.float32, CPU)
    got_TO, want_TO = panels.coded_linear(x_TI, weight, bias_O).double(), expected(x_TI, weight, bias_O)
    assert (got_TO - want_TO).norm() < 0.012 * want_TO.norm()
    assert not torch.equal(got_TO.float(), want_TO.float())


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("ordered", [True, False])
def test_the_norm_before_and_the_gate_behind(tokens: int, gate: str | None, ordered: bool, dtype: torch.dtype) -> None:
    case = CodedCase(tokens, 256, 64, op.W4, bias=True, ordered=ordered)
    x_TI, weight, bias_O = case.inputs(dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    residual_TI = torch.randn(x_TI.shape, generator=generator).to(dtype)
    norm_I = 0.5 + torch.rand(256, generator=generator)
    for residual, norm in ((None, norm_I.to(dtype)), (residual_TI, norm_I)):
        operand, epilogue = Operand(x_TI, residual, norm, 1e-6), Epilogue(bias_O, gate)
        y_TO, s_TI = panels.coded_norm_linear(operand, weight, epilogue)
        want_TO, want_TI = op.coded_norm_linear(operand, weight, epilogue)
        assert torch.equal(s_TI, want_TI)
        error = (y_TO.double() - want_TO.double()).norm() / want_TO.double().norm()
        assert error < 0.012 + 2 * torch.finfo(dtype).eps


def assert_bits_of_each_alone(packed: panels.Panels, x_TI: Tensor, bias_O: Tensor) -> None:
    """Assert that tokens get the bits together that each gets alone, with a norm and a residual too."""
    residual_TI, norm_I = x_TI.flip(0, 1).contiguous(), (0.5 + torch.rand(x_TI.shape[1])).to(x_TI.dtype)
    for residual, norm in ((None, None), (residual_TI, norm_I)):
        rows = zip(x_TI.split(1), x_TI.split(1) if residual is None else residual.split(1), strict=True)
        operands = [Operand(x, None if residual is None else r, norm, 1e-6) for x, r in rows]
        each = [panels.product(operand, packed, bias_O) for operand in operands]
        alone = torch.cat([y for y, _ in each]), torch.cat([s for _, s in each])
        for tokens in (2, 3, 4, 5, 8, 13, len(x_TI)):
            some = None if residual is None else residual[:tokens]
            together = panels.product(Operand(x_TI[:tokens], some, norm, 1e-6), packed, bias_O)
            for got, want in zip(together, alone, strict=True):
                assert torch.equal(got, want[:tokens]), tokens


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_depends_on_no_other_whatever_the_format(dtype: torch.dtype, multiply: panels.Multiply) -> None:
    tokens = 21 if dtype == torch.bfloat16 else 41  # of more in bfloat16, tiles take the activations as they are
    minima = CodedFormat(bits=5, group=32, zeros="minimum")
    for form in (Q8_0, op.W4, op.W4_ZEROS, minima, op.Q4_K, op.Q6_K, op.NF4, op.NVFP4):
        x_TI, weight, bias_O = CodedCase(tokens, 512, 40, form, bias=True, scales=torch.float32).inputs(dtype, CPU)
        packed = panels.pack(weight, multiply)
        assert packed is not None
        assert bias_O is not None
        assert_bits_of_each_alone(packed, x_TI, bias_O)
    x_TI, levels, bias_O = W8A8Case(41, 512, 40, bias=True).inputs(dtype, CPU)
    packed = panels.pack_levels(levels, multiply)
    assert packed is not None
    assert bias_O is not None
    assert_bits_of_each_alone(packed, x_TI, bias_O)


@needs_compiler
def test_a_token_depends_on_no_thread() -> None:
    x_TI, weight, bias_O = CodedCase(21, 512, 200, op.Q4_K, bias=True).inputs(torch.bfloat16, CPU)
    packed = panels.pack(weight)
    assert packed is not None
    whole_TO = panels.linear(x_TI, packed, bias_O)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(panels.linear(x_TI, packed, bias_O), whole_TO)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("tokens", [4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_in_its_row(tokens: int, dtype: torch.dtype) -> None:
    x_TI, weight, _ = CodedCase(tokens, 256, 48, op.W4).inputs(dtype, CPU)
    x_TI[1, 3], x_TI[2, 200] = torch.nan, torch.inf
    levels = Levels(torch.ones(48, 256, dtype=torch.int8), torch.ones(48))
    for packed in (panels.pack(weight), panels.pack_levels(levels)):
        assert packed is not None
        finite_TO = torch.isfinite(panels.linear(x_TI, packed, None))
        assert not finite_TO[1].any()
        assert not finite_TO[2].any()
        assert finite_TO[0].all()
        assert finite_TO[3:].all()


@needs_compiler
def test_zeros_give_zeros_and_no_tokens_nothing() -> None:
    _, weight, _ = CodedCase(1, 256, 48, op.Q4_K).inputs(torch.float32, CPU)
    packed = panels.pack(weight)
    assert packed is not None
    assert not panels.linear(torch.zeros(3, 256), packed, None).any()
    assert panels.linear(torch.zeros(0, 256), packed, None).shape == (0, 48)


@needs_compiler
def test_inputs_may_lie_anywhere_and_are_not_written() -> None:
    x_TI, weight, bias_O = CodedCase(3, 256, 40, op.W4, bias=True).inputs(torch.bfloat16, CPU)
    packed = panels.pack(weight)
    assert packed is not None
    want_TO = panels.linear(x_TI, packed, bias_O)
    odd = torch.zeros(x_TI.numel() + 1, dtype=x_TI.dtype)[1:].view(3, 256).copy_(x_TI)
    strided = torch.zeros(3, 512, dtype=x_TI.dtype)[:, ::2].copy_(x_TI)
    assert odd.data_ptr() % 4
    for given in (odd, strided):
        assert torch.equal(panels.linear(given, packed, bias_O), want_TO)
        assert torch.equal(given, x_TI)


@needs_compiler
def test_inputs_that_do_not_fit_the_weight_are_refused() -> None:
    _, weight, _ = CodedCase(1, 256, 40, op.W4).inputs(torch.float32, CPU)
    packed = panels.pack(weight)
    assert packed is not None
    for x_TI, bias_O in ((torch.zeros(1, 255), None), (torch.zeros(1, 256).double(), None),
                         (torch.zeros(1, 256), torch.zeros(39))):  # fmt: skip
        with pytest.raises(ValueError, match="the product needs"):
            panels.linear(x_TI, packed, bias_O)


@needs_compiler
@pytest.mark.parametrize("case", [*W8A8_CASES, W8A8Case(530, 1100, 280, bias=True)], ids=str)
def test_levels_in_panels_multiply_like_the_reference(case: W8A8Case, multiply: panels.Multiply) -> None:
    for dtype in DTYPES:
        x_TI, levels, bias_O = case.inputs(dtype, CPU)
        packed = panels.pack_levels(levels, multiply)
        assert packed is not None
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(
            panels.linear(x_TI, packed, bias_O), w8a8_linear(x_TI, levels, bias_O),
            rtol=4 * eps, atol=4 * eps + case.in_width * 2.0**-24,
        )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("values", [name for name, table in op.TABLES.items() if len(table) == 16])
def test_every_table_has_its_own_values(values: Any) -> None:
    """Multiplied as levels, bitsandbytes' FP4 was wrong by ten times the result."""
    generator = torch.Generator().manual_seed(0)
    code_OB = torch.randint(0, 256, (32, 128), generator=generator, dtype=torch.uint8)
    scale_OG, x_TI = torch.rand(32, 4, generator=generator), torch.randn(3, 256, generator=generator)
    form = CodedFormat(bits=4, group=64, values=values)
    weight = Coded(code_OB, scale_OG, None, None, None, None, None, form)
    got_TO, want_TO = panels.coded_linear(x_TI, weight, None).double(), expected(x_TI, weight, None)
    assert (got_TO - want_TO).norm() < 0.012 * want_TO.norm()


def test_groups_that_fit_into_no_run_are_multiplied_all_the_same() -> None:
    x_TI, weight, _ = CodedCase(2, 80, 24, CodedFormat(bits=4, group=40)).inputs(torch.float32, CPU)
    assert panels.pack(weight) is None
    torch.testing.assert_close(panels.coded_linear(x_TI, weight, None), op.coded_linear(x_TI, weight, None))


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (96, 32), (40, 8)])
def test_w4a16_errs_by_at_most_one_step_of_the_group(inputs: int, group: int) -> None:
    weight_OI = torch.randn(24, inputs, generator=torch.Generator().manual_seed(0))
    weight_OI[3] = 0
    coded = round_to_levels(weight_OI)
    assert coded is not None
    assert coded.format == CodedFormat(bits=4, group=group)
    groups = weight_OI.unflatten(1, (-1, group))
    error = (coded.dequantized() - weight_OI).unflatten(1, (-1, group)).abs()
    step = groups.abs().amax(2, keepdim=True) / 8
    largest = error > step * 0.51  # where the level 8, which there is not, would have been the nearest
    assert (error <= step * 1.01).all()
    assert largest.float().mean() < 0.02
    assert not coded.dequantized()[3].any()


def test_w4a16_leaves_what_has_no_groups() -> None:
    weight_OI = torch.ones(4, 12)
    assert scheme("w4a16").prepare(Ops(HERE), weight_OI).stored is weight_OI


def test_schemes_take_panels_where_they_can_be_compiled() -> None:
    weight_OI = torch.randn(40, 256).to(torch.bfloat16)
    prepared = [SCHEMES[name].prepare(Ops(HERE), weight_OI) for name in ("w4a16", "w8a8")]
    if panels.multiply() is not None and has_byte_products(HERE):
        assert all(isinstance(weight.form, panels.Panels) for weight in prepared)
        assert prepared[0].nbytes < weight_OI.nbytes / 3
    x_TI = torch.randn(2, 256).to(torch.bfloat16)
    want_TO = x_TI.float() @ weight_OI.float().T
    for weight, error in zip(prepared, (0.2, 0.03), strict=True):
        assert (weight.linear(x_TI, None).float() - want_TO).norm() < error * want_TO.norm()


WITHOUT_COMPILER = """
import torch
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.scheme import scheme
weight = torch.randn(40, 256)
x = torch.randn(2, 256)
for name, error in (("w4a16", 0.2), ("w8a8", 0.03)):
    got = scheme(name).prepare(Ops(Platform(device_type="cpu")), weight).linear(x, None)
    assert (got - x @ weight.T).norm() < error * (x @ weight.T).norm(), name
"""


@pytest.mark.dealt
def test_without_a_compiler_other_products_serve_and_a_line_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    ran = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    if has_byte_products(HERE):
        assert ran.stderr.count("no C++ compiler was found") == 1
        assert "held as plain numbers" in ran.stderr


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of libraries, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._folder.cache_clear()
    native.library.cache_clear()
    yield tmp_path / "cache" / "ridgeline" / "native"
    native._folder.cache_clear()
    native.library.cache_clear()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    source = tmp_path / "two.cpp"
    source.write_text('#include "three.h"\nextern "C" int two() { return THREE - 1; }')
    (tmp_path / "three.h").write_text("#define THREE 3\n")
    return source


@needs_compiler
def test_a_header_that_changes_makes_another_library(two: Path, cache_folder: Path) -> None:
    first = native.compiled(two, "native")
    two.with_name("three.h").write_text("#define THREE 4\n")
    assert native.compiled(two, "native") != first


@needs_compiler
def test_threads_that_compile_at_once_all_get_the_library(two: Path, cache_folder: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda _: native.compiled(two, "native"), range(4)))
    assert [*cache_folder.iterdir()] == [paths[0]]
    assert set(paths) == {paths[0]}


@needs_compiler
def test_a_damaged_library_is_compiled_again(two: Path, cache_folder: Path) -> None:
    path = native.compiled(two, "native")
    path.write_bytes(path.read_bytes()[:40])
    library = native.library(two)
    assert library is not None
    assert library.two() == 2


@pytest.mark.skipif(sys.platform == "win32", reason="the compilers are shell scripts")
@pytest.mark.parametrize(
    "does", ["exit 0", "exit 3", "kill -9 $$", 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"']
)
def test_without_a_compiler_that_works_there_is_no_library(
    does: str, two: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = two.with_name("compiler")
    compiler.write_text(f"#!/bin/sh\n{does}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert native.library(two) is None
    assert "doing without two.cpp" in caplog.text
    monkeypatch.delenv("CXX")
    native.library.cache_clear()
    assert not native.has_compiler() or native.library(two) is not None, "what the broken compiler left stays"


@needs_compiler
def test_the_library_is_compiled_once_and_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return 2; }')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._folder.cache_clear()
    try:
        path = native.compiled(source, "native")
        assert path.parent == tmp_path / "cache" / "ridgeline" / "native"
        made = path.stat().st_mtime_ns
        assert native.compiled(source, "native") == path
        assert path.stat().st_mtime_ns == made
        assert [p.name for p in path.parent.iterdir()] == [path.name], "scratch files are left"
        source.write_text('extern "C" int two() { return 3; }')
        assert native.compiled(source, "native") != path, "another source is another library"
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it
        native._folder.cache_clear()
        elsewhere = native.compiled(source, "native")
        assert elsewhere.exists()
        assert tmp_path not in elsewhere.parents
        source.write_text("this is no C++")
        with pytest.raises(native.NoLibrary, match=r"failed: .*two\.cpp"):
            native.compiled(source, "native")
        assert native.library(source) is None
    finally:
        native._folder.cache_clear()
