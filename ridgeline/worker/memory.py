"""The size of the KV cache, and a report of it in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.config import DEFAULT_BLOCK_SIZE, LLMConfig
from ridgeline.core.draft_tree import LookaheadTree
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.expert_spec import ExpertsSpec
from ridgeline.core.latent_spec import LatentAttentionSpec
from ridgeline.core.model_spec import ModelSpec, with_draft
from ridgeline.core.rebalancing import MOST
from ridgeline.core.speculation import MOST_VERIFIED, MOST_WAITING, Speculation
from ridgeline.core.state_spec import DTYPE_BYTES, RecurrentSpec
from ridgeline.core.weight_format import HeldMatrix
from ridgeline.kernels.attention.torch_ops import WORKSPACE_BYTES
from ridgeline.kernels.expanded_attention.cost import expanded_bytes
from ridgeline.kernels.latent_attention.cost import parts_bytes
from ridgeline.parallel.scan import SHORT, TOLD_BYTES, TOLD_COPIES, piece_bytes
from ridgeline.perf.footprint import parameters, step_bytes_per_token
from ridgeline.worker.speculation.lookahead import pool_bytes
from ridgeline.worker.state.context import BROUGHT_BYTES, BROUGHT_COPIES

CPU_SHARE = 0.5  # the share of the free memory that the engine may take, since others use the machine too


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The bytes that each use of the memory takes, and what the cache holds.

    num_drafts: tokens that a request may hold beyond its own, since they are verified.
    drafted_ahead: positions behind those at which a draft model writes."""

    weights: int
    activations: int
    kv_cache: int
    layout: CacheLayout
    max_model_len: int
    max_chunk: int
    num_drafts: int = 0
    drafted_ahead: int = 0

    @property
    def full_requests(self) -> int:
        """The number of requests of max_model_len tokens that fit at once."""
        needed = _pages_needed(self.layout, self.max_model_len, self.max_chunk, self.num_drafts, self.drafted_ahead)
        return (self.layout.num_pages - 1) // needed

    @property
    def longest(self) -> int:
        """The most tokens that a request can have in the cache, both sequences together where it is guided."""
        pages, most = self.layout.num_pages - 1, 2 * self.max_model_len
        return _longest_fit(self.layout, pages, most, self.max_chunk, self.num_drafts, self.drafted_ahead)

    @property
    def tokens(self) -> int:
        """The number of tokens that fit at once, if each is kept by every layer that keeps tokens. States of one size
        do not count."""
        kept = [g for g, group in enumerate(self.layout.groups) if not group.spec.exact]
        if not kept:
            return self.full_requests * self.max_model_len
        pages_per_block = sum(1 / self.layout.blocks_per_page(g) for g in kept)
        return int((self.layout.num_pages - 1) / pages_per_block) * self.layout.block_size

    @property
    def state(self) -> int:
        """The bytes of a request's states of constant size."""
        groups = zip(self.layout.groups, self.layout.unit_bytes, strict=True)
        return sum(len(group.layers) * unit for group, unit in groups if group.spec.exact)

    def __str__(self) -> str:
        padding = max(self.layout.padding)
        return (
            f"weights {_size(self.weights)}, activations {_size(self.activations)}, KV cache {_size(self.kv_cache)}: "
            f"{self.layout.num_pages - 1:,} blocks of {self.layout.block_size} tokens hold {self.tokens:,} tokens, "
            f"{self.full_requests:,} requests at the full context of {self.max_model_len:,}"
            f"{f', each with a state of {_size(self.state)}' if self.state else ''}"
            f"{f'; up to {padding:.1%} of a page is padding' if padding else ''}"
        )


def activation_bytes(
    model: ModelSpec,
    *,
    dtype_bytes: int,
    max_tokens: int,
    max_seqs: int,
    max_scored: int | None = None,
    longest: int = 0,
) -> int:
    """Return an upper estimate, from shapes, of the memory that one step's intermediate tensors take.

    It counts the tensors of every token; per position that is scored, three float32 copies of the logits; and the
    attention workspace. A stage of a pipeline holds hidden states besides: those that come, and those of two steps that
    go.

    max_scored: positions that are scored, if rows have several, since they verify drafts.
    longest: the most tokens that a request has in the cache, if they may be more than those of a step.
    """
    entries = 0 if model.pooling is not None and not model.pooling.tokens else model.vocab_size
    sampling_tables = max_seqs * (entries if model.pooling is None else 1) * 5
    per_seq = entries * 4 * 3
    per_token = int(step_bytes_per_token(model, dtype_bytes))
    if model.stage is not None:
        per_token += 3 * model.handed_width * dtype_bytes
    scored = max_scored or max_seqs
    expanded = _expanded_bytes(model, dtype_bytes, max_tokens, max(longest, max_tokens))
    workspace = max(WORKSPACE_BYTES, _parts_bytes(model, max_seqs, scored), expanded)
    return max_tokens * per_token + scored * per_seq + sampling_tables + workspace


def _parts_bytes(model: ModelSpec, max_seqs: int, scored: int) -> int:
    """Return the bytes of what a layer of latent attention adds up, in a step whose rows verify drafts."""
    each = -(-scored // max(1, max_seqs))
    latent = _latent_mixers(model)
    return max((parts_bytes(max_seqs, each, num_heads=m.num_heads, rank=m.rank) for m in latent), default=0)


def _expanded_bytes(model: ModelSpec, dtype_bytes: int, max_tokens: int, longest: int) -> int:
    """Return the bytes that a layer of latent attention takes for rows that bring many tokens."""
    found = (
        expanded_bytes(
            max_tokens,
            longest,
            num_heads=m.num_heads,
            key_dim=m.key_dim,
            rope_dim=m.rope_dim,
            value_dim=m.value_dim,
            rank=m.rank,
            itemsize=dtype_bytes,
        )
        for m in _latent_mixers(model)
    )
    return max(found, default=0)


def _latent_mixers(model: ModelSpec) -> set[LatentAttentionSpec]:
    return {layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttentionSpec)}


def weight_bytes(model: ModelSpec, *, dtype_bytes: int, positions: int, forms: Iterable[HeldMatrix] = ()) -> int:
    """Return the least memory that the parameters and the rotary table take. It is computed in Python integers, which
    hold any size.

    forms: the matrices that are kept in the forms of the files.
    """
    saved = sum(int((0 if f.beside else f.numbers * dtype_bytes) - f.num_bytes(dtype_bytes)) for f in forms)
    ropes = {layer.mixer.rope for layer in model.layers if layer.mixer.rope is not None}
    tables = sum(positions * rope.rotary_dim * 4 for rope in ropes)
    return parameters(model).total * dtype_bytes - saved + tables


def check_weights_fit(
    model: ModelSpec,
    device: torch.device,
    *,
    dtype: str,
    positions: int,
    forms: Iterable[HeldMatrix] = (),
    ranks: int = 1,
) -> None:
    """Raise InvalidConfig, before anything is allocated, if the model cannot be held at all. ranks: how many devices
    divide it."""
    needed = weight_bytes(model, dtype_bytes=DTYPE_BYTES[dtype], positions=positions, forms=forms) // ranks
    check_fits("the model", needed, device, dtype=dtype)


def check_fits(what: str, needed: int, device: torch.device, *, dtype: str) -> None:
    """Raise InvalidConfig if so many bytes of weights cannot be held. what: whose they are."""
    if needed > (free := _physically_free(device)):
        raise InvalidConfig(
            f"{what} needs {_size(needed)} for its weights in {dtype}, and {_size(free)} are free on {device}; "
            "take a smaller dtype or model, or, if that is not its real size, mend its config.json."
        )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bytes that the KV cache may take, and the reason why not more.

    weights: bytes of the weights while they are not loaded, then 0.
    ranks: how many processes share the device.
    """

    device: torch.device
    config: LLMConfig
    weights: int
    activations: int
    ranks: int = 1

    @property
    def num_bytes(self) -> int:
        """The bytes that the cache may take; they may be below 0."""
        return self.config.kv_cache_memory or self._may_take - self.activations - self.weights

    @property
    def _may_take(self) -> int:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return free - int(total * (1 - self.config.gpu_memory_utilization))
        return int(host_memory() * CPU_SHARE) // self.ranks

    def __str__(self) -> str:
        """Say what uses the memory, and what to do about it."""
        step = f"a step's activations take {_size(self.activations)}"
        loading = f", the weights {_size(self.weights)}" if self.weights else ""
        if self.config.kv_cache_memory:
            return f"that is kv_cache_memory; raise it to {_size(_physically_free(self.device))} at the most"
        if self.device.type != "cuda":
            return (
                f"{_size(host_memory())} are free on this machine, of which it may use half; {step}{loading}; end "
                "what else runs there, or set kv_cache_memory"
            )
        free, total = torch.cuda.mem_get_info(self.device)
        ours = torch.cuda.memory_reserved(self.device)
        return (
            f"of the {_size(total)} on {self.device} {_size(free)} are free, {_size(ours)} hold what was loaded, "
            f"{_size(total - free - ours)} are in other use, gpu_memory_utilization keeps "
            f"{_size(total * (1 - self.config.gpu_memory_utilization))} back, and {step}{loading}; end what else runs "
            "there, or raise gpu_memory_utilization"
        )


def plan_memory(
    model: ModelSpec,
    config: LLMConfig,
    device: torch.device,
    *,
    dtype: str,
    weights: int,
    loaded: bool,
    longest: int,
    max_seqs: int,
    max_chunk: int,
    ranks: int = 1,
    token_ranks: int = 1,
    draft: ModelSpec | None = None,
) -> MemoryReport:
    """Size the KV cache from the budget. It is called before the weights are loaded, so that no loading is wasted, and
    again after that.

    longest: the context to plan for. Without `max_model_len` the context shrinks to what fits.
    ranks: how many processes share the device.
    token_ranks: how many ranks divide the tokens of each block between them.
    draft: the model that drafts, if one does. Its keys lie behind the target's, and its steps come after the target's.

    On a CPU the cache is no larger than `max_seqs` requests at full context need. Raises InvalidConfig if an explicit
    `max_model_len` does not fit.
    """
    groups, wanted_len = with_draft(model, draft).cache_groups, longest
    drafts, ahead = config.num_drafts, config.drafted_ahead
    block_size = token_ranks * (config.block_size or DEFAULT_BLOCK_SIZE[device.type])
    scored = max_seqs * (1 + drafts)
    if device.type == "cuda":
        scored = max(max_seqs, min(scored, MOST_VERIFIED))
    tree = None if config.speculation is None else config.speculation.tree
    drawn = max_seqs * (1 if tree is None else tree.scored)  # of a pass that drafts
    sizes = {
        "dtype_bytes": DTYPE_BYTES[dtype],
        "max_seqs": max_seqs,
        "max_scored": max(scored, drawn),
        "longest": longest,
    }
    activations = activation_bytes(model, max_tokens=max_chunk, **sizes)
    if draft is not None:  # it may run over the tokens of many steps at once, which wait for it until then
        passed = max(max_chunk, drawn, MOST_WAITING)
        activations = max(activations, activation_bytes(draft, max_tokens=passed, **sizes))
        activations += (MOST_WAITING + max_seqs) * (4 + draft.hidden_size * DTYPE_BYTES[dtype])
    if config.speculation is not None:
        activations += _table_bytes(config.speculation, max_seqs + 1, longest)
    scratch = scratch_states(device.type, max_seqs, drafts)
    activations += _scratch_bytes(_layout(groups, block_size, dtype, 2, token_ranks, scratch))
    if token_ranks > 1 and device.type == "cuda":
        activations += BROUGHT_COPIES * BROUGHT_BYTES // token_ranks
    if token_ranks > 1:
        activations += _told_bytes(groups, min(max_seqs, max_chunk // (SHORT + 1)), token_ranks)
    if config.enable_eplb:
        activations += _moved_bytes(model, DTYPE_BYTES[dtype])
    if config.kv_cache_memory and config.kv_cache_memory > (free := _physically_free(device)):
        raise InvalidConfig(
            f"kv_cache_memory is {_size(config.kv_cache_memory)}, and {_size(free)} are free on {device}; lower it."
        )
    budget = Budget(
        device=device, config=config, weights=0 if loaded else weights, activations=activations, ranks=ranks
    )
    num_bytes = max(0, budget.num_bytes)

    def layout(pages: int) -> CacheLayout:
        return _layout(groups, block_size, dtype, pages, token_ranks, scratch)

    page_bytes = layout(2).page_bytes
    pages = num_bytes // page_bytes
    most = _pages_needed(layout(2), wanted_len, max_chunk, drafts, ahead)
    enough = 1 + max_seqs * most
    if (device.type == "cpu" and config.kv_cache_memory is None) or not any(group.spec.kept for group in groups):
        pages = min(pages, enough)
    fitting = _longest_fit(layout(2), pages - 1, wanted_len, max_chunk, drafts, ahead)
    if fitting < (wanted_len if config.max_model_len else min(wanted_len, block_size)):
        needed = (1 + most) * page_bytes
        raise InvalidConfig(
            f"the KV cache has {_size(num_bytes)}, but one request of {wanted_len} tokens needs {_size(needed)}: "
            f"{budget}, or lower max_model_len{f' to {fitting}' if fitting else ''}."
        )
    return MemoryReport(
        weights=weights,
        activations=activations,
        kv_cache=pages * page_bytes,
        layout=layout(pages),
        max_model_len=fitting,
        max_chunk=max_chunk,
        num_drafts=drafts,
        drafted_ahead=ahead,
    )


def _table_bytes(speculation: Speculation, slots: int, longest: int) -> int:
    """Return the bytes that the tables of drafts take: texts and drafts of slots, what was written lately, and the
    pools of lookahead decoding."""
    each = 4 * (longest + speculation.num_drafts)
    if isinstance(speculation.tree, LookaheadTree):
        each += pool_bytes(speculation.tree)
    return slots * each + 8 * speculation.recent_places


def _told_bytes(groups: Sequence[CacheGroup], rows: int, ranks: int) -> int:
    """Return the bytes of what ranks tell each other at once of recurrent states, if so many rows are long enough. A
    row has a piece on every rank at most, and a mark cuts one of them."""
    states = [part.shape for group in groups if isinstance(group.spec, RecurrentSpec) for part in group.spec.parts]
    each = max(map(piece_bytes, states), default=0)
    return TOLD_COPIES * (min(TOLD_BYTES, 2 * rows * each) + (ranks + 1) * each)


def _moved_bytes(model: ModelSpec, dtype_bytes: int) -> int:
    """Return the most bytes of experts that a rank sends and gets between two steps, one matrix of each at a time."""
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    numbers = (sum(each.fused) * (each.latent or model.hidden_size) for each in mixtures)
    return 2 * MOST * max(numbers, default=0) * dtype_bytes


def scratch_states(device_type: str, max_seqs: int, drafts: int) -> int:
    """Return how many states a step may leave behind drafts that it verifies, in each layer that has one."""
    rows = min(max_seqs, MOST_VERIFIED // (1 + drafts)) if device_type == "cuda" else max_seqs
    return rows * drafts


def _scratch_bytes(layout: CacheLayout) -> int:
    return (layout.all_pages - layout.num_pages) * layout.page_bytes


def _layout(
    groups: Sequence[CacheGroup], block_size: int, dtype: str, pages: int, ranks: int, scratch: int
) -> CacheLayout:
    return CacheLayout(
        groups=tuple(groups), block_size=block_size, dtype=dtype, num_pages=pages, ranks=ranks, scratch=scratch
    )


def _pages_needed(layout: CacheLayout, tokens: int, max_chunk: int, drafts: int, ahead: int) -> int:
    """Return how many pages let a request of so many tokens run, with its drafts and the positions ahead of them."""
    return layout.pages_needed(tokens + drafts + ahead, max_chunk + ahead)


def _longest_fit(layout: CacheLayout, pages: int, wanted: int, max_chunk: int, drafts: int, ahead: int) -> int:
    """Return the largest context, up to `wanted`, that one request can fill with `pages` pages, and so many drafts
    and positions ahead of them besides."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if _pages_needed(layout, middle, max_chunk, drafts, ahead) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


def _physically_free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()


def host_memory() -> int:
    """Return the free memory of this machine, or of the container that we run in if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.{0 if unit == 'B' else 2}f} {unit}"
