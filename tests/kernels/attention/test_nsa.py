"""Native sparse attention beside its definition in float64, part by part, and its extremes beside torch's attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

module = pytest.importorskip("ridgeline.kernels.attention.triton_nsa")
Nsa, KeysValues, nsa_attention, reference = (
    module.Nsa,
    module.KeysValues,
    module.nsa_attention,
    module.nsa_reference,
)
attend_intervals = pytest.importorskip("ridgeline.kernels.attention.triton_sdpa").attend_intervals
SMALL = Nsa(length=8, stride=4, block=16, selected=4, window=11)


def drawn(tokens: int, nsa=SMALL, heads: int = 4, groups: int = 2, size: int = 16, dtype=torch.float32, device="cpu"):
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    raw = [KeysValues(*(draw(2, groups, tokens, size) for _ in range(2))) for _ in range(3)]
    weights = draw(nsa.length, size).softmax(0)
    coarse = KeysValues(*(module.compress(x, weights, nsa) for x in raw[0]))
    return draw(2, heads, tokens, size), coarse, raw[1], raw[2], draw(2, heads, tokens, 3).sigmoid()


def doubled(inputs):
    return [KeysValues(*(x.double() for x in each)) if isinstance(each, tuple) else each.double() for each in inputs]


@pytest.mark.parametrize("tokens", [8, 50, 77])
def test_each_query_adds_its_three_answers(tokens: int) -> None:
    inputs = drawn(tokens)
    ours, want = nsa_attention(*inputs, SMALL).double(), reference(*doubled(inputs), SMALL)
    assert torch.isfinite(ours).all()
    assert (ours - want).norm() <= 3e-6 * want.norm()


@pytest.mark.dealt
def test_gradients_are_those_of_the_chosen_blocks() -> None:
    """Of queries, the keys and values of all branches, and gates."""
    q, *branches, gates = drawn(70)
    plain, grad, found = [q, *(x for each in branches for x in each), gates], torch.randn(q.shape), []
    for function, kind in ((nsa_attention, torch.float32), (reference, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in plain]
        out = function(leaves[0], *(KeysValues(*leaves[i : i + 2]) for i in (1, 3, 5)), leaves[7], SMALL)
        out.backward(grad.to(kind))
        found.append([x.grad.double() for x in leaves])
    names = ("q", "coarse k", "coarse v", "selected k", "selected v", "window k", "window v", "gates")
    for name, a, b in zip(names, *found, strict=True):
        assert (a - b).norm() <= 4e-6 * b.norm(), name


@pytest.mark.parametrize(("tokens", "listed", "together"), [(70, 32, 4), (50, 7, 1), (16, 64, 32)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (1, 1)])
def test_selected_blocks_are_those_of_each_query_whatever_lies_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tokens: int, listed: int, together: int, heads: int, groups: int
) -> None:
    """Outputs and gradients with lists of few queries, for a choice that has gaps, beside dense attention."""
    selected = pytest.importorskip("ridgeline.kernels.attention.triton_selected")
    monkeypatch.setattr(selected, "LISTED", listed)
    monkeypatch.setattr(selected, "TOGETHER", together)
    q, k, v = (torch.randn(2, each, tokens, 20) for each in (heads, groups, groups))
    own = torch.arange(tokens) // 16
    chosen = torch.stack([own, torch.where(own > 1, own - 2, -1), torch.where(own > 2, 0, -1)], -1).int()
    chosen = chosen.expand(2, groups, -1, -1)
    seen = (chosen.long()[..., None, :] == own[:, None]).any(-1) & (
        torch.arange(tokens) <= torch.arange(tokens)[:, None]
    )
    seen, grad, found = seen.repeat_interleave(heads // groups, 1), torch.randn(q.shape), []
    for kind in (torch.float32, torch.float64):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in (q, k, v)]
        if kind == torch.float32:
            out = selected.add_selected(*leaves, chosen, None, selected.SelectedBlocks(16), scale=0.3)
        else:
            out = scaled_dot_product_attention(*leaves, attn_mask=seen, scale=0.3, enable_gqa=True)
        out.backward(grad.to(kind))
        found.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert (a - b).norm() <= 4e-6 * b.norm(), name


@pytest.mark.parametrize(("first", "last", "heads"), [(2, 3, 6), (0, 1, 2)])
def test_blocks_that_all_queries_read_are_no_lists(
    monkeypatch: pytest.MonkeyPatch, first: int, last: int, heads: int
) -> None:
    """A tile of neighbours may have queries of several blocks."""
    monkeypatch.setattr(pytest.importorskip("ridgeline.kernels.attention.triton_selected"), "LISTED", 40)
    nsa = Nsa(length=8, stride=4, block=16, selected=6, first=first, last=last, window=11)
    inputs = drawn(101, nsa, heads=heads)
    want = reference(*doubled(inputs), nsa)
    assert (nsa_attention(*inputs, nsa) - want).norm() <= 3e-6 * want.norm()


@pytest.mark.few(3)
@pytest.mark.parametrize(("length", "block", "last"), [(32, 16, 2), (16, 16, 1), (8, 16, 1), (8, 32, 2), (4, 16, 3)])
def test_blocks_of_one_to_eight_strides(length: int, block: int, last: int) -> None:
    """A thread of a warpgroup has all keys of a block, in another order for each number of them."""
    nsa = Nsa(length=length, stride=length // 2, block=block, selected=5, last=last, window=9)
    inputs = drawn(99, nsa)
    want = reference(*doubled(inputs), nsa)
    assert (nsa_attention(*inputs, nsa) - want).norm() <= 3e-6 * want.norm()


@pytest.mark.dealt
def test_the_papers_sizes_with_groups_of_eight() -> None:
    nsa = Nsa(selected=3, window=40)
    inputs = drawn(170, nsa, heads=8, groups=1, size=20)
    want = reference(*doubled(inputs), nsa)
    assert (nsa_attention(*inputs, nsa) - want).norm() <= 3e-6 * want.norm()


def test_fewer_tokens_than_a_compressed_key_has() -> None:
    q, coarse, selected, window, gates = drawn(5, Nsa(length=4, stride=2, block=16, selected=4, window=3))
    none = KeysValues(*(x[:, :, :0] for x in coarse))
    ours = nsa_attention(q, none, selected, window, gates, SMALL)
    dense = scaled_dot_product_attention(q, *selected, is_causal=True, enable_gqa=True)
    near = scaled_dot_product_attention(q, *window, is_causal=True, enable_gqa=True)
    assert torch.allclose(ours, dense * gates[..., 1, None] + near * gates[..., 2, None], atol=1e-5)


def test_no_tokens_have_no_answers() -> None:
    q, kv = torch.zeros(1, 4, 0, 16), KeysValues(torch.zeros(1, 2, 0, 16), torch.zeros(1, 2, 0, 16))
    assert nsa_attention(q, kv, kv, kv, torch.zeros(1, 4, 0, 3)).shape == q.shape


@pytest.mark.dealt
def test_all_blocks_selected_is_dense_attention() -> None:
    nsa = Nsa(length=8, stride=4, block=16, selected=5, window=11)
    q, coarse, selected, window, gates = drawn(70, nsa)
    gates[:] = torch.tensor([0.0, 1.0, 0.0])
    want = scaled_dot_product_attention(q, *selected, is_causal=True, enable_gqa=True)
    assert torch.allclose(nsa_attention(q, coarse, selected, window, gates, nsa), want, atol=1e-5)
    gates[:] = torch.tensor([0.0, 0.0, 1.0])
    at = torch.arange(70)
    near = (at <= at[:, None]) & (at > at[:, None] - 11)
    want = scaled_dot_product_attention(q, *window, attn_mask=near, enable_gqa=True)
    assert torch.allclose(nsa_attention(q, coarse, selected, window, gates, nsa), want, atol=1e-5)


def test_compressed_keys_are_weighted_means_with_gradients() -> None:
    """Of rows that lie apart, whose last tokens begin no key."""
    x, weights, found = torch.randn(2, 75, 2, 20), torch.rand(8, 20), []
    grad = torch.randn(2, 2, 17, 20)
    for function, kind in ((module.compress, torch.float32), (module.compress_reference, torch.float64)):
        leaves = [each.detach().to(kind).clone().requires_grad_() for each in (x, weights)]
        out = function(leaves[0].transpose(1, 2), leaves[1], SMALL)
        out.backward(grad.to(kind))
        found.append([out.detach().double(), *(each.grad.double() for each in leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
    assert module.compress(x[:, :7].transpose(1, 2), weights, SMALL).shape == (2, 2, 0, 20)


def test_importance_follows_the_papers_sum() -> None:
    """Every compressed key gives its weight to a block once for each stride that both have, counted one by one."""
    q, coarse, *_ = drawn(64)
    scores = (q @ coarse.k.repeat_interleave(2, 1).mT * 0.25).double()
    weights = torch.zeros_like(scores)
    for t in range(64):
        there = [n for n in range(coarse.k.shape[2]) if 4 * n + 8 <= t + 1]
        weights[:, :, t, there] = scores[:, :, t, there].softmax(-1)
    want = torch.zeros(2, 2, 64, 4, dtype=torch.float64)
    for n in range(coarse.k.shape[2]):
        for part in (n, n + 1):  # its two strides
            want[..., part // 4] += weights[..., n].view(2, 2, 2, 64).sum(2)
    _, log = attend_intervals(q, *coarse, module.compressed_intervals(64, SMALL, q.device), 0.25)
    found = module.importance(q, coarse.k, log, SMALL, scale=0.25)
    assert torch.allclose(found.double(), want, atol=1e-5)
    shared = module.shares(coarse.k.shape[2], 4, SMALL, q.device)
    assert torch.equal(shared.sum(1), torch.full((15,), 2.0))


def test_selection_keeps_the_first_and_the_last_blocks() -> None:
    chosen = module.select(torch.rand(1, 1, 160, 10), SMALL)
    assert set(chosen[0, 0, 150, :3].tolist()) == {0, 8, 9}
    assert len(set(chosen[0, 0, 150].tolist())) == 4
    assert sorted(chosen[0, 0, 20].tolist()) == [-1, -1, 0, 1]
    assert (chosen[0, 0] <= torch.arange(160)[:, None] // 16).all()


@pytest.mark.few(2)
@pytest.mark.parametrize(("tokens", "selected"), [(77, 4), (400, 4), (700, 6), (290, 17)])
def test_streamed_choices_are_those_of_the_whole_matrix(tokens: int, selected: int) -> None:
    """In the same order. Queries of zero weigh all keys alike, and the blocks inside a text are then equal."""
    nsa = Nsa(length=8, stride=4, block=16, selected=selected, window=11)
    q, coarse, *_ = drawn(tokens, nsa, 2, 1)
    q, coarse = q[:1], KeysValues(*(x[:1] for x in coarse))
    q[:, :, tokens // 2 :] = 0
    _, log = attend_intervals(q, *coarse, module.compressed_intervals(tokens, nsa, q.device), 0.25)
    importance = module.importance(q, coarse.k, log, nsa, scale=0.25)
    want = module.select(importance, nsa)
    assert torch.equal(module.choose(q, coarse.k, log, nsa, scale=0.25), want)
    equal = importance[0, 0, -1, 2:-3]
    assert len(equal) < 4 or (equal == equal[0]).all()


def test_of_equal_blocks_the_earlier_is_chosen() -> None:
    chosen = module.select(torch.zeros(1, 1, 160, 10), SMALL)
    assert chosen[0, 0, 159].tolist() == [0, 8, 9, 1]


def test_what_does_not_fit_is_refused() -> None:
    for options in (
        {"length": 30},
        {"block": 48},
        {"selected": 2},
        {"window": 0},
        {"length": 64, "stride": 32, "block": 16},
    ):
        with pytest.raises(ValueError, match=r"got|no power of 2"):
            Nsa(**options)
    q, coarse, selected, window, gates = drawn(40)
    with pytest.raises(ValueError, match="gates"):
        nsa_attention(q, coarse, selected, window, gates[..., :2], SMALL)
    with pytest.raises(ValueError, match="9 compressed"):
        nsa_attention(q, selected, selected, window, gates, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_on_a_gpu(size: int) -> None:
    nsa = Nsa(selected=6, window=200)
    inputs = drawn(1500, nsa, heads=16, groups=1, size=size, dtype=torch.bfloat16, device="cuda")
    q, coarse, selected, *_ = inputs
    _, log = attend_intervals(q, *coarse, module.compressed_intervals(1500, nsa, q.device), size**-0.5)
    found = module.importance(q, coarse.k, log, nsa, scale=size**-0.5)
    chosen = module.select(found, nsa)  # with this choice, since equal importance may be ordered otherwise in float64
    streamed = module.choose(q, coarse.k, log, nsa, scale=size**-0.5)
    assert (streamed == chosen).float().mean() > 0.999  # sums of products may be ordered otherwise there
    ours = module.attend_selected(q, selected, chosen, nsa, scale=size**-0.5).double()
    at = torch.arange(1500, device="cuda")
    seen = (chosen.long()[..., None, :] == (at // nsa.block)[:, None]).any(-1) & (at <= at[:, None])
    want = scaled_dot_product_attention(
        q.double(), *(x.double() for x in selected), attn_mask=seen.repeat_interleave(16, 1), enable_gqa=True
    )
    assert (ours - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("tokens", [33, 500, 4099])
@pytest.mark.parametrize("by_token", [False, True])
def test_compressed_keys_on_a_gpu(size: int, tokens: int, by_token: bool) -> None:
    """Beside intervals: outputs and logarithms, of queries that see no key too."""
    q, coarse, *_ = drawn(tokens, Nsa(), heads=6, groups=2, size=size, dtype=torch.bfloat16, device="cuda")
    q = q.transpose(1, 2).contiguous().transpose(1, 2) if by_token else q
    ours = module.attend_compressed(q, coarse, Nsa(), scale=0.1)
    want = attend_intervals(q, *coarse, module.compressed_intervals(tokens, Nsa(), q.device), 0.1)
    assert torch.allclose(ours[0].float(), want[0].float(), atol=2e-2)
    assert torch.allclose(ours[1], want[1], atol=1e-3)
    assert ours[0][:, :, :31].eq(0).all()
