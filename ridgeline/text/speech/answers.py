"""The outputs of requests as answers of a recogniser's questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.text.outputs import RequestOutput
from ridgeline.text.speech.recogniser import SpeechAnswer, SpeechAsk


def answer_of(ask: SpeechAsk, result: RequestOutput) -> SpeechAnswer:
    """Return an output as an answer."""
    [output] = result.outputs
    scored: Sequence[Any] = output.logprobs or ()
    logprobs = [entry[token].logprob for entry, token in zip(scored, output.token_ids, strict=False)]
    named = ask.params.logprob_token_ids
    told = [scored[0][token].logprob for token in named] if named else ()
    return SpeechAnswer(output.token_ids, logprobs, told, output.aligned)
