"""Log-likelihoods of given continuations: the requests to run for them, and their results."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams
from ridgeline.text.arguments import integers, short
from ridgeline.text.outputs import RequestOutput
from ridgeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Score:
    """The score of one continuation.

    It holds the tokens, the natural logarithm of each one's probability after all tokens before it, and a flag for each
    that says if it is the likeliest there, so that greedy decoding would have written it.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool

    @property
    def logprob(self) -> float:
        """The logarithm of the whole continuation's probability."""
        return sum(self.logprobs)


def listed_continuations(continuations: object, num_prompts: int) -> list[list]:
    """Return a list of continuations for each prompt. Raise InvalidRequest."""
    listed = list(continuations) if isinstance(continuations, (list, tuple)) else []
    if len(listed) != num_prompts or not all(isinstance(each, (list, tuple)) and each for each in listed):
        raise InvalidRequest(
            f"continuations takes a list for each of the {num_prompts} prompts, with a string or a list of token ids "
            f"for each continuation, got {short(continuations)}.",
            param="continuations",
        )
    return [list(each) for each in listed]


def continued(
    prompt: tuple[str | None, list[int]], continuation: object, tokenizer: Tokenizer | None
) -> tuple[list[int], int]:
    """Return the tokens of the prompt (its text and ids) and its continuation, and how many of them are the prompt's.

    Two strings are tokenized as one, as in running text, and the tokens beyond the prompt's own number are the
    continuation. The prompt's trailing spaces belong to the continuation. Both rules are those of
    lm-evaluation-harness. Raise InvalidRequest.
    """
    text, ids = prompt
    if isinstance(continuation, str):
        if tokenizer is None or text is None:
            raise InvalidRequest(
                "a continuation may be text only if its prompt is text; give token ids for both.", param="continuations"
            )
        start = len(tokenizer.encode(text.rstrip())) if text != text.rstrip() else len(ids)
        tokens = tokenizer.encode(text + continuation)
    else:
        try:
            tokens, start = ids + integers(continuation), len(ids)
        except TypeError:
            raise InvalidRequest(
                f"a continuation is a string or a list of token ids, got {short(continuation)}.", param="continuations"
            ) from None
    if not 0 < start < len(tokens):
        empty = "prompt" if start < 1 else "continuation"
        raise InvalidRequest(f"the {empty} has no token of its own in {short((text or ids, continuation))}.")
    return tokens, start


def scoring_params(start: int) -> SamplingParams:
    """Return the parameters that score a prompt's tokens from `start` on. The one token that every request gives is
    dropped."""
    return SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start, detokenize=False, ignore_eos=True
    )


def score_of(result: RequestOutput, start: int) -> Score:
    """Return the score from the prompt logprobs that `scoring_params` asked for. Raise InvalidRequest if the request
    failed."""
    [output] = result.outputs
    token_ids, entries = result.prompt_token_ids[start:], (result.prompt_logprobs or [])[start:]
    found = [entry[token] for token, entry in zip(token_ids, entries, strict=False) if entry is not None]
    if len(found) < len(token_ids):
        raise InvalidRequest(f"a continuation could not be scored: {output.error or 'it was aborted.'}")
    return Score(token_ids, [entry.logprob for entry in found], all(entry.rank == 1 for entry in found))
