"""The rounds of beam search. Every beam is a request for one token, whose prompt is the beam so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.core.plan.request import SamplingParams
from ridgeline.offline.jobs import Job
from ridgeline.text.beams import BeamSearch
from ridgeline.text.outputs import RequestOutput

Search = tuple[BeamSearch, RequestOutput]


def run_rounds(
    searches: Sequence[Search],
    make: Callable[[list[int], SamplingParams], Job],
    finish: Callable[[Sequence[Job]], object],
) -> None:
    """Run the beams of all searches together, round by round, until none of them goes on.

    The prefix cache holds all of a beam but its last token. The cache holds what beams have in common once, except the
    last block of it, which is copied.
    """
    while searches := [(search, result) for search, result in searches if search.running]:
        jobs = [
            [make([*result.prompt_token_ids, *beam.tokens], search.step_params) for beam in search.running]
            for search, result in searches
        ]
        finish([job for each in jobs for job in each])
        for (search, _), each in zip(searches, jobs, strict=True):
            search.take([job.result for job in each])
