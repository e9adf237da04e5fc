"""The answers of Ollama's API. Durations are nanoseconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ridgeline.serving.http.answers import Answer, ChosenLogprob


class CalledFunction(Answer, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class Called(Answer, kw_only=True):
    """A call of a tool. It is sent when it is whole."""

    id: str
    function: CalledFunction


class OllamasMessage(Answer, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Called] | UnsetType = UNSET


class Told(Answer, kw_only=True):
    """A whole answer, or a line of it. The last line alone is done, and counts."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: Annotated[int, Meta(description="the wait before the request was begun")] | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChosenLogprob] | UnsetType = UNSET


class OllamasChat(Told, kw_only=True):
    message: OllamasMessage


class OllamasText(Told, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Called] | UnsetType = UNSET


class OllamasVectors(Answer, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamasVector(Answer, kw_only=True):
    embedding: list[float]


class Details(Answer, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Tag(Answer, kw_only=True):
    """A model. Its size is that of its weights on the device, in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(Answer, kw_only=True):
    models: list[Tag]


class Loaded(Answer, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(Answer, kw_only=True):
    models: list[Loaded]


class Shown(Answer, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "embedding"]]
    modified_at: str


class OllamasVersion(Answer, kw_only=True):
    version: Annotated[str, Meta(description="the version of Ollama whose API this is")]
