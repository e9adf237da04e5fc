"""The likelihood of given tokens, through the offline API's prompt logprobs.

Every prompt runs whole and on the same path that serves requests (chunks, paged cache, the platform's kernels), so
whatever changes that path shows in these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline.core.plan.request import SamplingParams
from ridgeline.llm import LLM
from ridgeline.models.config import ModelConfig
from ridgeline.text.outputs import RequestOutput, TokenIdLogprobs
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.windows import Window, windows

STEPS_AT_ONCE = 4  # full steps' worth of prompts that run, and have their logprobs held, at once
DEFAULT_WINDOW = 1024


class EvaluationFailed(RidgelineError):
    """The model gave no answer, or one that is no number."""


@dataclass(frozen=True)
class Cut:
    """The windows of one model: `window` is the tokens read at once, `stride` how far windows advance. `of` resolves
    both."""

    window: int
    stride: int

    @classmethod
    def of(cls, llm: LLM, window: int | None = None, stride: int | None = None) -> Cut:
        """Return the cut. The defaults are DEFAULT_WINDOW tokens or what the context holds, advanced by half. Raise
        InvalidConfig."""
        longest = llm.engine.config.max_model_len - 1  # a request has room for one token of output
        window = min(DEFAULT_WINDOW, longest) if window is None else window
        stride = max(1, window // 2) if stride is None else stride
        if not 2 <= window <= longest:
            raise InvalidConfig(f"the window is {window} tokens; this model's context allows 2 to {longest}.")
        if not 1 <= stride < window:
            raise InvalidConfig(f"the stride is {stride} tokens; it must be at least 1 and below the window, {window}.")
        return cls(window, stride)

    def __call__(self, num_tokens: int) -> Iterator[Window]:
        return windows(num_tokens, self.window, self.stride)


def prefix_token(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Return the token before a document, so that its first token can be scored: BOS, else an end-of-sequence token.

    Raise InvalidConfig if the model names neither.
    """
    ends = (*sorted(tokenizer.eos_ids), *sorted(model.eos_token_ids))
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if not ends:
        raise InvalidConfig(
            "the model names no BOS and no EOS token, so nothing can stand before a text's first token."
        )
    return ends[0]


def prompt_logprobs(llm: LLM, prompts: Iterable[Sequence[int]], *, top: int = 0) -> Iterator[list[TokenIdLogprobs]]:
    """Yield, for each prompt, the logprobs of its second token and all after it, and of the `top` likeliest tokens
    there.

    Prompts run some steps' worth at a time, so that there may be any number of them. Raise InvalidRequest for a prompt
    that does not fit, and EvaluationFailed if the model gives no numbers.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top, detokenize=False)
    for batch in _batches(iter(prompts), STEPS_AT_ONCE * llm.engine.config.max_num_batched_tokens):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        yield from map(_entries, outputs)


def _entries(output: RequestOutput) -> list[TokenIdLogprobs]:
    [completion] = output.outputs
    if completion.error:
        raise EvaluationFailed(f"a request failed: {completion.error}")
    found = [entry for entry in output.prompt_logprobs or () if entry is not None]
    if any(math.isnan(entry[token].logprob) for entry, token in zip(found, output.prompt_token_ids[1:], strict=True)):
        raise EvaluationFailed("the model's scores are not numbers (NaN): weights are damaged, or the dtype overflows.")
    return found


def _batches(prompts: Iterator[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Yield lists of at least one prompt and about `max_tokens` tokens together."""
    for first in prompts:
        batch, tokens = [first], len(first)
        while tokens < max_tokens and (more := next(prompts, None)) is not None:
            batch.append(more)
            tokens += len(more)
        yield batch
