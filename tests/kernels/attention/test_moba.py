"""MoBA beside its definition in float64, the gate beside top-k, and its extremes beside torch's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

module = pytest.importorskip("ridgeline.kernels.attention.triton_moba")
Moba, moba_attention, reference = module.Moba, module.moba_attention, module.moba_reference


def drawn(length: int, heads: int = 4, groups: int = 2, size: int = 16, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, each, length, size) for each in (heads, groups, groups)]


def check(inputs: list[torch.Tensor], moba, within: float, **options) -> None:
    ours = moba_attention(*inputs, moba, **options).double()
    want = reference(*(x.double() for x in inputs), moba, **options)
    assert torch.isfinite(ours).all()
    assert (ours - want).norm() <= within * want.norm()


@pytest.mark.parametrize("length", [128, 131, 96, 31, 1])
@pytest.mark.parametrize("top", [1, 2, 3])
def test_each_query_reads_its_own_block_and_the_best_past_ones(length: int, top: int) -> None:
    check(drawn(length), Moba(32, top), 3e-6)


@pytest.mark.parametrize(("length", "top"), [(128, 3), (77, 2), (50, 1)])
def test_gradients_are_those_of_the_chosen_blocks(length: int, top: int) -> None:
    inputs = drawn(length)
    grad, found = torch.randn_like(inputs[0]).transpose(1, 2).contiguous().transpose(1, 2), []
    for function, kind in ((moba_attention, torch.float32), (reference, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves, Moba(16, top))
        out.backward(grad.to(kind))
        found.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert (a - b).norm() <= 4e-6 * b.norm(), name


def test_odd_channels_a_scale_and_half_precision() -> None:
    check(drawn(100, size=20), Moba(16, 3), 3e-6, scale=0.4)
    check([x.half() for x in drawn(100, size=32)], Moba(32, 2), 3e-3)


def test_transposed_inputs_are_read_in_place() -> None:
    check([x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn(70)], Moba(16, 3), 3e-6)


def test_a_query_that_reads_all_blocks_has_dense_attention() -> None:
    q, k, v = drawn(120)
    want = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    assert torch.allclose(moba_attention(q, k, v, Moba(32, 8)).double(), want, atol=1e-5)
    assert torch.allclose(reference(q.double(), k.double(), v.double(), Moba(32, 8)), want, atol=1e-12)


def test_the_gate_takes_the_best_past_blocks() -> None:
    q, k, _ = drawn(160)
    chosen = module.choose_blocks(q, k, Moba(32, 3))
    for t, head in ((0, 0), (33, 1), (70, 2), (159, 3)):
        means = [k[1, head // 2, n * 32 : n * 32 + 32].mean(0) @ q[1, head, t] for n in range(t // 32)]
        best = sorted(range(len(means)), key=lambda n: -means[n])[:2]
        assert chosen[1, head, t].tolist() == [*best, -1, -1][:2]


def test_the_gate_keeps_all_bits_of_means_beside_queries_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def product(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """The interpreter would multiply the bits of bfloat16 as whole numbers."""
        left, right = ((x.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b))
        return TensorHandle((left @ right + d.data).astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    q, k = (torch.randn(1, heads, 320, 64).bfloat16() for heads in (2, 1))
    means = module.block_means(k, 32).double()
    past = torch.arange(means.shape[2]) < torch.arange(320)[:, None] // 32
    best = (q.double() @ means.mT).masked_fill(~past, float("-inf")).topk(2, -1)
    want = torch.where(best.values > float("-inf"), best.indices, -1)
    assert torch.equal(module.choose_blocks(q, k, Moba(32, 3)).long(), want)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_lists_hold_each_pair_once(data: st.DataObject) -> None:
    length, blocks, choices = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    heads, rows = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4, 8]))
    size = heads * length * choices
    numbers = data.draw(st.lists(st.integers(-1, blocks - 1), min_size=size, max_size=size))
    chosen = torch.tensor(numbers, dtype=torch.int32).view(1, heads, length, choices)
    pairs, owner, first, begins = (each.tolist() for each in module.listed(chosen, blocks, rows))
    found = []
    for tile, at in enumerate(owner):
        if at < heads * blocks:
            begin = begins[at] + (tile - first[at]) * rows
            assert begin < begins[at + 1]
            found += [(at // blocks, pair, at % blocks) for pair in pairs[begin : min(begin + rows, begins[at + 1])]]
    flat = chosen.view(heads, -1).tolist()
    want = [(head, pair, n) for head in range(heads) for pair, n in enumerate(flat[head]) if n >= 0]
    assert sorted(found) == sorted(want)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="16, 32, 64"):
        Moba(24)
    with pytest.raises(ValueError, match="at least 1"):
        Moba(32, 0)
    q, k, v = drawn(40)
    with pytest.raises(ValueError, match="G divides H"):
        moba_attention(q[:, :3], k, v, Moba(16))
    long = torch.zeros(1, 1, 300 * 16, 16)
    with pytest.raises(ValueError, match="at most 256"):
        moba_attention(long, long, long, Moba(16))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_on_a_gpu(size: int) -> None:
    inputs = [torch.randn(1, heads, 1500, size, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    check(inputs, Moba(256, 3), 1e-2)
