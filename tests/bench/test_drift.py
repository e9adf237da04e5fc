"""States drift as little as float32 allows, and the script that says so sees a state that is rounded more."""

from __future__ import annotations

import pytest
import torch

from ridgeline_bench.scripts.drift import CHUNK, SUBJECTS, Subject, arguments, error, in_steps, reference

TOKENS = 300


@pytest.mark.few(6)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.op.name)
@pytest.mark.parametrize("slow", [False, True], ids=["usual", "slow"])
def test_steps_and_chunks_stay_near_the_recurrence(subject: Subject, slow: bool) -> None:
    given = arguments(subject, TOKENS, slow)
    want = reference(subject, *given)
    plain, chunks = (error(in_steps(subject, given, each, None), want, TOKENS) for each in (1, CHUNK))
    rounded = error(in_steps(subject, given, 1, torch.bfloat16), want, TOKENS)
    assert plain < 5e-5
    assert chunks < 1e-5
    assert rounded > 100 * plain
