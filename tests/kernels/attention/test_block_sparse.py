"""Attention over listed blocks of keys, forward and backward, beside its definition in float64 and beside torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

module = pytest.importorskip("ridgeline.kernels.attention.triton_block_sparse")
BlockMask, block_sparse, reference = module.BlockMask, module.block_sparse, module.block_sparse_reference
Tiles = module.Tiles


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tiles_of", lambda kernel, width, itemsize=2: Tiles(16, 32, 4, 1))


def check(mask, length: int, heads: int = 2, groups: int = 1, size: int = 16, dtype=torch.float32, within=3e-6) -> None:
    shapes = (2, heads, length, size), (2, groups, length, size), (2, groups, length, size)
    inputs, grad = [torch.randn(shape, dtype=torch.float64) for shape in shapes], torch.randn(shapes[0])
    found = []
    for function, kind in ((block_sparse, dtype), (reference, torch.float64)):
        leaves = [x.detach().clone().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves, mask)
        out.backward(grad.to(out.dtype))
        found.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert torch.isfinite(a).all(), name
        assert (a - b).norm() <= within * max(b.norm(), found[1][-1].norm() / 10), name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [128, 115, 97])
def test_big_bird(causal: bool, length: int) -> None:
    """With whole blocks and a last one that is cut; another mask for each head, groups of two."""
    check(BlockMask(module.big_bird(-(-length // 32), random=1, heads=4), 32, causal), length, heads=4, groups=2)


@pytest.mark.parametrize("causal", [True, False])
def test_longformer(causal: bool) -> None:
    check(BlockMask(module.longformer(7, window=3), 16, causal), 108, size=20)


def test_half_precision_and_blocks_of_several_tiles() -> None:
    check(BlockMask(module.longformer(3, window=1), 64), 180, size=32, dtype=torch.float16, within=3e-3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mask(data: st.DataObject) -> None:
    """Rows and columns without a block too: such queries give 0, such keys have no gradient."""
    length, block = data.draw(st.integers(1, 90)), data.draw(st.sampled_from([16, 32]))
    blocks = -(-length // block)
    bits = data.draw(st.lists(st.booleans(), min_size=blocks**2, max_size=blocks**2))
    check(BlockMask(torch.tensor(bits).view(1, blocks, blocks), block, data.draw(st.booleans())), length)


def test_torchs_own_attention_agrees() -> None:
    mask = BlockMask(module.big_bird(6, heads=2), 16, causal=False)
    q, k, v = (torch.randn(1, 2, 90, 16, dtype=torch.float64) for _ in range(3))
    want = scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(90))
    assert torch.allclose(reference(q, k, v, mask), want, atol=1e-12)
    assert torch.allclose(block_sparse(q.float(), k.float(), v.float(), mask).double(), want, atol=1e-5)


def test_patterns_list_what_their_papers_do() -> None:
    seen = module.longformer(8, window=3, first=1)[0]
    assert seen[0].all()
    assert seen[:, 0].all()
    assert seen[5].nonzero().flatten().tolist() == [0, 4, 5, 6]
    random = module.big_bird(40, window=3, first=2, random=3, seed=1, heads=2)
    assert (random[:, 2:].sum(-1) <= 2 + 3 + 3).all()
    assert (random[:, 5:-1].sum(-1) == 8).all()
    assert not torch.equal(random[0], random[1])
    assert torch.equal(random, module.big_bird(40, window=3, first=2, random=3, seed=1, heads=2))
    assert BlockMask(module.big_bird(512), causal=False).density == pytest.approx(0.0195, abs=1e-4)
    assert BlockMask(module.big_bird(512)).density * 512 / 256.5 == pytest.approx(0.021, abs=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    seen, q = module.longformer(4), torch.randn(1, 2, 50, 16)
    with pytest.raises(ValueError, match="16, 32, 64"):
        BlockMask(seen, 48)
    with pytest.raises(ValueError, match="a mask is bool"):
        BlockMask(seen[0], 16)
    with pytest.raises(ValueError, match="do not fit a mask"):
        block_sparse(q, q, q, BlockMask(seen, 32))
    with pytest.raises(ValueError, match="G divides H"):
        block_sparse(q, q[:, :, :40], q[:, :, :40], BlockMask(seen, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, causal: bool, size: int) -> None:
    monkeypatch.undo()
    mask = BlockMask(module.big_bird(8, heads=4), 128, causal)
    q, k, v = (torch.randn(2, heads, 1000, size, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    want = reference(q.double(), k.double(), v.double(), mask)
    assert ((block_sparse(q, k, v, mask).double() - want).norm() / want.norm()) < 1e-2
