"""The attention of notes/ beside torch's, its tiles, its gradients and what it moves."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

PAGE = Path(__file__).parents[2] / "notes" / "Physics of LLM inference" / "Transformer mechanics" / "attention.py"
notes = SimpleNamespace(**runpy.run_path(str(PAGE)))
lengths = st.integers(1, 40)


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape) for shape in shapes]


def torch_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, scale: float | None) -> torch.Tensor:
    """torch's, with the queries at the end of the keys."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    mask = mask.tril(k.shape[-2] - q.shape[-2]) if causal else mask
    q, k, v = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    grouped = {"enable_gqa": True} if q.ndim > 2 else {}
    lead = (None,) * (4 - q.ndim)
    out = scaled_dot_product_attention(q[lead], k[lead], v[lead], attn_mask=mask, scale=scale, **grouped)
    return out.reshape(*q.shape[:-1], v.shape[-1])


@settings(max_examples=40, deadline=None)
@given(lengths, lengths, st.booleans(), st.none() | st.floats(0.1, 2), st.integers(1, 9), st.integers(1, 9))
def test_tiles_and_the_definition_give_what_torch_gives(
    queries: int, more: int, causal: bool, scale: float | None, rows: int, columns: int
) -> None:
    keys = queries + more - 1
    q, k, v, grad = drawn(1, (queries, 6), (keys, 6), (keys, 5), (queries, 5))
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    want = torch_attention(*leaves, causal, scale)  # type: ignore[arg-type]
    want.backward(torch.from_numpy(grad))
    plain = notes.attention(q, k, v, causal=causal, scale=scale)
    out, log = notes.flash_forward(q, k, v, rows, columns, causal=causal, scale=scale)
    np.testing.assert_allclose(plain, want.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(out, want.detach().numpy(), atol=1e-12)
    found = notes.flash_backward(q, k, v, out, log, grad, rows, columns, causal=causal, scale=scale)
    for ours, leaf in zip(found, leaves, strict=True):
        np.testing.assert_allclose(ours, leaf.grad.numpy(), atol=1e-11)


def test_more_queries_than_keys_leave_some_without_a_key() -> None:
    q, k, v, grad = drawn(2, (7, 4), (3, 4), (3, 4), (7, 4))
    plain = notes.attention(q, k, v)
    out, log = notes.flash_forward(q, k, v, 2, 2)
    assert not plain[:4].any()
    np.testing.assert_allclose(out, plain, atol=1e-14)
    assert np.isneginf(log[:4]).all()
    dq, dk, dv = notes.flash_backward(q, k, v, out, log, grad, 2, 2)
    assert not dq[:4].any()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()


@pytest.mark.parametrize("groups", [6, 3, 1], ids=["MHA", "GQA", "MQA"])
def test_heads_share_keys_as_torchs_do(groups: int) -> None:
    q, k, v = drawn(3, (6, 9, 8), (groups, 12, 8), (groups, 12, 8))
    np.testing.assert_allclose(notes.heads(q, k, v), torch_attention(q, k, v, True, None).numpy(), atol=1e-12)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v = drawn(3, (6, 9, 8), (4, 12, 8), (4, 12, 8))
    with pytest.raises(ValueError, match="4 heads of keys do not divide 6"):
        notes.heads(q, k, v)


def test_both_orders_of_latent_attention_agree_and_are_attention_of_the_made_keys() -> None:
    up_k, up_v, q, turned, latents, keys = drawn(
        4, (3, 8, 5), (3, 6, 5), (3, 7, 8), (3, 7, 4), (11, 5), (11, 4)
    )  # three heads of 8 and 6 channels over latents of 5
    latent = notes.Latent(up_k, up_v)
    expanded, absorbed = (way(q, turned, latents, keys) for way in (latent.expanded, latent.absorbed))
    np.testing.assert_allclose(expanded, absorbed, atol=1e-12)
    whole_k = np.concatenate([np.einsum("hdl,kl->hkd", up_k, latents), np.broadcast_to(keys, (3, 11, 4))], 2)
    want = torch_attention(np.concatenate([q, turned], 2), whole_k, np.einsum("hvl,kl->hkv", up_v, latents), True, None)
    np.testing.assert_allclose(expanded, want.numpy(), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-800, 800) | st.just(float("-inf")), min_size=1, max_size=30), st.integers(1, 31))
def test_a_softmax_in_one_pass_is_the_softmax(scores: list[float], tile: int) -> None:
    row, values = np.array(scores), np.random.default_rng(5).standard_normal((len(scores), 3))
    want = notes.softmax(row[None])[0] @ values
    np.testing.assert_allclose(notes.online_softmax(row, values, tile), want, atol=1e-12)


def test_what_moves_is_what_the_formulas_say() -> None:
    q, k, v = drawn(6, (64, 16), (96, 16), (96, 16))
    plain, flash = notes.Traffic(), notes.Traffic()
    notes.attention(q, k, v, causal=False, io=plain)
    notes.flash_forward(q, k, v, 16, 8, causal=False, io=flash)
    assert plain.moved == notes.plain_traffic(64, 96, 16)
    assert flash.moved == notes.flash_traffic(64, 96, 16, 16)
    causal = notes.Traffic()
    notes.flash_forward(q, k, v, 16, 8, io=causal)
    assert causal.reads < flash.reads  # tiles that no query sees are not read


def test_the_page_runs() -> None:
    run = subprocess.run([sys.executable, str(PAGE)], capture_output=True, text=True, check=True)
    shares = [float(line.split()[3]) for line in run.stdout.splitlines()[2:]]
    assert shares == sorted(shares)
    assert shares[-1] > 2
