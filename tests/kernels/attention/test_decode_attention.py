"""Attention of a decode step in one op: every implementation against the composition of the two ops it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.decode.cases import CASES, WIDE_CASES, DecodeCase
from ridgeline.kernels.attention.decode.op import DECODE_ATTENTION
from ridgeline.kernels.attention.paged.op import AttentionShape
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.plain.rounded import buffer
from tests.covering import by_pairs

pytest.importorskip("triton")
from ridgeline.kernels.attention.decode import triton as decoding
from ridgeline.kernels.attention.paged.schedule import fixed_schedule, make_schedule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = [implementation.name for implementation in DECODE_ATTENTION.implementations]
UNSEEN = {torch.float16: torch.inf}  # what lies where no row may look: in other types NaN
K_CACHE, V_CACHE = 6, 7  # among what is projected


def skip_what_the_interpreter_gets_wrong(name: str, dtype: torch.dtype, device: str) -> None:
    if name != "torch" and device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")


def run(name: str, arguments: tuple, options: dict) -> Tensor:
    """An implementation's result; it finds the host's lengths only if it needs them."""
    *projected, batch = arguments
    if name != "torch":
        batch = replace(batch, num_tokens_R=None, kv_bound_R=None)
    attend = DECODE_ATTENTION.choose(Platform.of(arguments[0].qkv_TX.device), name)
    return attend(*projected, batch, **options)


def assert_equal_to_the_reference(name: str, case: DecodeCase, dtype: torch.dtype, device: str) -> None:
    """Outputs: 8 roundings of the attention and as many of the heads, values being of order one. Caches: as rope_kv."""
    unseen = UNSEEN.get(dtype, torch.nan)
    ours, theirs = (case.inputs(dtype, torch.device(device), unseen=unseen) for _ in range(2))
    options = case.options(dtype, torch.device(device))
    out = run(name, ours, options)
    expected = DECODE_ATTENTION.reference(*theirs, **options)
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert (out.double() - expected.double()).abs().max().item() <= 16 * eps
    for cache in (K_CACHE, V_CACHE):
        torch.testing.assert_close(ours[0][cache], theirs[0][cache], rtol=8 * eps, atol=8 * eps, equal_nan=True)


@pytest.mark.few(54)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        *by_pairs(NAMES, CASES, DTYPES, drawn=lambda name, case, dtype: name == "torch" or dtype != torch.bfloat16),
        *(("triton", case, dtype) for case in WIDE_CASES for dtype in DTYPES),
    ],
    ids=str,
)
def test_implementations_equal_the_reference(name: str, case: DecodeCase, dtype: torch.dtype, device: str) -> None:
    """NaN or inf wherever no row may look, the newest keys' places included: these are written and never read."""
    skip_what_the_interpreter_gets_wrong(name, dtype, device)
    assert_equal_to_the_reference(name, case, dtype, device)


@pytest.mark.parametrize("case", [*CASES, *WIDE_CASES], ids=str)
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_cells_that_no_row_sees_change_no_bit(name: str, case: DecodeCase) -> None:
    """The null block among them, and a newest key's place before it is written."""
    options = case.options(torch.float32, torch.device("cpu"))
    clean, *spoiled = (
        run(name, case.inputs(torch.float32, torch.device("cpu"), unseen=unseen), options)
        for unseen in (0.0, torch.nan, torch.inf)
    )
    assert clean.isfinite().all()
    assert all(torch.equal(out, clean) for out in spoiled)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_share_a_schedule(device: str) -> None:
    """Twice the same: a schedule is as good as new after a layer has used it."""
    case = DecodeCase(lengths=(900, 1, 700))
    *projected, batch = case.inputs(torch.float32, torch.device(device))
    expected = run("triton", (*projected, batch), case.options(torch.float32, torch.device(device)))
    shape = AttentionShape(num_tokens=3, tokens_each=1, num_heads=4, num_kv_heads=2)
    schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    for _ in range(2):
        arguments = (*projected, replace(batch, schedule=schedule))
        assert torch.equal(run("triton", arguments, case.options(torch.float32, torch.device(device))), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stopped_row_attends_to_itself_and_disturbs_nobody(device: str) -> None:
    """It has kv_len 1 on the device, position 0, and its key goes to the null block."""
    case = DecodeCase(lengths=(90, 64, 77))
    whole, stopped = (case.inputs(torch.float32, torch.device(device), unseen=torch.nan) for _ in range(2))
    options = case.options(torch.float32, torch.device(device))
    for argument, value in ((stopped[0].positions_T, 0), (stopped[0].place_T, 0), (stopped[-1].kv_len_R, 1)):
        argument[1] = value
    expected, out = run("triton", whole, options), run("triton", stopped, options)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    v_GD = stopped[0].qkv_TX[1].view(-1, case.head_dim)[-case.num_kv_heads :]
    assert torch.allclose(out[1], v_GD.repeat_interleave(2, dim=0), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["fixed", "cascade"])
def test_schedules_of_other_kernels_are_run_by_them(kind: str, device: str) -> None:
    case = DecodeCase(lengths=(300, 290, 77))
    ours, theirs = (case.inputs(torch.float32, torch.device(device), unseen=torch.nan) for _ in range(2))
    options = case.options(torch.float32, torch.device(device))
    make = fixed_schedule if kind == "fixed" else make_schedule
    batch = ours[-1]
    shape = AttentionShape(
        num_tokens=3,
        tokens_each=1,
        num_heads=4,
        num_kv_heads=2,
        prefix_4R=torch.zeros(4, 3, dtype=torch.int32, device=device),
    )
    schedule = make(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    assert schedule.fixed == (kind == "fixed")
    assert (schedule.cascade is None) == (kind == "fixed")
    out = run("triton", (*ours[:-1], replace(batch, schedule=schedule)), options)
    assert (out - DECODE_ATTENTION.reference(*theirs, **options)).abs().max().item() <= 16e-6


def test_a_schedule_for_something_else_is_refused() -> None:
    case = DecodeCase(lengths=(300, 290, 77))
    *projected, batch = case.inputs(torch.float32, torch.device("cpu"))
    of_layers = AttentionShape(num_tokens=3, tokens_each=1, num_heads=4, num_kv_heads=2, window=9)
    schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers)
    with pytest.raises(ValueError, match="window None"):
        run("triton", (*projected, replace(batch, schedule=schedule)), case.options(torch.float32, torch.device("cpu")))


@pytest.mark.gpu
def test_layers_in_a_captured_graph_serve_other_lengths() -> None:
    """Several layers one after another, each rotating what the one before attended to, as lengths change."""
    case = DecodeCase(lengths=(3000, 90, 700, 1), num_heads=8, head_dim=64, rotary_dim=64, block_size=64)
    device, options = torch.device("cuda"), case.options(torch.bfloat16, torch.device("cuda"))
    layers = [case.inputs(torch.bfloat16, device, seed=seed, unseen=torch.nan) for seed in range(4)]
    lengths_R, first = layers[0][-1].kv_len_R, layers[0][0]
    positions_T, places_T = first.positions_T, first.place_T
    for layer in layers[1:]:
        layer[-1].slots_R.copy_(layers[0][-1].slots_R)
        layer[-1].block_table_SC.copy_(layers[0][-1].block_table_SC)
        for cache in (K_CACHE, V_CACHE):
            layer[0][cache].copy_(first[cache].nan_to_num() * 0.5)

    def step(name: str) -> Tensor:
        qkv_TX = first.qkv_TX
        batch = replace(layers[0][-1], num_tokens_R=None, kv_bound_R=None)
        for layer in layers:
            projected = layer[0]._replace(
                qkv_TX=qkv_TX, cos_sin_ZY=first.cos_sin_ZY, positions_T=positions_T, place_T=places_T
            )
            attend = DECODE_ATTENTION.choose(Platform.of(device), name)
            out_THD = attend(projected, batch, **options)
            qkv_TX = torch.cat((out_THD.flatten(1), layer[0].qkv_TX[:, out_THD[0].numel() :]), 1)
        return qkv_TX

    step("triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TX = step("triton")
    table_RC = layers[0][-1].block_table_SC[layers[0][-1].slots_R]
    for shorter in (0, 1, 40, 80):
        lengths = torch.tensor([max(1, length - shorter) for length in case.lengths], device=device)
        lengths_R.copy_(lengths)
        positions_T.copy_(lengths - 1)
        block_R = table_RC.gather(1, (lengths - 1)[:, None] // case.block_size)[:, 0]
        places_T.copy_(block_R * case.block_size + (lengths - 1) % case.block_size)
        graph.replay()
        ours = out_TX.clone()
        assert (ours - step("reference")).abs().max().item() <= 16 * torch.finfo(torch.bfloat16).eps * len(layers)


ROUNDED_CASES = (
    DecodeCase(lengths=(700, 1, 90), num_heads=4, num_kv_heads=2, head_dim=128, rotary_dim=128, block_size=64),
    DecodeCase(lengths=(40, 17), num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, block_size=64),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ROUNDED_CASES, ids=["a head is a scale's stretch", "half a head is not"])
@pytest.mark.parametrize("name", ["triton", "two launches", "torch", "reference"])
def test_heads_are_rounded_where_there_is_room(
    name: str, case: DecodeCase, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a step of E4M3 is 1/16 of a number, or 2**-10 of the least normal one; a row in several parts, one that has
    no other token, and neighbours in a batch each have their own scales."""
    dtype, on = torch.float16, torch.device(device)
    if name == "two launches":
        monkeypatch.setattr(decoding, "MANY_ROWS", 0)
        name = "triton"
    options = case.options(dtype, on)
    expected = DECODE_ATTENTION.reference(*case.inputs(dtype, on, unseen=torch.nan), **options).flatten(1).float()
    given = buffer(*expected.shape, dtype, on)
    given.scale.fill_(torch.nan)
    out = run(name, case.inputs(dtype, on, unseen=torch.nan), options | {"buffer": given})
    assert out.data_ptr() == given.q_TI.data_ptr()
    largest_CT = expected.unflatten(1, (-1, 128)).abs().amax(-1).T
    torch.testing.assert_close(given.scale, largest_CT / 448, rtol=0.02, atol=1e-6)
    step_TI = expected.abs() / 16 + (given.scale.T * 2.0**-10).repeat_interleave(128, 1)
    assert ((given.wide() - expected).abs() <= 1.01 * step_TI + 16 * torch.finfo(dtype).eps).all()
