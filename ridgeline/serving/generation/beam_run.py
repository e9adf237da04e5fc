"""A beam search as a run like others: each step of each beam is a run of its own, and the sequences come at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType

from ridgeline.serving.errors import EngineFailed, TimedOut
from ridgeline.serving.generation.pieces import Piece
from ridgeline.serving.generation.service import GenerationRequest, Run, Service
from ridgeline.text.beams import Beam, BeamSearch
from ridgeline.text.outputs import RequestOutput


class BeamRun(Run):
    """A run whose completions are the sequences that a search found, the best first."""

    def __init__(self, service: Service, asked: GenerationRequest, seed: int) -> None:
        super().__init__(service, asked, seed)
        assert asked.beams is not None
        beams, limits = asked.beams, service.limits()
        stops = frozenset(beams.stop_token_ids) | (frozenset() if beams.ignore_eos else limits.eos_ids)
        room = limits.max_model_len - len(asked.prompt_token_ids)
        self._search = BeamSearch(beams, stops, min(beams.max_tokens, room))
        self._step = self._search.step_params
        self._cached = 0

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for output in self.drawn:
            if not output.finished:
                output.finish_reason = "abort"

    async def __aiter__(self) -> AsyncIterator[Piece]:
        first = True
        while self._search.running:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._next(beam)) for beam in self._search.running]
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            steps = [task.result() for task in tasks]
            if first:
                first, self._cached = False, steps[0].cached_tokens
            self._search.take([step.result for step in steps])
        if self._search.error is not None:
            raise EngineFailed(self._search.error)
        found = RequestOutput(self.asked.id, self.asked.prompt, self.asked.prompt_token_ids, [])
        self._search.fill(found, self._service.tokenizer)
        for output, sequence in zip(self.drawn, found.outputs, strict=False):
            if not self.asked.params.skip_special_tokens:
                sequence.text = self._service.tokenizer.decode(sequence.token_ids, skip_special_tokens=False)
            output.text, output.token_ids = sequence.text, sequence.token_ids
            output.cumulative_logprob, output.score = sequence.cumulative_logprob, sequence.score
            output.finish_reason = sequence.finish_reason
            self.drawn_tokens += len(output.token_ids)
            yield Piece(output.text, output.token_ids, output, ended=True)
        self.result.outputs[:] = self.drawn[: len(found.outputs)]

    @property
    def cached_tokens(self) -> int:
        return self._cached

    async def _next(self, beam: Beam) -> Run:
        """Return the run of one token after a beam."""
        timeout = 0.0
        if self._deadline is not None:
            timeout = self._deadline - time.monotonic()
            if timeout <= 0:
                raise TimedOut(f"the request took longer than {self.asked.timeout:g} s and was ended.")
        ids = [*self.asked.prompt_token_ids, *beam.tokens]
        asked = replace(self.asked, prompt_token_ids=ids, params=self._step, beams=None, reader=None, timeout=timeout)
        run = Run(self._service, asked, self._seed)
        async with run:
            await run.finish()
        return run
