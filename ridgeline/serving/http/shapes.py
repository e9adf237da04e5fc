"""Pieces of answers that chats and completions share: counts, reasons, logprobs."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, cast

from msgspec import UNSET, UnsetType

from ridgeline.core.settings.serving import ServeConfig
from ridgeline.serving.errors import EngineFailed
from ridgeline.serving.generation.pieces import Piece, Usage
from ridgeline.serving.generation.service import GenerationRequest, Run
from ridgeline.serving.http import answers
from ridgeline.serving.http.pieces import later
from ridgeline.serving.observed.breakdown import breakdown, vllm_metrics
from ridgeline.serving.requests.bodies import GenerationBody
from ridgeline.text.outputs import CompletionOutput, Logprob, RequestOutput, TokenIdLogprobs
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.version import __version__

LOWEST = -9999.0  # stands for the logarithm of nothing: JSON has no infinity
FINGERPRINT = f"ridgeline-{__version__}"


def told(usage: Usage) -> answers.Usage:
    return answers.Usage(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=answers.PromptTokensDetails(cached_tokens=usage.cached),
        completion_tokens_details=answers.CompletionTokensDetails(reasoning_tokens=usage.reasoning),
    )


def usage_of(runs: Iterable[Run]) -> Usage:
    return Usage(*map(sum, zip(*(run.usage for run in runs), strict=True)))


class Chunks:
    """The chunks of a stream. `make` makes one of its choices and its usage, which `count` writes in the API's words.

    The usage so far is kept as it grows. Counting it anew for each chunk would cost the square of the stream's length.
    """

    def __init__(
        self,
        make: Callable[..., answers.ChatChunk | answers.CompletionChunk],
        write: Callable[[Any], Awaitable[None]],
        config: ServeConfig,
        body: GenerationBody,
        runs: Sequence[Run],
        count: Callable[[Usage], answers.Usage] = told,
    ) -> None:
        self._make, self._write, self._config, self._body, self._runs = make, write, config, body, runs
        self._count, (self._at_end, self._always) = count, wants_usage(config, body)
        self._usage = usage_of(runs)
        self._told = {id(run): run.usage for run in runs}

    def put(self, choice: answers.ChatDelta | answers.CompletionDelta, **more: Any) -> Awaitable[None]:
        """Write the chunk of a choice."""
        usage = self._count(self._usage) if self._always else None if self._at_end else UNSET
        return self._write(self._make(choices=[choice], **more, usage=usage))

    async def end(self) -> None:
        """Write the last chunk, if it has something to tell: the whole usage, and where the time went."""
        last = timing(self._config, self._body, self._runs)
        if self._at_end or last:
            usage = self._count(usage_of(self._runs)) if self._at_end else UNSET
            await self._write(self._make(choices=[], **last, usage=usage))

    def add(self, run: Run, piece: Piece) -> None:
        """Count a piece, before or after its chunk is written."""
        now, (_, _, cached, reasoning), so_far = run.usage, self._told[id(run)], self._usage
        self._told[id(run)] = now
        self._usage = Usage(
            so_far.prompt,
            so_far.completion + len(piece.token_ids),
            so_far.cached + now.cached - cached,
            so_far.reasoning + now.reasoning - reasoning,
        )


def entries(runs: Iterable[Run]) -> int:
    """Return about how many entries an answer has."""
    return sum(run.entries for run in runs)


def prompt_ids(asked: GenerationRequest) -> list[int] | None:
    """Return the tokens of a prompt; None for one that came as vectors."""
    return asked.prompt_token_ids if asked.embeds is None else None


def envelope(prefix: str, request_id: str, created: int, model: str) -> dict[str, Any]:
    """Return the fields of every answer and every chunk (`answers.Envelope`)."""
    name = f"{prefix}-{request_id.removeprefix('req-')}"
    return {"id": name, "created": created, "model": model, "system_fingerprint": FINGERPRINT}


def finish_reason(output: CompletionOutput) -> answers.Finish | None:
    """Return the finish reason in OpenAI's words. Raise EngineFailed for an end that is none of them, because half an
    answer is no answer."""
    if output.finish_reason in (None, "stop", "length", "repetition"):
        return cast("answers.Finish | None", output.finish_reason)
    raise EngineFailed(output.error or "the request was ended before it was complete; try again.")


def timing(config: ServeConfig, body: GenerationBody, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the fields of an answer that say where its time went."""
    found: dict[str, Any] = {}
    if body.include_breakdown or config.request_breakdown:
        each = [breakdown(run) for run in runs]
        found["ridgeline"] = each[0] if len(each) == 1 else each
    if config.enable_per_request_metrics and len(runs) == len(runs[0].endings) == 1:
        found["metrics"] = vllm_metrics(runs[0])
    return found


def weight_versions(
    body: GenerationBody, run: Run, output: CompletionOutput
) -> list[answers.WeightVersions] | UnsetType:
    """Return which weights drew a completion's tokens, if that is asked for and it has ended."""
    ended = run.endings[run.place(output)] if body.return_weight_versions and output.finished else None
    if ended is None:
        return UNSET
    spans = ended.stats.weight_versions
    return [answers.WeightVersions(version=each.version, start=each.start, end=each.end) for each in spans]


def names_by_id(config: ServeConfig, body: GenerationBody) -> bool:
    """Return True if tokens of logprobs are named by their ids."""
    asked = body.return_tokens_as_token_ids
    return config.return_tokens_as_token_ids if asked is None else asked


def wants_usage(config: ServeConfig, body: GenerationBody) -> tuple[bool, bool]:
    """Return two flags: usage at the end of a stream, and usage with every chunk."""
    if config.enable_force_include_usage:
        return True, True
    options = body.stream_options
    at_end = options is not None and bool(options.include_usage)
    return at_end, at_end and options is not None and bool(options.continuous_usage_stats)


# ---- logprobs -----------------------------------------------------------------------------------------------------


def finite(logprob: float) -> float:
    return max(logprob, LOWEST) if not math.isnan(logprob) else LOWEST


def prompt_logprobs(result: RequestOutput, top: int | None) -> list[answers.Logprobs | None] | None:
    """Return the prompt's logprobs in vLLM's form: by token id the likeliest `top`, and the prompt's. None: they were
    not asked for."""
    if top is None or result.prompt_logprobs is None:
        return None

    def told(token_id: int, entry: TokenIdLogprobs) -> dict[str, Any]:
        return {str(i): _plain(each) for i, each in (dict(best(entry, top)) | {token_id: entry[token_id]}).items()}

    return later(
        None if entry is None else told(token_id, entry)
        for token_id, entry in zip(result.prompt_token_ids, whole_prompt(result), strict=True)
    )


def chat_logprobs(
    tokenizer: Tokenizer, ids: Iterable[int], entries: Iterable[TokenIdLogprobs], top: int, *, by_id: bool = False
) -> answers.ChatLogprobs:
    """Return logprobs in the form of chats, of which `content` yields one token after the other. As with OpenAI, half a
    character is spelled by its bytes ("\\xe2\\x80"). With `by_id` tokens are spelled as "token_id:7"."""

    def told(token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": f"token_id:{token_id}" if by_id else tokenizer.spelled(token_id)[0],
            "logprob": finite(entry.logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    def chosen(token_id: int, entry: TokenIdLogprobs) -> answers.ChosenLogprob:
        others = [answers.TokenLogprob(**told(i, each)) for i, each in best(entry, top)]
        return answers.ChosenLogprob(**told(token_id, entry[token_id]), top_logprobs=others)

    return answers.ChatLogprobs(content=later(chosen(i, each) for i, each in zip(ids, entries, strict=True)))


def whole_prompt(result: RequestOutput) -> Iterator[TokenIdLogprobs | None]:
    """Yield the prompt's logprobs, one entry for each token: None for the first, which nothing predicts."""
    known = result.prompt_logprobs or [None]
    return chain(known, repeat(None, len(result.prompt_token_ids) - len(known)))


def between(entries: Sequence[TokenIdLogprobs], start: int, end: int) -> Iterator[TokenIdLogprobs]:
    """Yield entries one by one: each is made when it is read."""
    return (entries[i] for i in range(start, end))


def best(entry: TokenIdLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """Return the likeliest `top` tokens. -1 is all of them. The entry lists the chosen token behind them if it is none
    of them."""
    return list(entry.items())[: top if top >= 0 else None]


def _plain(entry: Logprob) -> dict[str, Any]:
    return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
