"""The counts that the engine's process keeps. There is one such place, so any number of API servers show the same
figures."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.request import Preemption, Request, RequestStats
from ridgeline.core.plan.step import RowKind, StepPlan
from ridgeline.kernels.base.cost import Headroom
from ridgeline.serving.observed.counted import Counted
from ridgeline.serving.observed.histograms import BOUNDS
from ridgeline.transport.messages import Distribution, ExpertFigures, Gpu, RankFigures, Stats, StepFigures

KEPT_STEPS = 1024  # the most shapes of steps in one `Stats`
KEPT_MARKS = 100_000  # steps to look back for the device's work while a request ran


class Histogram:
    """The number of values up to each bound. The last number counts the values above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, *values: float) -> None:
        places = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._total += sum(values)

    def message(self) -> Distribution:
        return Distribution(counts=self._counts.tolist(), total=self._total)


class EngineStats:
    """The counts, fed by the engine's loop with every step, every token and every end of a request. Times are on the
    monotonic clock."""

    def __init__(self) -> None:
        self._started = time.time()
        self._steps = 0
        self._recent: deque[StepFigures] = deque(maxlen=KEPT_STEPS)
        self._finished: Counter[str] = Counter()
        self._counters = Counter[str](
            prompt_tokens=0, generation_tokens=0, prompt_tokens_cached=0, prompt_tokens_computed=0
        )
        self._histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self._groups: dict[str, str] = {}  # completion → its client's request
        self._open = Counter[str]()  # completions under way of a client's request
        self._longest: dict[str, int] = {}  # output tokens of the longest that ended
        self._fresh: dict[str, Request] = {}  # requests that have no token yet
        self._last_token: dict[str, float] = {}  # when the newest token of each other request came
        self._came = 0  # tokens of the step that is being counted
        # time, and the device's work and its limit so far
        self._marks: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]

    def note_step(self, now: float, spent: Headroom, plan: StepPlan, tokens: int) -> None:
        """Count a step whose result is in. tokens: how many it ran."""
        rows = len(plan.rows)
        prefills = int(np.count_nonzero(plan.rows.kinds_R == RowKind.CHUNK))
        shape = StepFigures(
            at=now,
            seconds=spent.elapsed,
            limit=spent.limit,
            decode_rows=rows - prefills,
            prefill_rows=prefills,
            tokens=tokens,
        )
        self._steps += 1
        self._recent.append(shape)
        _, elapsed, limit = self._marks[-1]
        self._marks.append((now, elapsed + spent.elapsed, limit + spent.limit))
        if len(self._marks) > 2 * KEPT_MARKS:
            del self._marks[:KEPT_MARKS]

    def note_arrival(self, request: Request, group: str | None = None) -> None:
        """Count a completion in. Those of one client's request have the same `group`."""
        self._fresh[request.id] = request
        self._groups[request.id] = group = group or request.id
        self._open[group] += 1

    def note_tokens(self, request_ids: Sequence[str], now: float, cached: Callable[[str], int]) -> None:
        """Count one token for each of these requests. Tokens that came to a request together share the time since the
        one before. `cached` returns how much of a request's prompt the prefix cache held."""
        last, fresh = self._last_token, self._fresh
        gaps = [now - last[name] for name in request_ids if name in last]
        if len(set(request_ids)) < len(request_ids):
            came = Counter(request_ids)
            gaps = [(now - last[name]) / came[name] for name in request_ids if name in last]
        if gaps:
            self._histograms["inter_token_latency_seconds"].add(*gaps)
        if len(gaps) < len(request_ids):
            begun = [fresh.pop(name) for name in request_ids if name in fresh]
            self._histograms["time_to_first_token_seconds"].add(*(now - request.arrival for request in begun))
            for request in begun:
                self._count_prompt(request, cached(request.id))
        for name in request_ids:
            last[name] = now
        self._counters["generation_tokens"] += len(request_ids)
        self._came += len(request_ids)

    def end_step(self) -> None:
        """Count what a step brought, as vLLM does: its new tokens, and the prompts that ran to their end in it, as far
        as they were not cached. A step that brought nothing is not counted."""
        if self._came:
            self._histograms["iteration_tokens_total"].add(self._came)
            self._came = 0

    def _count_prompt(self, request: Request, cached: int) -> None:
        """Count a prompt that has run to its end."""
        length = request.read_tokens
        self._counters["prompt_tokens"] += length
        self._counters["prompt_tokens_cached"] += cached
        self._counters["prompt_tokens_computed"] += length - cached
        self._came += length - cached

    def note_end(self, request: Request, stats: RequestStats, reason: str) -> Headroom:
        """Count the end of a request, however it ended, and leave out times that it never reached. Return the device's
        work while it ran, for it and for others."""
        self._finished[reason] += 1
        pooled = self._fresh.pop(request.id, None) is not None and request.task is not None and reason == "stop"
        if pooled:  # no token told that its prompt has run
            self._count_prompt(request, stats.cached_tokens)
        self._last_token.pop(request.id, None)
        add = {name: histogram.add for name, histogram in self._histograms.items()}
        add["request_prompt_tokens"](stats.prompt_tokens)
        add["request_generation_tokens"](stats.output_tokens)
        add["request_num_preemptions"](stats.preemptions)
        add["request_params_max_tokens"](request.max_total_tokens - len(request.prompt_token_ids))
        self._leave_group(request, stats)
        add["e2e_request_latency_seconds"](stats.finished - stats.arrival)
        if stats.first_scheduled is None:
            return Headroom()
        add["request_queue_time_seconds"](stats.first_scheduled - stats.arrival)
        add["request_inference_time_seconds"](stats.finished - stats.first_scheduled)
        if stats.first_token is not None:
            add["request_prefill_kv_computed_tokens"](stats.prompt_tokens - stats.cached_tokens)
            add["request_prefill_time_seconds"](stats.first_token - stats.first_scheduled)
            add["request_decode_time_seconds"](stats.finished - stats.first_token)
            if stats.output_tokens > 1:
                per_token = (stats.finished - stats.first_token) / (stats.output_tokens - 1)
                add["request_time_per_output_token_seconds"](per_token)
        return self.worked(since=stats.first_scheduled)

    def _leave_group(self, request: Request, stats: RequestStats) -> None:
        """Count the client's request when the last of its completions ends."""
        group = self._groups.pop(request.id, request.id)
        self._longest[group] = max(self._longest.get(group, 0), stats.output_tokens)
        self._open[group] -= 1
        if self._open[group] <= 0:
            del self._open[group]
            self._histograms["request_max_num_generation_tokens"].add(self._longest.pop(group))
            self._histograms["request_params_n"].add(request.params.n)

    def worked(self, *, since: float) -> Headroom:
        """Return the device's work from that time on."""
        _, elapsed, limit = self._marks[max(0, bisect_right(self._marks, (since,)) - 1)]
        _, elapsed_now, limit_now = self._marks[-1]
        return Headroom(elapsed_now - elapsed, limit_now - limit)

    def message(self, counted: Counted, gpus: list[Gpu]) -> Stats:
        """Return all figures. counted: those of the engine and its worker."""
        figures, headroom = counted.figures, counted.headroom
        others: dict[str, float] = {
            "prefix_cache_queries": figures.queried_tokens,
            "prefix_cache_hits": figures.hit_tokens,
            "preemptions": figures.preemptions.total(),
            "kv_cache_saturated": counted.worker.kv_saturated,
        }
        if figures.checkpoints is not None:
            others |= {f"checkpoints: {name}": count for name, count in figures.checkpoints._asdict().items()}
            others |= {f"prefix_cache_hits: {group}": tokens for group, tokens in figures.group_hits.items()}
        if figures.drafts is not None:
            others |= {f"drafts: {name}": count for name, count in figures.drafts.items()}
        if figures.below is not None:
            others |= {f"below: {name}": count for name, count in figures.below.items()}
        if figures.pictures is not None:
            others |= {f"pictures: {name}": count for name, count in figures.pictures.items()}
        if counted.worker.encoder is not None:
            others |= {f"encoder: {name}": count for name, count in counted.worker.encoder._asdict().items()}
        if counted.worker.expert_cache is not None:
            others |= {f"expert_cache: {name}": count for name, count in counted.worker.expert_cache._asdict().items()}
        if counted.worker.rebalanced is not None:
            others |= {f"rebalanced: {name}": value for name, value in counted.worker.rebalanced._asdict().items()}
        others |= {f"policy: {name}": value for name, value in figures.policy.items()}
        reasons = {f"preemptions: {reason}": figures.preemptions[reason] for reason in Preemption}
        return Stats(
            at=time.monotonic(),
            started=self._started,
            running=figures.running,
            waiting=figures.waiting,
            pages_used=figures.pages_used,
            num_pages=figures.num_pages,
            steps=self._steps,
            step_seconds=headroom.elapsed,
            limit_seconds=headroom.limit,
            counters={**self._counters, **others, **reasons},
            finished=dict(self._finished),
            histograms={name: histogram.message() for name, histogram in self._histograms.items()},
            recent=list(self._recent),
            gpus=gpus,
            experts=None if counted.worker.experts is None else _figures(counted.worker.experts),
            saturations=counted.worker.saturated,
            ranks=[RankFigures(each.rank, each.waited, each.caused, each.share) for each in counted.worker.waits],
        )


def _figures(load: ExpertLoad) -> ExpertFigures:
    return ExpertFigures(
        layers=list(load.layers),
        experts=list(load.experts),
        tokens=load.total_LE.tobytes(),
        reached=np.count_nonzero(load.step_LE, axis=1).tolist(),
    )
