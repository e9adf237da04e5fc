"""The bodies of llama.cpp's routes, put into a completion's words.

Fields that mean nothing here are left out by name, as llama.cpp's server does without a word. Sampling that a body does
not set has the server's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from ridgeline.core.plan.request import MAX_LOGIT_BIAS
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import (
    LAX,
    LAX_INT,
    MOST_NAME,
    MOST_PARTS,
    Body,
    CompletionBody,
    Object,
    Penalty,
    Positive,
    Prompt,
    Share,
    Stop,
    TemplateBody,
    Unit,
)
from ridgeline.serving.requests.pooling import Input
from ridgeline.serving.requests.refusals import shortened
from ridgeline.serving.requests.validation import parse
from ridgeline.text.tokenizer import Tokenizer

RANDOM = (-1, 2**32 - 1)  # seeds that mean any
FAR = 100.0  # the largest bias
SAME = ("model", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "stop")
LATER = "not known here; top_p, min_p and the penalties are"
OF_SAMPLING = """dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
dynatemp_range min_keep mirostat mirostat_eta mirostat_tau samplers top_n_sigma xtc_probability xtc_threshold"""
HARMLESS: dict[str, str] = {
    **dict.fromkeys(OF_SAMPLING.split(), LATER),
    "cache_prompt": "the prefix cache finds its own",
    "id_slot": "requests choose no slot",
    "lora": "there are no adapters",
    "n_cache_reuse": "the prefix cache finds its own",
    "n_indent": "an answer ends by its tokens and stop strings",
    "n_keep": "nothing is dropped from a full context",
    "post_sampling_probs": "probabilities are those before sampling",
    "repeat_last_n": "a penalty counts the whole text",
    "response_fields": "answers are whole",
    "return_progress": "prompts tell of no progress",
    "speculative.n_max": "the server chooses how many drafts pay",
    "speculative.n_min": "the server chooses how many drafts pay",
    "speculative.p_min": "the server chooses how many drafts pay",
    "t_max_predict_ms": "n_predict bounds an answer",
    "t_max_prompt_ms": "n_predict bounds an answer",
    "timings_per_token": "the last part has timings",
}


def _check_bias(value: object) -> object:
    """Check biases by token or text: an object, or a list of pairs."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ValueError("logit_bias is an object, or a list of pairs of a token and a bias")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"there are {len(pairs)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    for token, bias in pairs:
        named = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**32
        if not (named or (isinstance(token, str) and len(token) <= MOST_NAME)):
            raise ValueError(
                f"logit_bias has a token or text of at most {MOST_NAME} characters, got {shortened(token)}"
            )
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, (int, float))):
            raise ValueError(f"a bias is a number or false, got {shortened(bias)}")
    return pairs


_BIAS = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "array"}, "maxItems": MAX_LOGIT_BIAS}]}
Bias = Annotated[Any, BeforeValidator(_check_bias), WithJsonSchema(_BIAS)]
Count = Annotated[int, Field(ge=-2, lt=2**31), LAX_INT]


class PredictBody(Body):
    """The fields of both bodies that generate. `n_predict` of -1 is as many tokens as there is room for, and with 0 the
    prompt is read and no token is shown. A temperature below 0 is 0."""

    lenient = True
    harmless: ClassVar[Mapping[str, str]] = HARMLESS

    model: str | None = None
    n_predict: Count | None = None
    temperature: Annotated[float, LAX] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), LAX_INT] | None = None
    top_p: Share | None = None
    min_p: Unit | None = None
    typical_p: Share | None = None
    repeat_penalty: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), LAX_INT] | None = None
    stop: Stop = None
    ignore_eos: bool | None = None
    logit_bias: Bias | None = None
    n_probs: Annotated[int, Field(ge=0, lt=2**31), LAX_INT] | None = None
    grammar: str | None = None
    json_schema: Object | None = None
    stream: bool | None = None
    return_tokens: bool | None = None


class LlamaBody(PredictBody):
    """The body of POST /completion: one prompt, or a list of prompts, as text or as tokens."""

    prompt: Prompt


class InfillBody(PredictBody):
    """The body of POST /infill. The model writes what stands between `input_prefix` with `prompt` and `input_suffix`.
    `input_extra` are texts of other files, as {"filename": …, "text": …}."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    prompt: str | None = None
    input_extra: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_PARTS)] | None = None


class ApplyBody(TemplateBody):
    """The body of POST /apply-template: a conversation."""

    lenient = True

    model: str | None = None


class EmbeddingsBody(Body):
    """The body of POST /embedding: one text, tokens, or a list of either."""

    lenient = True

    model: str | None = None
    content: Input | None = None
    input: Input | None = None


def completion_of(tokenizer: Tokenizer, body: PredictBody, prompt: Any) -> CompletionBody:
    """Return the request as a completion's, without a bound of its length. Raise BadRequest."""
    found: Object = {"prompt": prompt, **{name: getattr(body, name) for name in SAME}}
    if body.temperature is not None:
        found["temperature"] = max(0.0, body.temperature)
    found |= {"repetition_penalty": body.repeat_penalty, "ignore_eos": body.ignore_eos}
    found["seed"] = None if body.seed in RANDOM else body.seed
    found["logprobs"] = body.n_probs or None
    found["logit_bias"] = _biases(tokenizer, body.logit_bias or ()) or None
    if body.grammar and body.json_schema is not None:
        raise BadRequest("give either grammar or json_schema, not both.", param="grammar")
    if body.grammar:
        found["structured_outputs"] = {"grammar": body.grammar}
    elif body.json_schema is not None:
        found["structured_outputs"] = {"json": body.json_schema}
    return parse(CompletionBody, {name: value for name, value in found.items() if value is not None})


def _biases(tokenizer: Tokenizer, pairs: Iterable[tuple[int | str, float | bool]]) -> dict[str, float]:
    """Return the bias of each token id. A text biases each of its tokens, and false forbids."""
    found: dict[str, float] = {}
    for token, bias in pairs:
        value = -FAR if bias is False else float(max(-FAR, min(FAR, bias)))  # floats have no room for every number
        named = isinstance(token, int) or (token.isascii() and token.isdigit())
        ids = [token] if named else tokenizer.encode(str(token), add_special_tokens=False)
        found |= dict.fromkeys(map(str, ids), value)
    return found


def extras(listed: Iterable[Object]) -> list[tuple[str, str]]:
    """Return the name and the text of each other file. Raise BadRequest."""
    found = []
    for index, extra in enumerate(listed):
        text, name = extra.get("text"), extra.get("filename") or "tmp"
        if not isinstance(text, str) or not isinstance(name, str):
            raise BadRequest(f"input_extra.{index} has a text, and a filename that is one.", param="input_extra")
        found.append((name, text))
    return found
