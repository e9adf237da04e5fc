"""A step without a scheduler: the plan of any `StepShape`, over a cache that was not filled.

Legend:
    R  rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Assign, Feature, RowKind, Rows, Span, StepPlan
from ridgeline.core.specs.cache_layout import NULL_BLOCK, CacheLayout
from ridgeline.core.specs.model import ModelSpec
from ridgeline.core.specs.state import StateSpec
from ridgeline.kernels.base.cost import StepShape


def layout_for(spec: ModelSpec, shape: StepShape, dtype: str, block_size: int, spare: int = 0) -> CacheLayout:
    """Return the smallest cache in which the step's rows have room, and `spare` further tokens of each."""
    layout = CacheLayout(groups=spec.cache_groups, block_size=block_size, dtype=dtype, num_pages=2)
    pages = 1
    for group, each in enumerate(layout.groups):
        blocks = sum(len(set(_entries(each.spec, block_size, *row, spare).values())) for row in _rows(shape))
        pages += -(-blocks // layout.blocks_per_page(group))
    return replace(layout, num_pages=pages)


def _entries(spec: StateSpec, block_size: int, count: int, length: int, spare: int = 0) -> dict[int, int]:
    """Return the entries of a row's table that a step needs, and the number of the block in each. The step runs `count`
    tokens, after which `length` are cached; `spare` more may follow, one by one."""
    first, last = spec.first_needed(length - count) // block_size, (length - 1) // block_size
    end = (length + spare - 1) // block_size + 1
    return dict.fromkeys((first, *range(last, end)), 0) if spec.exact else {n: n - first for n in range(first, end)}


def _table(entries: Mapping[int, int], ids: Iterator[int]) -> tuple[int, ...]:
    """Return a table with blocks from `ids` in these entries."""
    blocks = list(islice(ids, 1 + max(entries.values())))
    return tuple(blocks[entries[n]] if n in entries else NULL_BLOCK for n in range(1 + max(entries)))


def made_plan(spec: ModelSpec, shape: StepShape, layout: CacheLayout, number: int = 1, spare: int = 0) -> StepPlan:
    """Return the step as plan `number`, whose rows start where `shape` says. Their blocks lie scattered in the cache,
    and have room for `spare` tokens more."""
    counts_R, lengths_R = np.asarray(shape.num_tokens_R, np.int32), np.asarray(shape.kv_len_R, np.int32)
    random = np.random.default_rng(0)
    pages = iter((1 + random.permutation(layout.num_pages - 1)).tolist())
    ids = [_block_ids(layout, group, pages) for group in range(len(layout.groups))]
    blocks_R = [
        tuple(
            _table(_entries(group.spec, layout.block_size, count, length, spare), free)
            for group, free in zip(layout.groups, ids, strict=True)
        )
        for count, length in _rows(shape)
    ]
    rows = Rows(
        slots_R=np.arange(len(counts_R), dtype=np.int32),
        generations_R=np.ones(len(counts_R), np.int32),
        kinds_R=np.full(len(counts_R), RowKind.CHUNK, np.int8),
        num_tokens_R=counts_R,
        num_logits_R=(np.arange(len(counts_R)) < shape.num_sampled).astype(np.int32),
        tokens_each=int((counts_R == 1).all()),
        features=Feature.NONE,
        num_logprobs=0,
    )
    forms = [
        Assign(
            slot=slot,
            generation=1,
            kv_len=int(length - count),
            last_token=0,
            blocks=blocks,
            params=SamplingParams(temperature=0),
            seed=0,
            stop_ids=frozenset(),
            max_total_tokens=1 << 30,
            prompt=(0,),
        )
        for slot, (count, length, blocks) in enumerate(zip(counts_R, lengths_R, blocks_R, strict=True))
    ]
    spans = [
        Span(row, random.integers(spec.vocab_size, size=count, dtype=np.int32)) for row, count in enumerate(counts_R)
    ]
    return StepPlan(id=number, rows=rows, kv_bound_R=lengths_R, spans=tuple(spans), deltas=tuple(forms), reset=True)


def next_plan(plan: StepPlan) -> StepPlan:
    """Return the decode step that follows one in which every row ran a token: the device has its rows' tables and last
    tokens."""
    rows = plan.rows
    if plan.spans:  # later steps share one `Rows`, as in service: the device is not told the same rows twice
        rows = replace(rows, kinds_R=np.full(len(rows), RowKind.TOKEN, np.int8))
    return replace(plan, id=plan.id + 1, rows=rows, kv_bound_R=plan.kv_bound_R + 1, spans=(), deltas=(), reset=False)


def _block_ids(layout: CacheLayout, group: int, pages: Iterator[int]) -> Iterator[int]:
    """Yield the blocks of one group, taking pages as they are needed."""
    for page in pages:
        yield from (layout.block_id(group, page, index) for index in range(layout.blocks_per_page(group)))


def _rows(shape: StepShape) -> list[tuple[int, int]]:
    """Return for each row how many tokens it runs, and how many are cached then."""
    return [(int(count), int(length)) for count, length in zip(shape.num_tokens_R, shape.kv_len_R, strict=True)]
