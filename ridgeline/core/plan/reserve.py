"""The memory of a worker's parts besides weights and cache. Each part says how much it takes for the largest step, so
that one planner serves the engine and forecasts, and knows none of the parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.speculation import MOST_VERIFIED


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes that memory is planned for.

    itemsize: bytes of a number of the activations.
    max_tokens, max_seqs: of a step.
    longest: the most tokens that a request has in the cache.
    drafts: that a step verifies of a row, at most.
    nodes: the nodes of a row that a pass which drafts scores at once.
    ahead: positions behind a step's tokens at which a draft model writes.
    ranks: how many divide the tokens of each block between them.
    encoded: tokens of every encoder input, if all have as many; 0: they are as long as the context.
    kept_bytes: of the vectors of pictures and sounds that are kept; None: those of four steps' tokens.
    """

    device_type: str
    itemsize: int
    max_tokens: int
    max_seqs: int
    longest: int
    drafts: int = 0
    nodes: int = 1
    ahead: int = 0
    ranks: int = 1
    encoded: int = 0
    kept_bytes: int | None = None

    @staticmethod
    def of(config: LLMConfig, **sizes: int | str) -> StepSizes:
        """Return the sizes with what the user's choices say of drafts."""
        tree = None if config.speculation is None else config.speculation.tree
        return StepSizes(
            drafts=config.num_drafts,
            nodes=1 if tree is None else tree.scored,
            ahead=config.drafted_ahead,
            kept_bytes=config.encoder_cache_bytes,
            **sizes,  # type: ignore[arg-type]
        )

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def max_drafted(self) -> int:
        """The positions that a pass which drafts scores at once."""
        return self.max_seqs * self.nodes

    @property
    def max_scored(self) -> int:
        """The positions that a pass scores at once, at most: rows that verify drafts have several."""
        verified = self.max_seqs * (1 + self.drafts)
        if self.on_gpu:
            verified = max(self.max_seqs, min(verified, MOST_VERIFIED))
        return max(verified, self.max_drafted)

    @property
    def scratch(self) -> int:
        """The states that a step may leave behind drafts that it verifies, in each layer that has one."""
        rows = min(self.max_seqs, MOST_VERIFIED // (1 + self.drafts)) if self.on_gpu else self.max_seqs
        return rows * self.drafts


class Reserved(NamedTuple):
    """Bytes. held: for as long as the worker lives. passing: while a network runs; networks run one after another."""

    held: int = 0
    passing: int = 0


class Reserves(Protocol):
    """A part of a worker that takes memory."""

    def reserve(self, sizes: StepSizes) -> Reserved: ...


def reserved(parts: Iterable[Reserves], sizes: StepSizes) -> int:
    """Return the bytes that all parts take together."""
    each = [part.reserve(sizes) for part in parts]
    return sum(one.held for one in each) + max((one.passing for one in each), default=0)
