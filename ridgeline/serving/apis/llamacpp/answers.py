"""The answers of llama.cpp's routes. Times are milliseconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ridgeline.serving.http.answers import Answer


class ScoredToken(Answer, kw_only=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class DrawnToken(ScoredToken, kw_only=True):
    top_logprobs: list[ScoredToken]


class Timings(Answer, kw_only=True):
    cache_n: Annotated[int, Meta(description="tokens of the prompt that were cached")]
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Predicted(Answer, kw_only=True):
    """A whole answer, or a part of it. The last part alone stops, and says why, and has the fields after that."""

    index: int
    content: str
    tokens: Annotated[list[int], Meta(description="if return_tokens asks for them, or in a stream")]
    stop: bool
    id_slot: Literal[-1] = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[DrawnToken] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    truncated: Annotated[bool, Meta(description="the context of an infill was cut")] | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Properties(Answer, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: Annotated[str, Meta(description="the model's name: paths of the server are not told")]
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(Answer, kw_only=True):
    """Room for one request. Which request has which is not told."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Applied(Answer, kw_only=True):
    prompt: str


class Embedded(Answer, kw_only=True):
    index: int
    embedding: Annotated[list[list[float]], Meta(description="one vector, or one for each token")]
