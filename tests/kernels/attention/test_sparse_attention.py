"""Sparse attention: an indexer's keys, its choice, and attention to what it chose. The implementations against the
references, and these against the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.kernels.attention.expanded.op import chosen_bits
from ridgeline.kernels.attention.latent.op import latent_attention_reference
from ridgeline.kernels.attention.sparse import torch_ops
from ridgeline.kernels.attention.sparse.cases import CASES, LEVELS, IndexKeysCase, IndexTopkCase, SparseCase
from ridgeline.kernels.attention.sparse.cost import (
    attended_pairs,
    index_topk_cost,
    masked_words,
    sparse_attention_cost,
    worth_masking,
)
from ridgeline.kernels.attention.sparse.op import (
    INDEX_KEYS,
    INDEX_TOPK,
    SPARSE_ATTENTION,
    best,
    choice_bits_reference,
    index_keys_reference,
    index_topk_reference,
    sparse_attention_reference,
)
from ridgeline.kernels.base.case import as_cases
from ridgeline.kernels.base.kv_cache import levels, numbers, row_scales
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.tree import Tree
from tests.kernels.trees import bits_of, signed

pytest.importorskip("triton")
from ridgeline.kernels.attention.sparse import gathered
from ridgeline.kernels.attention.sparse import triton as triton_ops

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KEYS, CHOICES = (as_cases(kind, (*CASES, *LEVELS)) for kind in (IndexKeysCase, IndexTopkCase))
LABELS = {"ids": lambda case: case.label}
INTERPRETED_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", KEYS, **LABELS)
def test_keys_and_queries_are_those_of_the_reference(case: IndexKeysCase, device: str) -> None:
    want_arguments, found_arguments = (case.inputs(torch.float32, torch.device(device)) for _ in range(2))
    want, found = index_keys_reference(*want_arguments), triton_ops.index_keys(*found_arguments)
    torch.testing.assert_close(found, want, atol=4e-6, rtol=1e-5)
    (keys, scales), (want_keys, want_scales) = found_arguments[7], want_arguments[7]
    if scales is None:
        torch.testing.assert_close(keys, want_keys, atol=4e-6, rtol=1e-5, equal_nan=True)
        return
    # A rounding of float32 may change a level or the last of a scale's eight digits, and few do
    torch.testing.assert_close(scales, want_scales, atol=0, rtol=2**-7, equal_nan=True)
    kept, want_kept = (numbers(*pair, torch.float32) for pair in ((keys, scales), (want_keys, want_scales)))
    far = ~torch.isclose(kept, want_kept, atol=4e-6, rtol=1e-5, equal_nan=True)
    assert far.float().mean() < 0.002
    torch.testing.assert_close(kept, want_kept, atol=0.05, rtol=0.25, equal_nan=True)


def choosers(device: str) -> list[Callable[..., Tensor]]:
    return [triton_ops.index_topk, *([torch_ops.index_topk] if device == "cpu" else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CHOICES, **LABELS)
def test_the_same_places_are_chosen_by_all(case: IndexTopkCase, device: str) -> None:
    """Scores are small whole numbers, of which many are equal."""
    arguments, options = case.inputs(torch.float32, torch.device(device)), case.options(torch.float32, CPU)
    want = index_topk_reference(*arguments, **options)
    for choose in choosers(device):
        assert torch.equal(choose(*arguments, **options), want)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_do_not_fit_at_once_are_made_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexTopkCase(rows=((30, 100), (1, 90)), block_size=4, selected=33)
    arguments, options = case.inputs(torch.float32, torch.device(device)), case.options(torch.float32, CPU)
    monkeypatch.setattr(triton_ops, "SCORE_BYTES", 7 * 4 * 100)
    monkeypatch.setattr(torch_ops, "SCORES", 7 * 5 * 100)
    for choose in choosers(device):
        assert torch.equal(choose(*arguments, **options), index_topk_reference(*arguments, **options))


def test_rows_that_the_host_does_not_know_are_chosen_alike() -> None:
    """As in a captured graph: the table's columns bound the lengths, and tokens may belong to no row."""
    case = IndexTopkCase(rows=((2, 60), (2, 20)), selected=16)
    q_TID, weights_TI, cache, batch = case.inputs(torch.float32, CPU)
    want = index_topk_reference(q_TID, weights_TI, cache, batch, count=16)
    unknown = replace(batch, num_tokens_R=None, kv_bound_R=None, derived={})
    more = [torch.cat((x, x[:3])) for x in (q_TID, weights_TI)]
    assert torch.equal(triton_ops.index_topk(*more, cache, unknown, count=16)[:4], want)


def with_tree(case: SparseCase, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a case with one row, whose new tokens are a tree."""
    [(new, kv)] = case.rows
    parents = [-1, 0, 0, 1, 2, 2, 5][:new]
    tree = Tree(torch.tensor([signed(bits) for bits in bits_of(parents)]), torch.full((new,), kv - new))
    return tuple(replace(each, tree=tree) if hasattr(each, "tree") else each for each in arguments)


@pytest.mark.parametrize("selected", [8, 64])
def test_nodes_of_a_tree_choose_among_those_above_them(selected: int) -> None:
    case = IndexTopkCase(rows=((7, 40),), selected=selected)
    arguments = with_tree(case, case.inputs(torch.float32, CPU))
    want = index_topk_reference(*arguments, count=selected)
    assert want[3].tolist().count(35) == 0  # the root's second child is not above its first child's child
    for choose in choosers("cpu"):
        assert torch.equal(choose(*arguments, count=selected), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, **LABELS)
def test_attention_is_that_of_the_reference(case: SparseCase, device: str) -> None:
    """Whatever cells hold that nobody chose: those of the case are NaN where nobody could."""
    arguments, options = case.inputs(torch.float32, torch.device(device)), case.options(torch.float32, CPU)
    want = sparse_attention_reference(*arguments, **options)
    for attend in [triton_ops.sparse_attention, *([torch_ops.sparse_attention] if device == "cpu" else [])]:
        torch.testing.assert_close(attend(*arguments, **options), want, atol=2e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, **LABELS)
def test_attention_in_bfloat16_is_near_the_reference(case: SparseCase) -> None:
    arguments, options = case.inputs(torch.bfloat16, torch.device("cuda")), case.options(torch.bfloat16, CPU)
    want = sparse_attention_reference(*arguments, **options)
    torch.testing.assert_close(triton_ops.sparse_attention(*arguments, **options), want, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("parts", [1, 4])
def test_parts_of_the_choice_add_up(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SparseCase(rows=((1, 300), (1, 9)), selected=128)
    arguments, options = case.inputs(torch.float32, CPU), case.options(torch.float32, CPU)
    monkeypatch.setattr(triton_ops, "num_multiprocessors", lambda device: 2 * parts)
    found = triton_ops.sparse_attention(*arguments, **options)
    torch.testing.assert_close(found, sparse_attention_reference(*arguments, **options), atol=2e-5, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [1 << 30, 40_000])
def test_chosen_vectors_that_are_gathered_first_give_the_same(
    together: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once or in pieces, with tokens that see fewer than are chosen, one that chose none, and NaN around."""
    case = SparseCase(rows=((3, 90), (1, 70), (20, 25), (2, 200)), selected=32, heads=4)
    q_THL, q_THY, cache, batch, chosen_TK = case.inputs(torch.float32, torch.device(device))
    chosen_TK[1] = -1
    want = sparse_attention_reference(q_THL, q_THY, cache, batch, chosen_TK, scale=0.1)
    monkeypatch.setattr(gathered, "BLOCK", 16)
    monkeypatch.setattr(gathered, "COPIED", 8)
    monkeypatch.setattr(gathered, "GATHERED_BYTES", together)
    monkeypatch.setattr(gathered, "gathers", lambda *_: True)
    for known in (batch, replace(batch, num_tokens_R=None, kv_bound_R=None)):
        found = triton_ops.sparse_attention(q_THL, q_THY, cache, known, chosen_TK, scale=0.1)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hoppers_kernel_attends_to_what_was_gathered(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")
    monkeypatch.setattr(gathered.cost, "GATHERS", True)
    used, attend = list[int](), gathered.attend
    monkeypatch.setattr(gathered, "attend", lambda *given: (used.append(len(given[0])), attend(*given))[1])
    shapes: dict[str, Any] = {"num_heads": 128, "rank": 512, "rope_dim": 64, "block_size": 64}
    case = SparseCase(rows=((3, 5120), (1, 2560), (2, 700), (1, 1)), selected=2048, **shapes)
    *inputs, batch, chosen_TK = case.inputs(dtype, torch.device("cuda"))
    chosen_TK[4] = -1
    want = sparse_attention_reference(*(x.float() for x in inputs), batch, chosen_TK, scale=192**-0.5)
    found = triton_ops.sparse_attention(*inputs, batch, chosen_TK, scale=192**-0.5)
    assert used
    assert (found.float() - want).abs().max() <= 8 * torch.finfo(dtype).eps * (1 + want.abs().max())


def test_vectors_are_gathered_for_whole_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "num_multiprocessors", lambda device: 132)
    each = 2048 * 576 * 2
    assert [gathered.tokens_at_once(tokens, 128, each, CPU) for tokens in (1, 64, 113, 2048)] == [1, 64, 113, 66]
    assert gathered.tokens_at_once(2048, 64, each, CPU) == 113  # less than a wave


def test_a_choice_of_all_is_attention_to_all() -> None:
    case = SparseCase(rows=((5, 20), (1, 24)))
    *tensors, batch, chosen = case.inputs(torch.float32, CPU)
    scale = case.options(torch.float32, CPU)
    found = sparse_attention_reference(*tensors, batch, chosen, **scale)
    torch.testing.assert_close(found, latent_attention_reference(*tensors, batch, **scale), atol=2e-6, rtol=0)


def test_a_token_without_a_choice_gets_zeros() -> None:
    case = SparseCase(rows=((1, 300), (1, 9)))
    *tensors, batch, chosen = case.inputs(torch.float32, CPU)
    chosen[1] = -1
    for attend in (triton_ops.sparse_attention, torch_ops.sparse_attention, sparse_attention_reference):
        out_THL = attend(*tensors, batch, chosen, scale=0.2)
        assert out_THL[0].abs().max() > 0
        assert torch.equal(out_THL[1], torch.zeros_like(out_THL[1]))


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30), st.integers(1, 31), st.data())
def test_the_best_are_taken_and_of_equals_the_earlier(scores: list[float], count: int, data: st.DataObject) -> None:
    seen = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    found = best(torch.tensor([scores]), torch.tensor([seen]), count)[0].tolist()
    order = sorted((-score, place) for place, (score, sees) in enumerate(zip(scores, seen, strict=True)) if sees)
    taken = {place for _, place in order[:count]}
    assert {place for place, taking in enumerate(found) if taking} == taken


def test_each_platform_has_an_implementation() -> None:
    for op in (INDEX_KEYS, INDEX_TOPK, SPARSE_ATTENTION):
        assert op.chosen(Platform(device_type="cuda", arch="sm_90")) == "triton"
    assert SPARSE_ATTENTION.chosen(Platform(device_type="cpu")) == "torch"


@pytest.mark.parametrize("count", [1, 7, 100])
def test_costs_count_the_pairs_that_are_computed(count: int) -> None:
    rows = [(5, 9), (1, 40), (20, 20), (3, 107)]
    new, lengths = zip(*rows, strict=True)
    want = sum(min(seen, count) for n, kv in rows for seen in range(kv - n + 1, kv + 1))
    assert attended_pairs(new, lengths, count) == want
    sizes = {"num_heads": 4, "rank": 32, "rope_dim": 16, "itemsize": 2}
    assert sparse_attention_cost(new, lengths, **sizes, count=count).flops == 2 * (48 + 32) * 4 * want
    scored = [(n, kv) for n, kv in rows if kv > count]
    pairs = sum(seen for n, kv in scored for seen in range(kv - n + 1, kv + 1))
    assert index_topk_cost(new, lengths, heads=3, dim=8, count=count, itemsize=2).flops == 2 * 9 * 3 * pairs


def drawn(kind: str, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [Q, 64, 128], weights and keys before their norm, float64: "random" numbers; keys and queries of
    16 directions; channels of very unlike size; or keys that lie around one point far from 0, as a norm's bias makes
    them."""
    made = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    q_QID, weights_QI, key_JD = normal(queries, 64, 128), normal(queries, 64), normal(keys, 128)
    if kind == "directions":
        turn = normal(16, 128)
        q_QID, key_JD = q_QID[..., :16] @ turn + 0.3 * q_QID, key_JD[:, :16] @ turn + 0.3 * key_JD
    if kind == "channels":
        sizes_D = normal(128).mul(1.5).exp()
        q_QID, key_JD = q_QID * sizes_D.sqrt(), key_JD * sizes_D
    if kind == "bias":
        q_QID[..., :6] += 8
    return q_QID, weights_QI, key_JD


@pytest.mark.parametrize("kind", ["random", "directions", "channels", "bias"])
def test_levels_choose_nearly_what_exact_keys_do(kind: str) -> None:
    """Of 4,096 places 512, beside the choice by scores in float64. With a scale a token int8 keeps more of it than
    E4M3, whatever keys look like, and more than E4M3 behind a Hadamard rotation of queries and keys (DeepSeek-V3.2's
    published code). Attention to the choice, whose weights follow the same scores, differs less too."""
    q_QID, weights_QI, key_JD = drawn(kind, 3, 4096)
    bias = torch.zeros(128, dtype=torch.float64)
    if kind == "bias":
        bias[:6] = torch.tensor([9.0, -14, 4, 20, -6, 11])
    key_JD = torch.nn.functional.layer_norm(key_JD, (128,)) + bias
    held, turn = key_JD.bfloat16(), hadamard(128)
    forms = {
        "16 bits": held.double(),
        "int8": rounded(held, torch.int8),
        "e4m3": rounded(held, torch.float8_e4m3fn),
        "e4m3, rotated": rounded((held.double() @ turn).bfloat16(), torch.float8_e4m3fn) @ turn,
    }
    exact_QJ, seen_QJ = index_scores64(q_QID, weights_QI, key_JD), torch.ones(3, 4096, dtype=torch.bool)
    want_QJ, latents_JL = best(exact_QJ, seen_QJ, 512), torch.randn(4096, 32, dtype=torch.float64)
    kept, off = dict[str, float](), dict[str, float]()
    for name, keys in forms.items():
        found_QJ = best(index_scores64(q_QID, weights_QI, keys), seen_QJ, 512)
        kept[name] = ((found_QJ & want_QJ).sum() / want_QJ.sum()).item()
        attended = [
            (exact_QJ / exact_QJ.std()).masked_fill(~each_QJ, -torch.inf).softmax(1) @ latents_JL
            for each_QJ in (found_QJ, want_QJ)
        ]
        off[name] = ((attended[0] - attended[1]).norm() / attended[1].norm()).item()
    print(kind, {name: (round(share, 4), round(off[name], 4)) for name, share in kept.items()})
    assert kept["16 bits"] >= kept["int8"] > max(kept["e4m3"], kept["e4m3, rotated"])
    assert kept["int8"] > 0.96
    assert off["int8"] < off["e4m3"]
    assert off["int8"] < 0.3


def hadamard(size: int) -> Tensor:
    """Return the orthogonal matrix of signs."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), found)
    return found * size**-0.5


def rounded(x_JD: Tensor, form: torch.dtype) -> Tensor:
    """Return keys as their levels stand for them, in float64."""
    scale_J = row_scales(x_JD, form)
    return numbers(levels(x_JD, scale_J, form), scale_J, torch.float32).double()


def index_scores64(q_QID: Tensor, weights_QI: Tensor, key_JD: Tensor) -> Tensor:
    return (weights_QI[:, None] @ (q_QID @ key_JD.T).relu())[:, 0]


def test_a_mask_is_for_rows_that_take_less_time_with_it() -> None:
    """Of DeepSeek-V3.2's heads, FLOPs counted pair by pair, of which gathered ones take twice the time: for a chunk of
    2,048 tokens as measured, whose attention took 4.5 ms under a mask and 7.2 gathered at 8,192 tokens, and 8.9 and 7.5
    at 16,384. Few tokens are left to others, and masks are never longer than is planned for."""
    sizes = {"count": 2048, "key_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512}
    tokens = np.array([2048, 2048, 128, 127, 8192, 26_000, 28_000, 256, 256])
    cached = np.array([8192, 16_384, 4500, 4500, 8192, 26_000, 28_000, 2100, 9000])
    found = worth_masking(tokens, cached, **sizes)
    for new, kv, masked in zip(tokens.tolist(), cached.tolist(), found.tolist(), strict=True):
        seen = np.arange(kv - new + 1, kv + 1)
        dense = 2 * (128 + 64 + 128) * seen.sum() + 2 * 512 * (128 + 128) * (kv - new)
        chosen = 2 * (2 * 512 + 64) * np.minimum(seen, 2048).sum()
        assert masked == (new >= 128 and dense < 2 * chosen)
    assert found.tolist() == [True, False, False, False, True, True, False, True, False]
    longest = max(kv for kv in range(64, 40_000, 64) if worth_masking(kv, kv, **sizes))
    assert longest / 64 <= masked_words(1 << 20, **sizes) == 436
    assert masked_words(4096, **sizes) == 64


@pytest.mark.parametrize("device", DEVICES)
def test_places_become_bits(device: str) -> None:
    chosen_TK = torch.tensor([[0, 63, 64, 130, 191], [-1] * 5, [5, 127, -1, -1, -1]], dtype=torch.int32, device=device)
    for made in (choice_bits_reference, triton_ops.choice_bits):
        bits_TW = made(chosen_TK, 4)
        found = [chosen_bits(bits_TW, 200)[token].nonzero()[:, 0].tolist() for token in range(3)]
        assert found == [[0, 63, 64, 130, 191], [], [5, 127]]
