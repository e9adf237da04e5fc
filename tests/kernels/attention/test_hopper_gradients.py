"""Gradients of attention on Hopper: beside float64 for every kind of mask and layout, and when they are taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

triton_sdpa = pytest.importorskip("ridgeline.kernels.attention.triton_sdpa")
KeyMasks, hopper_gradients = triton_sdpa.KeyMasks, triton_sdpa.hopper_gradients
SHAPES = [  # batch, heads, groups, queries, keys, channels
    (2, 4, 2, 304, 304, 128), (1, 6, 2, 1520, 1520, 64), (2, 4, 1, 77, 333, 128), (1, 4, 2, 500, 500, 96),
    (3, 2, 1, 1, 1, 64),
]  # fmt: skip


def documents(keys: int, *shares: int) -> torch.Tensor:
    """Documents whose lengths are as these numbers, the last one the rest."""
    ends = torch.tensor(shares).cumsum(0).clamp(max=keys)
    return torch.searchsorted(ends, torch.arange(keys), right=True)


def masks_of(keys: int) -> Sequence[object]:
    of_documents = documents(keys, 5, 70, 64, 1, 130, 200)
    return (
        KeyMasks(),
        KeyMasks(False),
        KeyMasks(True, 0),
        KeyMasks(True, 100),
        KeyMasks(False, 65),
        KeyMasks(True, None, of_documents),
        KeyMasks(False, 90, of_documents),
    )


def operands(shape: Sequence[int], *, by_token: bool, device: str = "cuda") -> list[torch.Tensor]:
    batch, heads, groups, queries, keys, size = shape
    sizes = (heads, queries), (groups, keys), (groups, keys), (heads, queries)
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(batch, t, h, size, generator=draw).to(device, torch.bfloat16) for h, t in sizes]
    return [x.transpose(1, 2) if by_token else x.transpose(1, 2).contiguous() for x in made]


@pytest.mark.gpu
@pytest.mark.parametrize("by_token", [False, True], ids=["by-head", "by-token"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_beside_float64(shape: Sequence[int], by_token: bool) -> None:
    *qkv, grad = operands(shape, by_token=by_token)
    assert hopper_gradients.supports(*qkv)
    queries, keys, scale = shape[3], shape[4], 0.11
    for masks in masks_of(keys):
        leaves = [x.double().requires_grad_() for x in qkv]
        triton_sdpa.sdpa_reference(*leaves, masks, scale=scale).backward(grad.double())
        ends = masks.intervals(queries, keys, grad.device)
        out, log = triton_sdpa.attend_intervals(*qkv, ends, scale)
        given = qkv, grad, log, triton_sdpa.output_products(out, grad), ends, scale
        norm = max(float(x.grad.norm()) for x in leaves)
        for got, leaf in zip(triton_sdpa.atomic_gradients(*given), leaves, strict=True):
            assert got.dtype == torch.bfloat16
            assert float((got.double() - leaf.grad).norm()) <= 1e-2 * norm, masks


@pytest.mark.gpu
def test_keys_and_values_have_the_same_bits_in_every_run() -> None:
    *qkv, grad = operands((1, 8, 2, 1000, 1000, 64), by_token=True)
    masks = KeyMasks(True, None, documents(1000, 300, 450))
    ends = triton_sdpa.Intervals(masks.intervals(1000, 1000, grad.device))
    out, log = triton_sdpa.attend_intervals(*qkv, ends, 0.125)
    given = qkv, grad, log, triton_sdpa.output_products(out, grad), ends, 0.125
    first, again = (triton_sdpa.atomic_gradients(*given) for _ in range(2))
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[2], again[2])


def test_ordered_sums_are_taken_where_torch_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_gradients, "supports", lambda *qkv: True)
    for way in ("atomic_gradients", "ordered_gradients"):
        monkeypatch.setattr(triton_sdpa, way, lambda *given, way=way: way)
    nothing = torch.empty(0)
    given = (nothing,) * 3, nothing, nothing, nothing, (nothing, nothing), 1.0
    assert triton_sdpa.interval_gradients(*given) == "atomic_gradients"
    assert triton_sdpa.interval_gradients(*given, nothing) == "ordered_gradients"  # slopes
    torch.use_deterministic_algorithms(True)
    try:
        assert triton_sdpa.interval_gradients(*given) == "ordered_gradients"
    finally:
        torch.use_deterministic_algorithms(False)


def test_operands_that_the_copy_engine_cannot_read_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_gradients, "compute_capability", lambda device: (9, 0))
    *qkv, _ = operands((1, 4, 2, 16, 16, 64), by_token=True, device="cpu")
    assert hopper_gradients.supports(*qkv)
    assert not hopper_gradients.supports(*(x.float() for x in qkv))
    assert not hopper_gradients.supports(*(x[..., :60] for x in qkv))  # 8 bytes too short
    assert not hopper_gradients.supports(qkv[0].flatten()[4:-4].view(1, 1, -1, 8).expand(1, 4, 511, 8), *qkv[1:])
    odd = torch.empty(16, 4, 68, dtype=torch.bfloat16)[..., :64].transpose(0, 1)[None]
    assert not hopper_gradients.supports(odd, *qkv[1:])  # rows 8 bytes apart
    assert not hopper_gradients.supports(qkv[0][..., ::2], *qkv[1:])


def test_ranges_are_found_once_for_all_layers() -> None:
    ends = triton_sdpa.Intervals(KeyMasks().intervals(300, 300, torch.device("cpu")))
    found = triton_sdpa.ranges_of(ends, 300, 64, 128)
    assert triton_sdpa.ranges_of(ends, 300, 64, 128) is found
    assert torch.equal(found, triton_sdpa.ranges_of(tuple(ends), 300, 64, 128))
    assert found.tolist() == [[0, 128, 256, 300], [128, 256, 256, 300], [256, 300, 300, 300]]
