"""Products of matrices through the compiler: to Hopper's PTX, which is read here and runs elsewhere, and to this
machine's code, beside torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.compiler import mlir
from ridgeline.compiler.artifacts import ArtifactStore
from ridgeline.compiler.backend import compile_graph, decompositions
from ridgeline.compiler.capture import capture
from ridgeline.compiler.graph import InvalidGraph, OpGraph
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.products import cpu_product
from ridgeline.compiler.products.assemble import AssemblerError, assembled, ptxas, to_ptx
from ridgeline.compiler.products.compiled import compiled
from ridgeline.compiler.products.cpu_schedule import CpuSchedule, cpu_space
from ridgeline.compiler.products.hopper import mapped
from ridgeline.compiler.products.launch import ProductLaunch
from ridgeline.compiler.products.schedule import HopperSchedule
from ridgeline.compiler.products.search import LearnedCost, agreement, neighbours, predicted_seconds, space
from ridgeline.compiler.products.text import ProductSpec, plain, product_text
from ridgeline.compiler.products.tiled import tiled
from ridgeline.compiler.targets import CpuTarget, CudaTarget
from ridgeline.core.errors import InvalidConfig

if why := mlir.available():
    pytest.skip(why, allow_module_level=True)
pytest.importorskip("llvmlite")

F = torch.nn.functional
SHARED = HopperSchedule(cluster=(2, 1), raster=2, staging=2)
IN_TURN = HopperSchedule(rows=128, columns=128, cluster=(2, 1), staging=2, stages=5, turns=True)


def bias_silu(sums: Tensor, b: Tensor) -> Tensor:
    return F.silu(sums + b).bfloat16()


def epilogue(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> OpGraph:
    """The graph of a function of tensors of float32."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        inputs = [torch.empty(shape) for shape in shapes]
        return canonicalize(capture(make_fx(function, decomposition_table=decompositions())(*inputs)))


def has_ptxas() -> bool:
    try:
        ptxas()
    except InvalidConfig:
        return False
    return True


needs_ptxas = pytest.mark.skipif(not has_ptxas(), reason="machine code for GPUs needs ptxas")


def stages(spec: ProductSpec, schedule: HopperSchedule) -> dict[str, str]:
    found: dict[str, str] = {}
    tiled(f"{product_text(spec)}\n{schedule.script()}", HopperSchedule.of_annotations, found.__setitem__)
    return found


def in_order(text: str, *patterns: str) -> None:
    """Assert that lines match patterns in this order, as FileCheck does."""
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(text, at)
        assert found, f"{pattern} is not behind {text[max(0, at - 80) : at]!r}"
        at = found.end()


def test_a_schedule_tiles_a_product_with_its_epilogue_in_blocks_steps_and_warpgroups() -> None:
    spec = ProductSpec(1000, 2048, 512, epilogue(bias_silu, (1000, 2048), (2048,)))
    text = stages(spec, SHARED)["tiled"]
    in_order(
        text,
        r"scf\.forall .* in \(8, 8\)",
        r"linalg\.fill",
        r"scf\.for .* = %c0 to %c512 step %c64",
        r"scf\.forall .* in \(%\w+\)",
        r"linalg\.matmul .*ridgeline\.block = array<i64: 128, 256>.*tensor<\?x64xbf16>, tensor<256x64xbf16>",
        r"#gpu\.warpgroup<x>",
        r"linalg\.generic",
        r"math\.exp",
        r"arith\.truncf",
        r"#gpu\.block<y>, #gpu\.block<x>",
    )
    assert text.count("linalg.generic") == 1


@needs_ptxas
@pytest.mark.parametrize("schedule", [SHARED, IN_TURN], ids=["shared", "in turn"])
def test_a_product_becomes_copies_by_tma_and_wgmma_without_spills(schedule: HopperSchedule) -> None:
    spec = ProductSpec(1024, 1024, 1024, epilogue(bias_silu, (1024, 1024), (1024,)), right_by_k=False)
    made = compiled(spec, schedule)
    atoms = schedule.rows // 64 // schedule.sharing
    shape = f"wgmma.mma_async.sync.aligned.m64n{schedule.columns}k16.f32.bf16.bf16"
    assert made.code.ptx.count(shape) == 2 * 4 * atoms  # of the first step of K, and of the loop
    assert "multicast::cluster" in made.code.ptx
    assert made.code.ptx.count("cp.async.bulk.tensor.2d.global.shared::cta") == schedule.columns // 64 * atoms
    in_order(made.code.ptx, "setmaxnreg.dec", "mbarrier.arrive.expect_tx", "setmaxnreg.inc", "wgmma.fence", "stmatrix")
    assert made.code.spilled == 0
    assert made.kernel.shared == schedule.shared


@needs_ptxas
def test_the_assembler_refuses_products_that_wait_for_each_other() -> None:
    spec = ProductSpec(512, 512, 512, plain(512, 512, torch.bfloat16))
    text = mapped(tiled(f"{product_text(spec)}\n{SHARED.script()}", HopperSchedule.of_annotations)).text
    assert assembled(text).spilled == 0
    wait = re.search(r"(%\d+) = llvm\.inline_asm has_side_effects asm_dialect = att \"wgmma\.wait_group.*", text)
    assert wait is not None
    with pytest.raises(AssemblerError, match="wait for each other"):
        assembled(text.replace("wgmma.wait_group.sync.aligned 0;", "// no wait"))


PLANTED: dict[str, tuple[str, str]] = {
    "no annotation": (r'transform\.annotate %mine "ridgeline\.stages".*', ""),
    "steps of another size": (r"tile_sizes \[0, 0, 64\]", "tile_sizes [0, 0, 32]"),
    "no blocks": (r" \(mapping = \[#gpu\.block<y>, #gpu\.block<x>\]\)", ""),
    "a warpgroup for all rows": (r"tile_sizes \[64, 0, 0\]", "tile_sizes [128, 0, 0]"),
    "too much shared memory": (r"param\.constant 4 : i64", "param.constant 9 : i64"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_script_that_leaves_another_product_is_refused(fault: str) -> None:
    spec = ProductSpec(512, 512, 512, plain(512, 512, torch.bfloat16))
    script, count = re.subn(*PLANTED[fault], HopperSchedule().script())
    assert count
    with pytest.raises((InvalidGraph, InvalidConfig)):
        tiled(f"{product_text(spec)}\n{script}", HopperSchedule.of_annotations)


def test_tensors_that_a_kernel_cannot_take_are_refused() -> None:
    launch = ProductLaunch(64, 64, 64, True, True, "bfloat16", 1, 384, 0, 1, ((64, 64), (64, 64)))
    x = torch.empty(64, 64, dtype=torch.bfloat16)
    assert launch.fault(x, x, x) == ""
    assert "strides" in launch.fault(x.t(), x[:32], x)
    assert "16 bytes" in launch.fault(torch.empty(64 * 64 + 1, dtype=x.dtype)[1:].view(64, 64), x, x)
    assert "bfloat16" in launch.fault(x.half(), x, x)
    assert ProductLaunch.read(launch.record()) == launch


def test_the_space_has_kernels_that_fit_and_neighbours_are_in_it() -> None:
    every = set(space())
    assert SHARED in every
    assert replace(SHARED, stages=9).fault()
    near = list(neighbours(SHARED, Random(0)))
    assert near
    assert set(near) <= every


def test_the_learned_cost_orders_what_counting_does_not() -> None:
    """Times in which small rasters and single buffers are slow, which counting does not know."""

    def seconds(each: HopperSchedule) -> float:
        return predicted_seconds(each, 4096, 4096, 4096) * (1.0 + 0.3 / each.raster + 0.1 * (each.staging == 1))

    drawn = Random(1).sample(sorted(space(), key=str), 160)
    cost = LearnedCost(4096, 4096, 4096)
    for each in drawn[:80]:
        cost.observe(each, seconds(each))
    unseen, taken = drawn[80:], [seconds(each) for each in drawn[80:]]
    counted = agreement([predicted_seconds(each, 4096, 4096, 4096) for each in unseen], taken)
    assert agreement([cost(each) for each in unseen], taken) > counted


SMALL = [CpuSchedule(rows=near * 4, depth=64, panel=panel, near=near) for panel, near in ((32, 12), (48, 8), (16, 24))]


def gated(sums: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(sums + b, approximate="tanh") * 0.5 + r


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(*[st.integers(1, 150)] * 3),
    by_k=st.tuples(st.booleans(), st.booleans()),
    fused=st.booleans(),
    schedule=st.sampled_from(SMALL),
    unrolled=st.sampled_from((1, 4)),
)
def test_products_of_cpus_make_what_torch_makes(
    sizes: tuple[int, int, int], by_k: tuple[bool, bool], fused: bool, schedule: CpuSchedule, unrolled: int
) -> None:
    from ridgeline.compiler.products.cpu_product import CpuProduct

    (m, n, k), generator = sizes, torch.Generator().manual_seed(sum(sizes))
    graph = epilogue(gated, (m, n), (n,), (m, n)) if fused else plain(m, n, torch.float32)
    product = CpuProduct(ProductSpec(m, n, k, graph, torch.float32, *by_k), replace(schedule, unrolled=unrolled))
    a, b, bias, r = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, n), (n,), (m, n)))
    out, extra = torch.full((m, n), torch.nan), [bias, r] if fused else []
    product(a if by_k[0] else a.t().contiguous(), b.t().contiguous() if by_k[1] else b, extra, out)
    torch.testing.assert_close(out, gated(a @ b, bias, r) if fused else a @ b, rtol=1e-4, atol=1e-4)


def test_every_schedule_of_cpus_fits_its_caches_and_registers() -> None:
    every = list(cpu_space())
    assert CpuSchedule() in every
    assert CpuSchedule(near=16).fault()
    assert CpuSchedule(depth=1024).fault()
    with pytest.raises(InvalidConfig, match="16 x 32 sums do not fit"):
        CpuSchedule(near=16).checked()


def test_ptx_of_a_product_is_the_same_twice() -> None:
    spec = ProductSpec(512, 512, 512, plain(512, 512, torch.bfloat16))
    text = mapped(tiled(f"{product_text(spec)}\n{SHARED.script()}", HopperSchedule.of_annotations)).text
    assert to_ptx(text) == to_ptx(text)


def joined(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[str]]:
    """What a program makes whose target joins every product, and the ops of its graph."""
    from functorch.compile import aot_function, make_boxed_func

    made = []

    def compiled_by_us(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        made.append(compile_graph(graph, target=Joining()))
        return make_boxed_func(graph.forward)

    aot_function(function, fw_compiler=compiled_by_us, decompositions=decompositions())(*inputs)
    (program,) = made
    return program(*inputs)[0], [node.op for node in program.graph.nodes]


class Joining(CpuTarget):
    def multiplies(self, product: ProductSpec) -> bool:
        return product.out == torch.float32


JOINED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "a bias and silu": (lambda x, w, b: F.silu(F.linear(x, w, b)), 1),
    "rows in two dimensions": (lambda x, w, b: F.silu(F.linear(x.view(4, 10, 24), w)) * 2 + b, 1),
    "one node": (lambda x, w, b: F.relu(x @ w.t()), 1),
    "a matrix the other way": (lambda x, w, b: (x.t().contiguous().t() @ w.t().contiguous()).tanh() + b, 1),
    "two products": (lambda x, w, b: F.silu(x @ w.t()) * (x @ w.t() + b), 1),
    "its sum twice": (lambda x, w, b: (lambda h: h + F.silu(h))(x @ w.t()), 1),
    "a sum that is given out": (lambda x, w, b: (lambda h: torch.cat((F.silu(h), h)))(x @ w.t()), 0),
    "a bias that is scaled": (lambda x, w, b: F.silu(torch.addmm(b, x, w.t(), beta=0.5)), 0),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_product_is_joined_with_what_follows_it_alone(name: str) -> None:
    function, products = JOINED[name]
    torch.manual_seed(0)
    x, w, b = torch.randn(40, 24), torch.randn(32, 24) * 0.1, torch.randn(32)
    made, ops = joined(function, x, w, b)
    torch.testing.assert_close(made, function(x, w, b), rtol=1e-4, atol=1e-4)
    assert ops.count("product") == products


@needs_ptxas
def test_a_layer_in_16_bits_is_carried_to_hopper_as_machine_code(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ridgeline_bench.scripts.compiled_layers import linear_silu, program_of

    store = ArtifactStore([tmp_path])
    with FakeTensorMode():
        x, w, b = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((512, 1024), (1024, 1024), (1024,)))
        programs = [program_of(linear_silu, [x, w, b], CudaTarget("sm_90", store)) for _ in range(2)]
    assert [node.op for node in programs[0].graph.nodes] == ["call", "product"]
    assert programs[0].fallbacks == []
    assert (store.hits, store.misses) == (1, 1)
    (file,) = tmp_path.glob("*.kernel")
    assert b"\x7fELF" in file.read_bytes()


def test_a_matrix_that_lies_another_way_runs_op_by_op_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w) * 2

    def refused(*_: object) -> None:
        raise ValueError("no kernel for it")  # as errors of MLIR, which are of its own classes

    x, w = torch.randn(64, 128), torch.randn(96, 128).t()
    program = compile_graph(make_fx(function)(x, w))
    assert [node.op for node in program.graph.nodes] == ["product"]
    assert program.fallbacks == []
    monkeypatch.setattr(cpu_product, "CpuProduct", refused)
    (made,) = program(x, w.contiguous())
    torch.testing.assert_close(made, function(x, w), rtol=1e-4, atol=1e-4)
