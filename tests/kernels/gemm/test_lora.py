"""Products of adapters: every token gets its own adapter's, and those without one keep their bits.

Sums of I products of order one, in another order, differ by I * 2**-24; in bfloat16 the inner product and the result
are rounded (2**-8 each).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.lora import torch_ops
from ridgeline.kernels.gemm.lora.cases import CASES, LoraCase
from ridgeline.kernels.gemm.lora.op import (
    PANEL,
    AdapterFactors,
    StepFactors,
    TokensByAdapter,
    beside,
    by_adapter,
    lora,
    num_panels,
    tiles,
)
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand, norm_linear
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.adapters.places import places_in
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.adapters.tables import AdapterTables, maps_of

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact(case: LoraCase, y_TO: Tensor, x_TI: Tensor, down_AKI: Tensor, up_AOR: Tensor) -> Tensor:
    """Compute the result row by row, in float64, from the case's own list of rows."""
    y_TO, x_TI, token = y_TO.double(), x_TI.double(), 0
    for adapter, count in case.rows:
        for t in range(token, token + count) if adapter else ():
            rank, first = case.ranks[adapter - 1], 0
            for part, outputs in enumerate(case.parts):
                down_RI = down_AKI[adapter - 1, part * case.most :][:rank].double()
                up_OR = up_AOR[adapter - 1, first : first + outputs, :rank].double()
                y_TO[t, first : first + outputs] += up_OR @ (down_RI @ x_TI[t])
                first += outputs
        token += count
    return y_TO


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_token_gets_the_products_of_its_adapter(case: LoraCase, dtype: torch.dtype, device: str) -> None:
    from ridgeline.kernels.gemm.lora.triton import lora as by_triton

    y_TO, x_TI, factors, step = case.inputs(dtype, torch.device(device))
    wanted = exact(case, y_TO, x_TI, factors.down_AKI, factors.up_AOR)
    epsilon = case.in_width * 2.0**-24 if dtype == torch.float32 else 3 * 2.0**-8
    base_T = torch.tensor([not adapter for adapter, count in case.rows for _ in range(count)] + [True] * case.padding)
    for way in (lora, torch_ops.lora, by_triton):
        found = y_TO.clone()
        way(found, x_TI, factors, step)
        torch.testing.assert_close(found.double(), wanted, rtol=epsilon, atol=8 * epsilon)
        assert torch.equal(found[base_T.to(device)], y_TO[base_T.to(device)])


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_tokens_beside(device: str) -> None:
    from ridgeline.kernels.gemm.lora.triton import lora as by_triton

    case = CASES[3]
    y_TO, x_TI, factors, step = case.inputs(torch.float32, torch.device(device))
    together = y_TO.clone()
    by_triton(together, x_TI, factors, step)
    for token, adapter in ((0, 1), (19, 1), (25, 3), (46, 1)):
        alone = y_TO[token : token + 1].clone()
        row = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
        own_S = torch.tensor([adapter], dtype=torch.int32, device=device)
        by_triton(alone, x_TI[token : token + 1], factors, by_adapter(*row, own_S, 1, 3))
        assert torch.equal(alone[0], together[token])


# A case, the gate, and whether there is a norm. Tokens 1 and 2 run in plain/rows.py, further ones on Hopper in panels
BESIDE = (
    (LoraCase(((2, 1),), (3, 16), 64, (128, 32), beside=True), None, True),
    (LoraCase(((1, 1),), (16,), 1032, (128, 128), beside=True), "silu", True),
    (LoraCase(((1, 1), (0, 1)), (8, 5), 4096, (72,), most=8, beside=True), None, False),
    (LoraCase(((3, 1), (1, 1)), (16, 1, 7), 2056, (256, 128, 72), beside=True), None, True),
    (LoraCase(((1, 2), (0, 1), (5, 2)), (16,) * 6, 512, (128, 64), beside=True, padding=1), None, True),
    (LoraCase(((6, 9), (0, 2), (2, 6)), (16, 3, 0, 16, 16, 8), 640, (256, 256), beside=True), "silu", False),
    (LoraCase(((1, 30), (0, 2), (2, 32)), (70, 128), 1096, (1024,), most=128, beside=True), None, False),
    (LoraCase(tuple((1 + n % 9, 1) for n in range(130)), (16,) * 9, 512, (256, 128, 128), beside=True), None, True),
    (LoraCase(tuple((1 + n, 1) for n in range(64)), (16,) * 64, 768, (128, 128), beside=True), "silu", True),
)


def beside_a_product(
    case: LoraCase, gate: str | None, norm: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Operand, Tensor, Epilogue]:
    """Return the arguments of `norm_linear`."""
    y_TO, x_TI, factors, step = case.inputs(dtype, device)
    made = torch.Generator(device).manual_seed(1)
    weight_OI = torch.randn(y_TO.shape[1], case.in_width, generator=made, device=device) * case.in_width**-0.5
    operand = Operand(x_TI, x_TI.flip(0), torch.linspace(0.5, 1.5, case.in_width, device=device).to(dtype), 1e-5)
    bias_O = torch.randn(y_TO.shape[1], generator=made, device=device).to(dtype)
    operand = operand if norm else Operand(x_TI)
    return operand, weight_OI.to(dtype), Epilogue(bias_O, gate, None, StepFactors(factors, step))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", range(len(BESIDE)))
def test_a_product_adds_those_of_adapters(at: int, dtype: torch.dtype, device: str) -> None:
    """Sums and products as in `epsilon` above, of a result that a gate has multiplied."""
    from ridgeline.kernels.gemm.plain.triton import norm_linear as by_triton

    case, gate, norm = BESIDE[at]
    x, weight_OI, epilogue = beside_a_product(case, gate, norm, dtype, torch.device(device))
    assert epilogue.adapters is not None
    assert beside(*epilogue.adapters)
    wide = Operand(*(each.double() if isinstance(each, Tensor) else each for each in x))
    factors = epilogue.adapters.factors
    matrices = factors._replace(down_AKI=factors.down_AKI.double(), up_AOR=factors.up_AOR.double())
    ended = epilogue._replace(adapters=epilogue.adapters._replace(factors=matrices))
    wanted, _ = norm_linear(wide, weight_OI.double(), ended)
    found, _ = by_triton(x, weight_OI, epilogue)
    epsilon = case.in_width * 2.0**-24 if dtype == torch.float32 else 8 * 2.0**-8
    torch.testing.assert_close(found.double(), wanted.double(), rtol=epsilon, atol=8 * epsilon)
    if device == "cuda" and case.tokens <= 128:  # rows without an adapter are those of a step without
        plain, _ = by_triton(x, weight_OI, epilogue._replace(adapters=None))
        free_T = epilogue.adapters.tokens.adapter_T == 0
        assert torch.equal(found[free_T], plain[free_T])


def check_panels(
    case: LoraCase, x_TI: Tensor, factors: AdapterFactors, step: TokensByAdapter, found_TH: Tensor
) -> None:
    assert step.panel_P1 is not None
    parts, panels, device = len(case.parts), num_panels(len(case.ranks), case.most), x_TI.device
    found = found_TH.view(case.tokens, parts, panels, PANEL)
    listed = step.panel_P1[1 : 1 + int(step.panel_P1[0])].tolist()
    assert listed == sorted({(own - 1) * case.most // PANEL + more for own in step.adapter_T.tolist() if own
                             for more in range(-(-case.most // PANEL))})  # fmt: skip
    wanted = torch.zeros(case.tokens, parts, panels * PANEL, device=device, dtype=torch.float64)
    for token, own in enumerate(step.adapter_T.tolist()):
        for part in range(parts if own else 0):
            rank, first = case.ranks[own - 1], (own - 1) * case.most
            down_RI = factors.down_AKI[own - 1, part * case.most :][:rank].double()
            wanted[token, part, first : first + rank] = down_RI @ x_TI[token].double()
    wanted = wanted.view_as(found)[:, :, listed]
    epsilon = case.in_width * 2.0**-24
    torch.testing.assert_close(found[:, :, listed].double(), wanted, rtol=epsilon, atol=8 * epsilon)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at", range(4, len(BESIDE)))
def test_first_products_of_panels_are_those_of_each_token(at: int, device: str) -> None:
    """In columns of other adapters, and behind a rank, there are zeros."""
    from ridgeline.kernels.gemm.plain.beside import for_panels

    case = BESIDE[at][0]
    _, x_TI, factors, step = case.inputs(torch.float32, torch.device(device))
    for room in (1, 40):  # one program has all inputs, or several share them
        found, _ = for_panels(x_TI, StepFactors(factors, step), room, 1)
        check_panels(case, x_TI, factors, step, found)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_many_panels_take_no_more_memory_than_they_may(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs then share the inputs."""
    from ridgeline.kernels.gemm.plain import beside as module

    factors, step = LoraCase(((1, 3), (0, 1), (9, 2)), (16,) * 12, 1024, (128, 72), beside=True).inputs(
        torch.float32, torch.device(device)
    )[2:]
    x_TI = torch.linspace(-1, 1, 6 * 1024, device=device).view(6, 1024)
    given = x_TI, StepFactors(factors, step), 64, 1
    (wanted, _), taken = module.for_panels(*given), list[int]()

    def empty(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = x_TI.new_empty(sizes, dtype=dtype, device=device)
        taken.append(found.nbytes)
        return found

    monkeypatch.setattr(module.torch, "empty", empty)
    monkeypatch.setattr(module, "MOST_SUMS", 100_000)
    found, _ = module.for_panels(*given)
    _, sums = taken
    assert 0 < sums <= 100_000
    assert step.panel_P1 is not None
    listed = step.panel_P1[1 : 1 + int(step.panel_P1[0])].long()
    own, other = (each.view(6, 2, -1, PANEL)[:, :, listed] for each in (found, wanted))
    torch.testing.assert_close(own, other, rtol=1024 * 2.0**-24, atol=1024 * 2.0**-24)


@pytest.mark.parametrize("device", DEVICES)
def test_one_kernel_sorts_as_torch_does(device: str) -> None:
    from ridgeline.kernels.gemm.lora.triton_order import by_adapter as by_triton

    drawn = torch.Generator().manual_seed(0)
    for rows, tokens, adapters, most in (
        (1, 1, 1, 16),
        (5, 40, 3, 16),
        (64, 64, 64, 16),
        (7, 512, 9, 24),
        (3, 7, 2, 0),
        (2, 5, 1024, 128),  # panels and adapters that are too many for one program
    ):
        cuts = torch.randint(0, tokens, (rows,), generator=drawn).sort().values
        starts = torch.cat([torch.zeros(1), cuts]).int().to(device)
        slots = torch.randperm(rows, generator=drawn).int().to(device)
        adapter_S = torch.randint(0, adapters + 1, (rows,), generator=drawn, dtype=torch.int32).to(device)
        wanted = by_adapter(slots, starts, adapter_S, tokens, adapters, most)
        found = by_triton(slots, starts, adapter_S, tokens, adapters, most)
        for name in ("order_T", "start_A1", "adapter_T"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        if most:
            assert wanted.panel_P1 is not None
            assert found.panel_P1 is not None
            count = int(wanted.panel_P1[0])
            assert torch.equal(found.panel_P1[: 1 + count], wanted.panel_P1[: 1 + count])


def test_tokens_are_sorted_by_adapter_and_those_without_one_come_last() -> None:
    slots, starts = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    found = by_adapter(slots, starts, torch.tensor([0, 1, 2], dtype=torch.int32), 8, 2)
    assert found.order_T.tolist() == [3, 4, 5, 0, 1, 2, 6, 7]  # slot 1, slot 2, slot 0, and padding
    assert found.start_A1.tolist() == [0, 3, 5]


def test_a_tile_has_outputs_of_one_part() -> None:
    assert tiles((130, 20)) == [(0, 0, 128), (0, 128, 130), (1, 130, 150)]


@pytest.mark.parametrize(("asked", "most"), [("triton", 16), ("torch", 0)])
def test_an_op_of_adapters_that_was_asked_for_is_not_passed_over(asked: str, most: int) -> None:
    """Without panels no linear map adds products of adapters itself."""
    model = read_model_config(EMBEDDED_MODEL)
    ops = Ops(Platform(device_type="cpu"), {"linear": "triton", "lora": asked})
    decoder = Decoder(model.spec, ops, dtype=torch.float32, device=torch.device("meta"), max_positions=1)
    tables = AdapterTables(decoder, maps_of(places_in(decoder, model.weights)), 2, 16)
    assert tables._most == most
