"""Sparse attention: an indexer's keys, its choice, and attention to what it chose. The implementations against the
references, and these against the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.kernels.attention.latent.op import latent_attention_reference
from ridgeline.kernels.attention.sparse import torch_ops
from ridgeline.kernels.attention.sparse.cases import CASES, IndexKeysCase, IndexTopkCase, SparseCase
from ridgeline.kernels.attention.sparse.cost import attended_pairs, index_topk_cost, sparse_attention_cost
from ridgeline.kernels.attention.sparse.op import (
    INDEX_KEYS,
    INDEX_TOPK,
    SPARSE_ATTENTION,
    best,
    index_keys_reference,
    index_topk_reference,
    sparse_attention_reference,
)
from ridgeline.kernels.base.case import as_cases
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.tree import Tree
from tests.kernels.trees import bits_of, signed

pytest.importorskip("triton")
from ridgeline.kernels.attention.sparse import triton as triton_ops

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KEYS, CHOICES = as_cases(IndexKeysCase, CASES), as_cases(IndexTopkCase, CASES)
LABELS = {"ids": lambda case: case.label}
INTERPRETED_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", KEYS, **LABELS)
def test_keys_and_queries_are_those_of_the_reference(case: IndexKeysCase, device: str) -> None:
    want_arguments, found_arguments = (case.inputs(torch.float32, torch.device(device)) for _ in range(2))
    want, found = index_keys_reference(*want_arguments), triton_ops.index_keys(*found_arguments)
    torch.testing.assert_close(found, want, atol=4e-6, rtol=1e-5)
    torch.testing.assert_close(found_arguments[7], want_arguments[7], atol=4e-6, rtol=1e-5, equal_nan=True)


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
