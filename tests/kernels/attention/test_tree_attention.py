"""Attention along trees of drafts: every path from a root to a node, against the same tokens as a causal row."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.decode.op import DECODE_ATTENTION
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, AttentionShape, RaggedBatch
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import LEVELS, KVScales
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.base.tree import NODES, Tree, parent, popcount
from ridgeline.kernels.small.rotary.op import Projected
from tests.covering import by_pairs
from tests.kernels.trees import bits_of, drawn_parents, signed
from tests.kernels.unseen import spoiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in PAGED_ATTENTION.implementations)]
EXACT = 8e-6  # as in test_attention.py, in float32


@dataclass(frozen=True)
class Row:
    """A row of a step. parents: of each node, of which the last `queries` are the row's tokens. before: the keys before
    the root. No parents: so many tokens of a causal row."""

    queries: int
    before: int
    parents: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.before + (len(self.parents) or self.queries)

    @property
    def tree(self) -> tuple[list[int], list[int]]:
        """The bits and bases of the row's tokens."""
        if not self.parents:
            return [1] * self.queries, list(range(self.before, self.length))
        return bits_of(self.parents)[-self.queries :], [self.before] * self.queries

    def path(self, query: int) -> list[int]:
        """The places of the keys that a query sees without a window, its own the last."""
        if not self.parents:
            return list(range(self.before + query + 1))
        node, found = len(self.parents) - self.queries + query, []
        while node >= 0:
            found.append(self.before + node)
            node = self.parents[node]
        return [*range(self.before), *reversed(found)]


def batch_of(rows: tuple[Row, ...], case: AttentionCase, device: str) -> tuple[Tensor, Tensor, Tensor, RaggedBatch]:
    given_ = case.inputs(torch.float32, torch.device(device))
    bits, bases = ([each for row in rows for each in row.tree[i]] for i in (0, 1))
    tree = Tree(torch.tensor([signed(each) for each in bits], device=device), torch.tensor(bases, device=device))
    return (*given_[:3], replace(given_[3], tree=tree))


def case_of(rows: tuple[Row, ...], **options) -> AttentionCase:
    return AttentionCase(rows=tuple((row.queries, row.length) for row in rows), **options)


def by_paths(
    rows: tuple[Row, ...], case: AttentionCase, q_THD: Tensor, caches: list[Tensor], batch: RaggedBatch
) -> tuple[Tensor, Tensor]:
    """Every query attends in float64 to the keys of its own path, gathered one behind another: what a causal row of
    these tokens gives its last one. Returns the outputs and the cells that some query sees, [N, P]."""
    softmax = case.softmax(torch.float32, torch.device("cpu"))
    none, nothing = torch.zeros(case.num_heads), torch.full((case.num_heads,), -torch.inf)
    slopes = (none if softmax.slopes_H is None else softmax.slopes_H).double()
    sinks = (nothing if softmax.sinks_H is None else softmax.sinks_H).double()
    outputs, token = [], 0
    seen = torch.zeros(len(caches[0]), case.block_size, dtype=torch.bool)
    for index, row in enumerate(rows):
        table = batch.block_table_SC[batch.slots_R[index]].tolist()
        for query in range(row.queries):
            path = row.path(query)[-(case.window or NODES + row.length) :]
            places = [(table[place // case.block_size], place % case.block_size) for place in path]
            for block, offset in places:
                seen[block, offset] = True
            k, v = (torch.stack([cache[b, :, o] for b, o in places]).cpu().double() for cache in caches)
            heads = []
            for head in range(case.num_heads):
                g = head // (case.num_heads // case.num_kv_heads)
                scores = softmax.scale * k[:, g] @ q_THD[token, head].cpu().double()
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                scores -= slopes[head] * torch.arange(len(path) - 1, -1, -1)
                heads.append((scores.exp() / (scores.exp().sum() + sinks[head].exp())) @ v[:, g])
            outputs.append(torch.stack(heads))
            token += 1
    return torch.stack(outputs), seen


def check(name: str, rows: tuple[Row, ...], case: AttentionCase, device: str) -> None:
    """Nothing but the keys of the paths is read: others are not numbers."""
    q_THD, *caches, batch = batch_of(rows, case, device)
    expected, seen = by_paths(rows, case, q_THD, caches, batch)
    units = torch.stack(caches, 1).masked_fill_(~seen.to(device)[:, None, None, :, None], torch.nan)
    if name == "triton":
        batch = replace(batch, num_tokens_R=None, kv_bound_R=None)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    out = attend(q_THD, units[:, 0], units[:, 1], batch, **case.options(torch.float32, torch.device(device)))
    assert (out.cpu().double() - expected).abs().max().item() <= EXACT


def tree(seed: int, nodes: int, queries: int, before: int, wide: float = 0.5) -> Row:
    return Row(queries, before, drawn_parents(random.Random(seed), nodes, wide))


STAR = (-1, *[0] * 63)
CHAIN = tuple(range(-1, 63))
STEPS = (
    (tree(0, 8, 8, 90), tree(1, 8, 8, 0), tree(2, 8, 8, 64)),
    (tree(3, 8, 8, 300), tree(4, 8, 8, 21), Row(8, 40)),
    (tree(5, 40, 9, 130), tree(6, 9, 9, 3), tree(7, 12, 9, 500)),  # levels of a head's tree behind its verification's
    (tree(8, 3, 1, 70), tree(9, 64, 1, 200), tree(10, 64, 1, 0)),
    (tree(11, 64, 64, 75), tree(12, 64, 64, 0, 0.1), Row(64, 5, STAR), Row(64, 200, CHAIN)),
    (tree(13, 20, 20, 33), Row(150, 60), tree(14, 5, 5, 1), Row(1, 90), tree(15, 64, 30, 90)),
    (tree(16, 25, 25, 70), tree(17, 25, 25, 640)),
)
WAYS = (
    {},
    {"window": 12, "block_size": 4},
    {"window": 70, "sinks": True},
    {"alibi": True, "num_heads": 6},
    {"alibi": True, "window": 5, "num_heads": 8, "num_kv_heads": 1},
    {"softcap": 3.0, "sinks": True, "num_heads": 2},
)


# Rows of many tokens have a kernel of their own, in which every kind of attention must occur as well
LONG = [step for step, rows in enumerate(STEPS) if max(row.queries for row in rows) > 40]
SHORT = [step for step in range(len(STEPS)) if step not in LONG]


@pytest.mark.few(30)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "step", "way"),
    [*by_pairs(IMPLEMENTATIONS, SHORT, WAYS), *by_pairs(IMPLEMENTATIONS, LONG, WAYS)],
    ids=str,
)
def test_a_node_sees_its_path_and_nothing_else(name: str, step: int, way: dict, device: str) -> None:
    check(name, STEPS[step], case_of(STEPS[step], **way), device)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[Row, ...], AttentionCase]:
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = draw(st.integers(1, NODES))
        parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes)))
        rows.append(Row(draw(st.integers(1, nodes)), draw(st.integers(0, 90)), parents))
    window = draw(st.none() | st.integers(1, 80))
    return tuple(rows), case_of(tuple(rows), window=window, alibi=draw(st.booleans()), num_kv_heads=1, num_heads=2)


@pytest.mark.dealt
@settings(max_examples=25, deadline=None)
@given(steps())
def test_any_tree_is_attended_to_along_its_paths(step: tuple[tuple[Row, ...], AttentionCase]) -> None:
    for name in ("reference", "sdpa"):
        check(name, *step, "cpu")


@settings(max_examples=6, deadline=None)
@given(steps())
def test_the_kernels_attend_along_any_tree(step: tuple[tuple[Row, ...], AttentionCase]) -> None:
    check("triton", *step, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("queries", [6, 30])
def test_chains_are_what_they_are_without_a_tree(name: str, window: int | None, queries: int, device: str) -> None:
    """As bits over the row, and as tokens that all have their own position for a base."""
    case = AttentionCase(rows=((queries, 100), (queries, queries), (queries, 300)), window=window, num_heads=8)
    q_THD, *caches, batch = case.inputs(torch.float32, torch.device(device))
    options = case.options(torch.float32, torch.device(device))
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    expected = attend(q_THD, *caches, batch, **options)
    base_T = torch.tensor([length - new for new, length in case.rows]).repeat_interleave(queries)
    index_T = torch.arange(queries).repeat(len(case.rows))
    for tree_ in (Tree((2 << index_T) - 1, base_T), Tree(torch.ones_like(base_T), base_T + index_T)):
        given_ = replace(batch, tree=Tree(*(x.to(device) for x in tree_)), derived={})
        out = attend(q_THD, *spoiled(case, caches, batch), given_, **options)
        torch.testing.assert_close(out, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("queries", [8, 40])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_stopped_row_with_a_tree_stays_finite_and_disturbs_nobody(
    name: str, queries: int, window: int | None, device: str
) -> None:
    """`step_inputs` gives its tokens position 0 and their own bit."""
    rows = tuple(tree(seed, queries, queries, before) for seed, before in ((0, 90), (1, 200), (2, 30)))
    case = case_of(rows, window=window, num_heads=8)
    q_THD, *caches, batch = batch_of(rows, case, device)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    expected = attend(q_THD, *caches, batch, **case.options(torch.float32, torch.device(device)))
    lengths, bits_T, base_T = batch.kv_len_R.clone(), *(x.clone() for x in batch.tree)
    lengths[1] = 1
    bits_T[queries : 2 * queries], base_T[queries : 2 * queries] = 1, 0
    stopped = replace(
        batch, kv_len_R=lengths, tree=Tree(bits_T, base_T), num_tokens_R=None, kv_bound_R=None, derived={}
    )
    out = attend(q_THD, *caches, stopped, **case.options(torch.float32, torch.device(device)))
    assert out.isfinite().all()
    others = torch.tensor([*range(queries), *range(2 * queries, 3 * queries)], device=device)
    torch.testing.assert_close(out[others], expected[others], atol=EXACT, rtol=0)


def schedule_of(batch: RaggedBatch, case: AttentionCase, tokens: int, **options):
    shape = AttentionShape(
        num_tokens=tokens,
        tokens_each=batch.tokens_each,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        window=case.window,
        **options,
    )
    return make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)


@pytest.mark.parametrize("device", DEVICES)
def test_a_schedule_says_whether_it_knows_trees(device: str) -> None:
    rows = STEPS[0]
    case = case_of(rows, window=20)
    q_THD, *caches, batch = batch_of(rows, case, device)
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    options = case.options(torch.float32, torch.device(device))
    expected = attend(q_THD, *caches, batch, **options)
    with pytest.raises(ValueError, match="make schedules with trees"):
        attend(q_THD, *caches, replace(batch, schedule=schedule_of(batch, case, len(q_THD))), **options)
    schedule = schedule_of(batch, case, len(q_THD), trees=True)
    for _ in range(2):  # a schedule is as good as new after a layer has used it
        assert torch.equal(attend(q_THD, *caches, replace(batch, schedule=schedule), **options), expected)


@pytest.mark.few(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "levels", "step", "way"),
    by_pairs(["triton", "sdpa"], [None, *LEVELS], [0, 2, 4], [{}, {"window": 20, "alibi": True}]),
    ids=str,
)
def test_trees_are_attended_to_in_16_bits_and_in_levels(
    name: str, levels: torch.dtype | None, step: int, way: dict, device: str
) -> None:
    rows = STEPS[step]
    case = case_of(rows, num_heads=4, head_dim=32, **way)
    q_THD, *caches, batch = batch_of(rows, case, device)
    options, scales = case.options(torch.float16, torch.device(device)), None
    given_ = numbers_ = [x.half() for x in caches]
    if levels is not None:
        each = [kv_cache.row_scales(cache, levels) for cache in caches]
        scales = KVScales(pairs_NGP2=torch.stack(each, -1))
        given_ = [kv_cache.levels(cache, scale, levels) for cache, scale in zip(caches, each, strict=True)]
        numbers_ = [kv_cache.numbers(x, scale, torch.float32) for x, scale in zip(given_, each, strict=True)]
    attend = PAGED_ATTENTION.choose(Platform.of(torch.device(device)), name)
    out = attend(q_THD.half(), *given_, batch, **options, scales=scales)
    expected, _ = by_paths(rows, case, q_THD.half(), numbers_, batch)
    assert (out.cpu().double() - expected).abs().max().item() <= 8 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_trees_do_not_read_shared_blocks_together(device: str) -> None:
    """Nor does the kernel for Hopper take their long rows: it knows neither."""
    rows = (tree(0, 64, 1, 300), tree(1, 64, 1, 300))
    case = case_of(rows, block_size=64, head_dim=128)
    q_THD, k_cache, _, batch = batch_of(rows, case, device)
    prefix_4R = torch.tensor([[0, 1], [0, 0], [2, 2], [256, 256]], dtype=torch.int32, device=device)
    assert schedule_of(batch, case, len(q_THD), prefix_4R=prefix_4R).cascade is not None
    assert schedule_of(batch, case, len(q_THD), prefix_4R=prefix_4R, trees=True).cascade is None
    long = replace(batch, tokens_each=0)
    made = schedule_of(long, case, 2048, cache_NGPD=k_cache.bfloat16(), trees=True)
    assert made.hopper is None
    assert made.trees


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [implementation.name for implementation in DECODE_ATTENTION.implementations])
@pytest.mark.parametrize("window", [None, 9])
def test_a_step_of_one_node_a_row_decodes_along_its_path(name: str, window: int | None, device: str) -> None:
    """A level of a tree may be one node wide. Its key is written where its place is, and turned by its position."""
    rows = (tree(0, 30, 1, 70), tree(1, 2, 1, 0), tree(2, 64, 1, 33))
    case = DecodeCase(lengths=tuple(row.length for row in rows), window=window)
    projected, plain = case.inputs(torch.float32, torch.device(device))
    *_, batch = batch_of(rows, case.attention, device)
    tree_ = Tree(*(x.to(device) for x in batch.tree))
    projected = projected._replace(positions_T=tree_.positions_T)
    options = case.options(torch.float32, torch.device(device))
    batch, caches = replace(plain, tree=tree_), [x.clone() for x in projected[6:8]]
    out = DECODE_ATTENTION.choose(Platform.of(torch.device(device)), name)(projected, batch, **options)

    def fresh() -> Projected:
        return projected._replace(k_cache_NGPD=caches[0].clone(), v_cache_NGPD=caches[1].clone())

    expected = DECODE_ATTENTION.reference(fresh(), batch, **options)
    torch.testing.assert_close(out, expected, atol=EXACT, rtol=1e-5)
    causal = DECODE_ATTENTION.reference(fresh(), plain, **options)
    assert not torch.allclose(causal, expected, atol=1e-2)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_bits_are_counted_and_parents_found(rest: int) -> None:
    bits = rest | 1
    top = bits.bit_length() - 1
    tensor = torch.tensor([signed(bits)])
    assert popcount(tensor).item() == bits.bit_count()
    assert parent(tensor).item() == (bits ^ 1 << top).bit_length() - 1
