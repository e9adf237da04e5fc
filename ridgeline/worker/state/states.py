"""The state of all layers on one device: the memory, and for each cache group a class that knows its kind's operation.

Legend:
    R  rows
    S  slots
    C  columns of a block table
    T  tokens of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.step import CopyBlocks
from ridgeline.core.registry import Registry
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.paged.op import RaggedBatch, Schedule
from ridgeline.kernels.base.tree import Tree
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.ring import SOLO, Ring
from ridgeline.worker.share import Stretches, Stripes
from ridgeline.worker.sleep import SleepMemory
from ridgeline.worker.state.buffer import StateMemory

# Kind of a state spec → the class that serves it
KINDS = Registry(
    "kind of state",
    {
        "kv": "ridgeline.worker.state.paged:PagedKV",
        "latent": "ridgeline.worker.state.latent:PagedLatents",
        "recurrent": "ridgeline.worker.state.recurrent:Recurrent",
        "chunked_kv": "ridgeline.worker.state.chunked:ChunkedKV",
        "cross_kv": "ridgeline.worker.state.cross:CrossKV",
        "seen_kv": "ridgeline.worker.state.cross:SeenKV",
        "passing": "ridgeline.worker.state.packed:Packed",
    },
)
# The same where ranks divide the tokens between them
DIVIDED_KINDS = Registry(
    "kind of state of divided tokens",
    {
        "kv": "ridgeline.worker.state.context:ContextKV",
        "latent": "ridgeline.worker.state.context_latents:ContextLatents",
        "recurrent": "ridgeline.worker.state.recurrent:Recurrent",
    },
)


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """A step's rows on the device, as the states need them.

    slots_R: the rows' slots.
    start_R1: the first token of each row, then the number of tokens.
    kv_len_R: tokens cached after the step; 1 for stopped rows, 0 for rows without tokens.
    last_R: each row's last token.
    num_tokens: the tokens of the step.
    tokens_each: how many tokens every row runs; 0 if rows differ.
    marks_R: after how many of its tokens a row's state is stored as well, int32; 0: nowhere. None: no row has
        such a mark.
    prefix_4R: the rows that share their first blocks, in the form of kernels/attention/paged/cascade.py.
    num_tokens_R, kv_bound_R: the lengths that the host knows; None inside a captured graph.
    verifies: rows verify drafts.
    verify_R: bool, the rows that do, where the host knows them; None: all, and each runs `tokens_each` tokens.
    share: the tokens that this rank runs, if ranks divide those of the step. All other fields are those of all tokens.
    tree: what the tokens see of each other, if rows have trees of drafts, or blocks.
    ahead_T: how many of its row's tokens behind its own each sees too, int32, in layers with `AttentionSpec.ahead`.
    windows_causal: layers with windows see none of the tokens behind a token, whatever the tree says.
    """

    slots_R: Tensor
    start_R1: Tensor
    kv_len_R: Tensor
    last_R: Tensor
    num_tokens: int
    tokens_each: int
    marks_R: Tensor | None = None
    prefix_4R: Tensor | None = None
    num_tokens_R: np.ndarray | None = None
    kv_bound_R: np.ndarray | None = None
    verifies: bool = False
    verify_R: np.ndarray | None = None
    share: Stripes | Stretches | None = None
    tree: Tree | None = None
    ahead_T: Tensor | None = None
    windows_causal: bool = False

    def batch(
        self, block_table_SC: Tensor, schedule: Schedule | None, wide: tuple[Tensor, Tensor] | None = None
    ) -> RaggedBatch:
        """Return the rows as attention takes them. wide: as in `RaggedBatch`."""
        return RaggedBatch(
            slots_R=self.slots_R,
            block_table_SC=block_table_SC,
            start_R1=self.start_R1,
            kv_len_R=self.kv_len_R,
            tokens_each=self.tokens_each,
            num_tokens_R=self.num_tokens_R,
            kv_bound_R=self.kv_bound_R,
            schedule=schedule,
            wide=wide,
            tree=self.tree,
            ahead_T=self.ahead_T,
        )


class Verified(NamedTuple):
    """Rows whose drafts are verified, and how far they have come.

    kv_len_R, active_R: as of `step_inputs`. num_logits_R: how many tokens of a row were scored. kv_len_S: the slots'
    lengths now. columns: tokens of a row that were scored, at most. path_RK: the nodes of a tree that stay, then -1
    (`step_verify`); None: drafts were chains.
    """

    slots_R: Tensor
    kv_len_R: Tensor
    active_R: Tensor
    num_logits_R: Tensor
    kv_len_S: Tensor
    columns: int
    path_RK: Tensor | None = None


class GroupState(Protocol):
    """The state of the layers of one cache group."""

    def __init__(self, memory: StateMemory, group: int, model: ModelSpec, dtype: torch.dtype, ops: Ops) -> None: ...

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        """Prepare for the next step.

        place_T: where each token's state goes, block * block_size + offset. It lies in the null block for rows that the
            device has stopped.
        """

    def keep(self, verified: Verified, block_table_SC: Tensor) -> None:
        """Go on from the last token that each row of the step keeps, now that it is known which drafts are right."""

    def layer(self, index: int) -> Any:
        """Return the object on which the group's `index`-th layer calls its operation."""


class States:
    """The states of all layers; `states[layer]` is given to that layer's mixer.

    ring: the ranks that divide the tokens between them.
    sleep: what gives the memory back while the engine sleeps.
    """

    def __init__(
        self,
        layout: CacheLayout,
        model: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        ring: Ring = SOLO,
        sleep: SleepMemory | None = None,
    ) -> None:
        with nullcontext() if sleep is None else sleep.holding("kv_cache"):
            self.memory = StateMemory(layout, device)
        self.live_T: Tensor | None = None
        kinds = [(KINDS if ring.size == 1 else DIVIDED_KINDS)[group.spec.kind] for group in layout.groups]
        others = () if ring.size == 1 else (ring,)
        self.groups: list[GroupState] = []
        for g, kind in enumerate(kinds):
            self.groups.append(kind(self.memory, g, model, dtype, ops, *others))
        self.num_layers = len(model.layers)
        self._layers: dict[int, list[Any]] = {}
        for own, group in zip(self.groups, layout.groups, strict=True):
            for index, layer in enumerate(group.layers):
                self._layers.setdefault(layer, []).append(own.layer(index))

    def __getitem__(self, layer: int) -> Any:
        """Return the object that serves a layer's state; where it has several, a tuple of them in the order of the
        cache groups, keys and values first; None where it has none."""
        found = self._layers.get(layer, [])
        return found[0] if len(found) == 1 else tuple(found) or None

    def begin(
        self, rows: DeviceRows, block_tables: Sequence[Tensor], places: Sequence[Tensor], live_T: Tensor | None = None
    ) -> None:
        """Prepare for the next step. block_tables [S, C], places [T]: one for each cache group. live_T: the tokens that
        belong to a request."""
        self.live_T = live_T
        for group, table_SC, place_T in zip(self.groups, block_tables, places, strict=True):
            group.begin(rows, table_SC, place_T)

    def keep(self, verified: Verified, block_tables: Sequence[Tensor]) -> None:
        """Let the next step go on from the last tokens that the rows keep of the step that has begun last."""
        for group, table_SC in zip(self.groups, block_tables, strict=True):
            group.keep(verified, table_SC)

    def copy(self, copies: Sequence[CopyBlocks]) -> None:
        """Copy blocks onto others, in every layer of their group."""
        self.memory.copy(copies)
