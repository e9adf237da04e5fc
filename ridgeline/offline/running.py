"""The jobs under way on one engine. Several callers may step it, from several threads too, and the one that steps
passes the events on to all."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from threading import RLock

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import Request, RequestStats
from ridgeline.engine.protocol import RunsRequests
from ridgeline.interrupts import uninterrupted
from ridgeline.kernels.base.cost import Headroom
from ridgeline.offline.jobs import Job, StreamOutput
from ridgeline.progress import batch_bar
from ridgeline.text.completion import Completion
from ridgeline.text.outputs import RequestOutput


class RunningJobs:
    """The jobs under way on one engine. `last_run` is the step time of the newest run that ended, beside its limit."""

    def __init__(self, engine: RunsRequests) -> None:
        self._engine = engine
        self._turn = RLock()  # held by the thread that adds requests, steps or leaves
        engine.on_finish(self._note_stats)
        self._running: dict[str, tuple[Job, Completion]] = {}  # by engine request id
        self._stats: dict[str, RequestStats] = {}
        self.last_run = Headroom()

    @property
    def any(self) -> bool:
        """True if outputs are under way."""
        return bool(self._running)

    def settle(self) -> None:
        """Let the engine make no further plan, and deliver what those in flight bring."""
        with self._turn:
            self._engine.pause()
            while self._engine.has_work:
                self._step()

    def finish(self, jobs: Sequence[Job], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run the jobs to their end."""
        num_completions = sum(len(job.result.outputs) for job in jobs)
        with batch_bar(num_completions, shown=use_tqdm) as bar, closing(self.run(jobs)) as pieces:
            for piece in pieces:
                bar.advance(len(piece.token_ids), finished=piece.completion.finished)
        for job in jobs:
            job.result.keep_best(job.params)
        return [job.result for job in jobs]

    def run(self, jobs: Sequence[Job]) -> Generator[StreamOutput, None, None]:
        """Step the engine until these jobs are done. Jobs that are left when the caller leaves are aborted.

        Several runs may be under way at once (streams read in turn), and each step delivers to all of them.
        """
        before = self._engine.headroom
        try:
            with uninterrupted(), self._turn:
                for job in jobs:
                    self._start(job)
                self._step()  # at once: holding back Ctrl-C again takes time, and this is on the way to the first token
                done = all(job.done for job in jobs)
            while True:
                for job in jobs:
                    while job.inbox:
                        yield job.inbox.popleft()
                if done:
                    return
                with uninterrupted(), self._turn:
                    if not all(job.done for job in jobs):  # another thread's steps may have brought all
                        self._step()
                    done = all(job.done for job in jobs)
        finally:
            with uninterrupted(), self._turn:
                self._leave(jobs)
                self.last_run = self._engine.headroom.since(before)

    def _start(self, job: Job) -> None:
        for completion in job.completions:
            self._engine.add(completion.request, checked=True)  # by the maker of the job
            self._running[completion.request.id] = job, completion

    def _leave(self, jobs: Sequence[Job]) -> None:
        """Abort unfinished jobs. The last run to leave waits for the plans in flight, so that the engine is idle."""
        for completion in (c for job in jobs for c in job.completions if c.request.id in self._running):
            completion.output.finish_reason = "abort"
            self._close(completion)
        while not self._running and self._engine.has_work:
            self._step()

    def _step(self) -> None:
        """Step the engine once and deliver its events. Events of requests that ended in the meantime are dropped."""
        if self._engine.asleep:
            raise InvalidRequest("the model is asleep; call wake_up() first.")
        events, running = self._engine.step(), self._running
        for request_id, token_id in zip(events.ids, events.token_ids, strict=True):
            if request_id in running:
                job, completion = running[request_id]
                self._pass_on(job, completion, completion.take_token(token_id), [token_id])
        for event in events.events:
            if event.request_id in running:
                job, completion = running[event.request_id]
                ids = [event.token_id] if event.token_id >= 0 else []
                self._pass_on(job, completion, completion.take(event), ids)

    def _pass_on(self, job: Job, completion: Completion, text: str, token_ids: list[int]) -> None:
        if completion.output.finished:
            self._close(completion)
        job.inbox.append(StreamOutput(text, token_ids, completion.output, job.result))

    def _close(self, completion: Completion) -> None:
        """Remove a completion that has ended. If a stop string ended it, the engine learns of it here."""
        request_id = completion.request.id
        del self._running[request_id]
        self._engine.abort(request_id, completion.abort_at)
        completion.output.metrics = self._stats.pop(request_id)

    def _note_stats(self, request: Request, stats: RequestStats) -> None:
        self._stats[request.id] = stats
