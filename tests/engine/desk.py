"""A scheduler and an ideal worker, worked by hand: one plan out, one result in, whenever a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.core.plan.request import Request, SamplingParams, TokenEvent, TokenMask
from ridgeline.core.plan.step import StepPlan
from ridgeline.core.settings.config import EngineConfig
from ridgeline.engine.scheduler import Scheduler
from tests.engine.ideal_worker import EOS, IdealWorker, alone
from tests.engine.layouts import Groups, layout_of


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    lookahead: int = 2,
    mask: TokenMask | None = None,
    salt: str = "",
    stop_ids: frozenset[int] | None = None,
    **params: Any,
) -> Request:
    """stop_ids None: the end-of-sequence id is ignored, so the request runs its full length."""
    return Request(
        id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=stop_ids is None, **params),
        seed=sum(name.encode()),
        max_total_tokens=len(prompt) + max_tokens,
        stop_ids=stop_ids or frozenset(),
        eos_ids=frozenset([EOS]),
        cache_salt=salt,
        lookahead=lookahead,
        token_mask=mask,
    )


class Desk:
    """`got` collects tokens by request; `ended` how each request ended, with the error if any."""

    def __init__(
        self,
        *,
        groups: Groups = ((None, 1),),
        block_size: int = 4,
        pages: int = 33,
        slots: int = 4,
        budget: int = 64,
        tokens_each: int = 1,
        **settings: Any,
    ) -> None:
        self.layout = layout_of(groups, block_size, pages)
        sizes = {"max_model_len": 64, "max_num_seqs": slots, "max_num_batched_tokens": budget}
        config = EngineConfig(**sizes, debug_checks=True, num_drafts=tokens_each - 1, **settings)
        self.scheduler = Scheduler(config, self.layout)
        self.worker = IdealWorker(self.layout)
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, str | None]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.got[request.id] = []
            self.scheduler.add(request)

    def submit(self) -> StepPlan | None:
        """Make and submit the next plan."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.worker.submit(plan)
            self._provide_masks()
        return plan

    def deliver(self) -> list[TokenEvent]:
        """Take the oldest plan's result."""
        events = list(self.scheduler.update(self.worker.collect()))
        for event in events:
            if event.token_id >= 0:
                self.got[event.request_id].append(event.token_id)
            if event.finish_reason:
                self.ended[event.request_id] = event.finish_reason, event.error
        self._provide_masks()
        return events

    def finish(self, *, depth: int = 2) -> None:
        """Run until nothing is left, with up to `depth` plans in flight."""
        for _ in range(500):
            while len(self.scheduler.in_flight) < depth and self.submit():
                pass
            if not self.scheduler.in_flight:
                break
            self.deliver()
        assert not self.scheduler.has_work
        assert self.scheduler.cache.pool.free_pages == self.scheduler.cache.pool.num_pages
        assert self.scheduler.slots.num_free == self.scheduler.config.max_num_seqs

    def alone(self, request: Request, mask: TokenMask | None = None) -> list[int]:
        return alone(request, self.layout, mask)

    def rows_of(self, name: str) -> int:
        """How many plans in flight run the request."""
        return sum(seq.request.id == name for record in self.scheduler.in_flight for seq in record.seqs)

    def _provide_masks(self) -> None:
        due = self.scheduler.masks_due()
        if due is not None:
            self.worker.provide_masks(*due)
