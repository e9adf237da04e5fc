"""The size of the KV cache, and a report of it in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import Reserves, StepSizes, reserved
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import ModelSpec, with_draft
from ridgeline.core.specs.state import DTYPE_BYTES
from ridgeline.kernels.base.weight_format import HeldMatrix
from ridgeline.parallel.scan import ToldStates
from ridgeline.perf.activations import Activations, DraftActivations
from ridgeline.perf.footprint import parameters
from ridgeline.worker.given import GivenMemory
from ridgeline.worker.host_memory import Staging
from ridgeline.worker.listening import ListenerMemory
from ridgeline.worker.moving import MovedExperts
from ridgeline.worker.pictures import TowerMemory
from ridgeline.worker.speculation.methods import DraftTables
from ridgeline.worker.state.context import BroughtKeys

CPU_SHARE = 0.5  # the share of the free memory that the engine may take, since others use the machine too


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The bytes that each use of the memory takes, and what the cache holds. sizes: those that were planned for."""

    weights: int
    activations: int
    kv_cache: int
    layout: CacheLayout
    max_model_len: int
    sizes: StepSizes

    @property
    def full_requests(self) -> int:
        """The number of requests of max_model_len tokens that fit at once."""
        return (self.layout.num_pages - 1) // _pages_needed(self.layout, self.max_model_len, self.sizes)

    @property
    def longest(self) -> int:
        """The most tokens that a request can have in the cache, both sequences together where it is guided, or an
        encoder input with the output."""
        fits = _longest_fit(self.layout, self.layout.num_pages - 1, 2 * self.max_model_len, self.sizes)
        return fits * (2 if any(group.spec.encoded for group in self.layout.groups) else 1)

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
    saved: int = 0,
) -> None:
    """Raise InvalidConfig, before anything is allocated, if the model cannot be held at all. ranks: how many devices
    divide it. saved: bytes of a device's part that wait elsewhere."""
    needed = weight_bytes(model, dtype_bytes=DTYPE_BYTES[dtype], positions=positions, forms=forms) // ranks - saved
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

    weights: bytes of the weights.
    loaded: they are on the device.
    ranks: how many processes share the device.
    """

    device: torch.device
    config: LLMConfig
    weights: int
    loaded: bool
    ranks: int = 1

    def num_bytes(self, activations: int) -> int:
        """Return the bytes that are left for the cache beside so many. Raise InvalidConfig if the user asks for more
        than there is."""
        asked = self.config.kv_cache_memory
        below = self.config.host_bytes if self.device.type == "cpu" else 0  # which is not taken yet
        if asked and asked > (free := _physically_free(self.device) - below):
            beside = " beside kv_offloading_size" if below else ""
            raise InvalidConfig(
                f"kv_cache_memory is {_size(asked)}, and {_size(max(0, free))} are free on {self.device}{beside}; "
                "lower it."
            )
        return asked or max(0, self._may_take - activations - self._to_load)

    @property
    def _to_load(self) -> int:
        return 0 if self.loaded else self.weights

    @property
    def _may_take(self) -> int:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return free - int(total * (1 - self.config.gpu_memory_utilization))
        return int(max(0, host_memory() - self.config.host_bytes) * CPU_SHARE) // self.ranks

    def uses(self, activations: int) -> str:
        """Return a sentence on the uses of memory beside the cache, and on ways to reduce them."""
        step = f"a step's activations take {_size(activations)}"
        loading = f", the weights {_size(self._to_load)}" if self._to_load else ""
        if self.config.kv_cache_memory:
            return f"that is kv_cache_memory; raise it to {_size(_physically_free(self.device))} at the most"
        if self.device.type != "cuda":
            return (
                f"{_size(host_memory())} are free on this machine, of which it may use half; {step}{loading}; end what "
                "else runs there, or set kv_cache_memory"
            )
        free, total = torch.cuda.mem_get_info(self.device)
        ours = torch.cuda.memory_reserved(self.device)
        return (
            f"of the {_size(total)} on {self.device} {_size(free)} are free, {_size(ours)} hold what was loaded, "
            f"{_size(total - free - ours)} are in other use, gpu_memory_utilization keeps "
            f"{_size(total * (1 - self.config.gpu_memory_utilization))} back, and {step}{loading}; end what else runs "
            "there, or raise gpu_memory_utilization"
        )


def parts_of(
    model: ModelSpec,
    config: LLMConfig,
    draft: ModelSpec | None = None,
    draft_reads: int = 1,
    senses_apart: bool = False,
) -> list[Reserves]:
    """Return the parts of a worker that take memory besides weights and cache.

    draft: the model that drafts, if one does. draft_reads: hidden states of the target that it reads of a token.
    senses_apart: tower or listener are on a device of their own.
    """
    parts: list[Reserves] = [Activations(model), BroughtKeys(), ToldStates(with_draft(model, draft).cache_groups)]
    if model.encoder is not None:
        parts.append(Activations(model.encoder))
    if model.tower is not None and model.embeds:
        parts.append(TowerMemory(model.tower, apart=senses_apart))
    parts.append(GivenMemory(model))
    if model.listener is not None:
        parts.append(ListenerMemory(model.listener, apart=senses_apart))
    if draft is not None:
        parts.append(DraftActivations(draft, draft_reads))
    if config.speculation is not None:
        parts.append(DraftTables(config.speculation))
    if config.enable_eplb:
        parts.append(MovedExperts(model))
    if config.host_bytes:
        parts.append(Staging(with_draft(model, draft).cache_groups))
    return parts


def plan_memory(cache: CacheLayout, sizes: StepSizes, parts: Iterable[Reserves], budget: Budget) -> MemoryReport:
    """Size the KV cache from the budget. It is called before the weights are loaded, so that no loading is wasted, and
    again after that.

    cache: the layout, of however many pages.
    sizes: `longest` is the context to plan for. Without `max_model_len` the context shrinks to what fits.

    On a CPU the cache is no larger than `max_seqs` requests at full context need. Raises InvalidConfig if an explicit
    `max_model_len` does not fit.
    """
    config, wanted = budget.config, sizes.longest
    activations = reserved(parts, sizes) + (cache.all_pages - cache.num_pages) * cache.page_bytes
    num_bytes = budget.num_bytes(activations)
    pages = num_bytes // cache.page_bytes
    most = _pages_needed(cache, wanted, sizes)
    if (not sizes.on_gpu and config.kv_cache_memory is None) or not any(group.spec.kept for group in cache.groups):
        pages = min(pages, 1 + sizes.max_seqs * most)
    fitting = _longest_fit(cache, pages - 1, wanted, sizes)
    if fitting < (wanted if config.max_model_len else min(wanted, cache.block_size)):
        raise InvalidConfig(
            f"the KV cache has {_size(num_bytes)}, but one request of {wanted} tokens needs "
            f"{_size((1 + most) * cache.page_bytes)}: {budget.uses(activations)}, or lower "
            f"max_model_len{f' to {fitting}' if fitting else ''}."
        )
    return MemoryReport(
        weights=budget.weights,
        activations=activations,
        kv_cache=pages * cache.page_bytes,
        layout=replace(cache, num_pages=pages),
        max_model_len=fitting,
        sizes=sizes,
    )


def _pages_needed(layout: CacheLayout, tokens: int, sizes: StepSizes) -> int:
    """Return the number of pages with which a request of so many tokens can run, with its drafts and the positions
    ahead of them, and with an encoder input of as many tokens, but no more than a step can run."""
    longest = tokens + sizes.drafts + sizes.ahead
    return layout.pages_needed(longest, sizes.max_tokens + sizes.ahead, sizes.encoded or min(tokens, sizes.max_tokens))


def _longest_fit(layout: CacheLayout, pages: int, wanted: int, sizes: StepSizes) -> int:
    """Return the largest context, up to `wanted`, that one request can fill with `pages` pages."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if _pages_needed(layout, middle, sizes) <= pages:
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
