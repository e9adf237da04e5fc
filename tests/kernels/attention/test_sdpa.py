"""Attention of whole sequences, forward and backward, beside its definition in float64 and beside torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

triton_sdpa = pytest.importorskip("ridgeline.kernels.attention.triton_sdpa")
KeyMasks, Tiles, sdpa, sdpa_reference = (
    getattr(triton_sdpa, x) for x in ("KeyMasks", "Tiles", "sdpa", "sdpa_reference")
)

SMALL = Tiles(16, 32, 4, 1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 queries and 32 keys, so that short sequences have whole tiles, cut ones and none."""
    monkeypatch.setattr(triton_sdpa, "tiles_of", lambda kernel, width, itemsize=2: SMALL)


def drawn(batch: int, heads: int, groups: int, queries: int, keys: int, size: int) -> list[torch.Tensor]:
    shapes = (batch, heads, queries, size), (batch, groups, keys, size), (batch, groups, keys, size)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def both(
    inputs: list[torch.Tensor], dtype: torch.dtype, *given_, **options
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The output and the gradients of q, k and v, by the kernels in `dtype` and by the definition in float64."""
    grad = torch.randn_like(inputs[0])
    found = []
    for function, kind in ((sdpa, dtype), (sdpa_reference, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves, *given_, **options)
        out.backward(grad.to(out.dtype))
        found.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    return found[0], found[1]


def check(inputs: list[torch.Tensor], dtype: torch.dtype, within: float, *given_, **options) -> None:
    ours, theirs = both(inputs, dtype, *given_, **options)
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert torch.isfinite(a).all(), name
        assert (a - b).norm() <= within * max(b.norm(), theirs[-1].norm() / 10), name  # gradients of one score are 0


MASKS = {
    "causal": KeyMasks(),
    "all": KeyMasks(causal=False),
    "window": KeyMasks(window=21),
    "window, both sides": KeyMasks(causal=False, window=9),
    "itself alone": KeyMasks(window=0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (77, 77), (33, 90), (1, 50)])
def test_masks(name: str, queries: int, keys: int) -> None:
    check(drawn(1, 2, 1, queries, keys, 16), torch.float32, 2e-6, MASKS[name])


def test_half_precision() -> None:
    check(drawn(2, 4, 2, 70, 70, 32), torch.float16, 3e-3)


@pytest.mark.parametrize("size", [20, 40, 64, 80])
def test_channels_that_fill_no_power_of_two(size: int) -> None:
    check(drawn(1, 2, 2, 40, 40, size), torch.float32, 2e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_see_themselves_alone(causal: bool) -> None:
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 30, 3, 40, 16]))
    inputs = drawn(1, 2, 1, 90, 90, 16)
    check(inputs, torch.float32, 2e-6, KeyMasks(causal=causal, documents_K=documents))
    whole = sdpa(*(x.float() for x in inputs), KeyMasks(causal=causal, documents_K=documents))
    alone = sdpa(*(x.float()[:, :, 34:74].contiguous() for x in inputs), KeyMasks(causal=causal))
    assert torch.allclose(whole[:, :, 34:74], alone, atol=1e-6)


def test_slopes_are_alibis() -> None:
    slopes = 2.0 ** -torch.arange(1, 5, dtype=torch.float32)
    check(drawn(1, 4, 2, 50, 70, 16), torch.float32, 2e-6, slopes_H=slopes)


@pytest.mark.parametrize("mask", [KeyMasks(), KeyMasks(causal=False, window=9)])
def test_sinks_take_their_part(mask) -> None:
    """Beside the definition, and beside a key of zeros whose value is zero: that is a sink of 0."""
    inputs, sinks = drawn(2, 4, 2, 50, 70, 16), torch.tensor([-2.0, 0.0, 3.0, 9.0], dtype=torch.float64)
    grad, found = torch.randn_like(inputs[0]), []
    for function, kind in ((sdpa, torch.float32), (sdpa_reference, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in (*inputs, sinks)]
        out = function(*leaves[:3], mask, sinks_H=leaves[3])
        out.backward(grad.to(out.dtype))
        found.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), *found, strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm(), name
    k, v = (torch.cat([torch.zeros_like(x[:, :, :1]), x], 2) for x in inputs[1:])
    want = scaled_dot_product_attention(inputs[0], k, v, enable_gqa=True)
    ours = sdpa(*(x.float() for x in inputs), KeyMasks(causal=False), sinks_H=torch.zeros(4))
    assert torch.allclose(ours.double(), want, atol=1e-5)


def test_tiles_that_weigh_too_little_are_not_read() -> None:
    """Their values are NaN here. What is left out weighs at most the share for each key, which bounds the error."""
    q, k, v = (x.float() for x in drawn(1, 2, 1, 96, 96, 16))
    q, k = q.abs() + 1, k * 0.3
    k[:, :, 32:64] -= 1.5  # scores are some 11 below the others'
    dense, skipped = sdpa(q, k, v), sdpa(q, k, v, skip_below=1e-3)
    assert torch.allclose(dense, sdpa(q, k, v, skip_below=1e-37), atol=1e-6)
    assert (dense - skipped).abs().max() <= 2 * 96 * 1e-3 * v.abs().max()
    assert not torch.equal(dense[:, :, 64:], skipped[:, :, 64:])
    v[:, :, 32:64] = torch.nan
    assert sdpa(q, k, v, skip_below=1e-3)[:, :, 64:].isfinite().all()
    assert not sdpa(q, k, v)[:, :, 64:].isfinite().all()


@pytest.mark.parametrize(("options", "word"), [
    ({"skip_below": 1.5}, "between 0 and 1"), ({"skip_below": 0.1}, "no gradients"),
    ({"sinks_H": torch.zeros(3)}, "each of 4"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(options, word: str) -> None:
    inputs = [x.float().requires_grad_() for x in drawn(1, 4, 2, 20, 20, 16)]
    with pytest.raises(ValueError, match=word):
        sdpa(*inputs, **options)


def test_torchs_own_attention_agrees() -> None:
    q, k, v = drawn(2, 6, 3, 75, 75, 24)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
    assert torch.allclose(sdpa_reference(q, k, v, scale=0.3), want, atol=1e-12)
    assert torch.allclose(sdpa(q.float(), k.float(), v.float(), scale=0.3).double(), want, atol=1e-5)


def test_transposed_inputs_are_read_in_place() -> None:
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn(2, 4, 2, 40, 40, 16)]
    check(inputs, torch.float32, 2e-6)


def test_gradients_are_the_same_to_the_bit() -> None:
    inputs = drawn(1, 2, 1, 90, 90, 16)
    torch.manual_seed(1)
    first, _ = both(inputs, torch.float32)
    torch.manual_seed(1)
    again, _ = both(inputs, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_query_without_keys_gives_zero_and_no_gradient() -> None:
    inputs = drawn(1, 1, 1, 20, 40, 16)
    documents = torch.tensor([0] * 40)
    ours, _ = both(inputs, torch.float32, KeyMasks(causal=False, documents_K=documents))
    assert ours[0].abs().sum() > 0
    first, behind = torch.zeros(20, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    leaves = [x.detach().float().requires_grad_() for x in inputs]
    out, _ = triton_sdpa.WholeAttention.apply(*leaves, None, (first, behind), None, 0.25)
    out.sum().backward()
    assert not out.any()
    assert all(not leaf.grad.any() for leaf in leaves)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranges_of_queries_hold_each_pair_once(data: st.DataObject) -> None:
    """The three ranges of a tile of keys lie one behind the other, hold every query that sees one of its keys, and the
    middle one only queries that see them all."""
    keys = data.draw(st.integers(1, 150))
    queries = data.draw(st.integers(1, keys))
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    documents = torch.repeat_interleave(torch.arange(len(lengths) + 1), torch.tensor([*lengths, max(keys, 1)]))[:keys]
    window = data.draw(st.none() | st.integers(0, 80))
    masks = KeyMasks(data.draw(st.booleans()), window, data.draw(st.sampled_from([None, documents])))
    first, behind = masks.intervals(queries, keys, torch.device("cpu"))
    assert (first.diff() >= 0).all()
    assert (behind.diff() >= 0).all()
    tiles = data.draw(st.sampled_from([SMALL, Tiles(32, 16, 4, 1)]))
    ranges_N4 = triton_sdpa.ranges_of((first, behind), keys, tiles.rows, tiles.columns)
    for tile, (begin, whole, ragged, end) in enumerate(ranges_N4.tolist()):
        low, high = tile * tiles.columns, min(keys, (tile + 1) * tiles.columns)
        seeing = [q for q in range(queries) if first[q] < high and behind[q] > low and first[q] < behind[q]]
        assert whole == begin or begin <= whole
        assert whole <= ragged <= max(end, whole)
        assert begin % tiles.rows == 0
        assert whole % tiles.rows == 0 or whole == end
        assert all(begin <= q < end for q in seeing)
        assert all(first[q] <= low and behind[q] >= high for q in range(whole, ragged))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q, k, v: (q[:, :3], k, v), "G divides H"),
        (lambda q, k, v: (q, k[:, :, :10], v[:, :, :10]), "20 queries of 10 keys"),
        (lambda q, k, v: (q, k, v[..., :8]), "G divides H"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sdpa(*change(*(x.float() for x in drawn(1, 4, 2, 20, 20, 16))))


def test_masks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        KeyMasks(window=-1).intervals(3, 3, torch.device("cpu"))
    for documents in (torch.tensor([0, 1, 0]), torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="one ascending number"):
            KeyMasks(documents_K=documents).intervals(3, 3, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    monkeypatch.undo()
    inputs = [x.cuda() for x in drawn(2, 4, 2, 500, 700, size)]
    check(inputs, torch.bfloat16, 1e-2, MASKS[name])
    check(inputs, torch.float32, 1e-5, MASKS[name])
