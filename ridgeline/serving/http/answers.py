"""The answers, as the OpenAPI document has them and as they are sent: fields stand in the order of the wire, and those
that may be UNSET are there only if they were asked for.

Where the document says list, the value may be a list that is made while it is sent (`pieces.later`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Logprobs = dict[str, dict[str, Any]]  # by token id: logprob, rank, decoded_token
Finish = Literal["stop", "length", "repetition"]
ChatFinish = Literal["stop", "length", "tool_calls", "repetition"]


class OpenAnswer(msgspec.Struct, kw_only=True):
    """An answer that may have more fields than those of its class."""


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all answers."""


class Error(Answer, kw_only=True):
    message: Annotated[str, Meta(description="the error, and what to do about it")]
    type: str
    param: Annotated[str | None, Meta(description="the field, as a dotted path")]
    code: str | None


class ErrorAnswer(Answer, kw_only=True):
    error: Error


class PromptTokensDetails(Answer, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(Answer, kw_only=True):
    reasoning_tokens: int


class Usage(Answer, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Envelope(Answer, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


Where = Annotated[dict[str, Any] | list[dict[str, Any]], Meta(description="where the time went")] | UnsetType
Milliseconds = Annotated[dict[str, float], Meta(description="the same in vLLM's words")] | UnsetType


# ---- chats --------------------------------------------------------------------------------------------------------


class TokenLogprob(Answer, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer, kw_only=True):
    content: list[ChosenLogprob]
    refusal: None = None


class Function(Answer, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it")]


class ToolCall(Answer, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Answer, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Meta(description="null if there are only tool calls")]
    refusal: None = None
    reasoning: Annotated[str, Meta(description="what the model thought before it answered")] | UnsetType = UNSET
    reasoning_content: Annotated[str, Meta(description="the same as reasoning")] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class WeightVersions(Answer, kw_only=True):
    """The tokens from `start` to before `end`, which weights of this version drew."""

    version: str
    start: int
    end: int


Versions = list[WeightVersions] | UnsetType


class ChatChoice(Answer, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: Versions = UNSET


class Chat(Envelope, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType | None = UNSET
    ridgeline: Where = UNSET
    metrics: Milliseconds = UNSET


class FunctionDelta(Answer, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Answer, kw_only=True):
    """A part of a tool call. Its id, type and name come with the call's first delta."""

    index: int
    function: FunctionDelta
    id: str | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Answer, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: Annotated[str, Meta(description="the same as reasoning")] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatDelta(Answer, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: Versions = UNSET


class ChatChunk(Envelope, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET
    ridgeline: Where = UNSET
    metrics: Milliseconds = UNSET
    usage: Usage | UnsetType | None = UNSET


# ---- completions --------------------------------------------------------------------------------------------------


class CompletionLogprobs(Answer, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionDelta(Answer, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[Finish | None, Meta(description="null in a stream until the choice ends")]
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: Versions = UNSET


class CompletionChoice(Answer, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None
    stop_reason: int | str | None
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: Versions = UNSET


class Completion(Envelope, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    ridgeline: Where = UNSET
    metrics: Milliseconds = UNSET


class CompletionChunk(Envelope, kw_only=True):
    """One chunk of a stream. It has its usage only if stream_options ask for it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionDelta]
    ridgeline: Where = UNSET
    metrics: Milliseconds = UNSET
    usage: Usage | UnsetType | None = UNSET


# ---- models and tokens --------------------------------------------------------------------------------------------


class Model(Answer, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Version(Answer, kw_only=True):
    version: str


class Tokens(Answer, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class PieceOfText(Answer, kw_only=True):
    id: int
    piece: Annotated[str | list[int], Meta(description="text, or bytes that are none")]


class LlamaTokens(Answer, kw_only=True):
    """The answer to a `content`, as llama.cpp has it."""

    tokens: list[int | PieceOfText]


class Text(Answer, kw_only=True):
    prompt: str
    content: Annotated[str, Meta(description="the same, as llama.cpp calls it")]


class TokenizerInfo(OpenAnswer, kw_only=True):
    """The tokenizer's settings, and the names of its special tokens: eos_token, …"""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


# ---- pooling ------------------------------------------------------------------------------------------------------


class PooledUsage(Answer, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0] = 0
    prompt_tokens_details: PromptTokensDetails


class PooledList(Answer, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str


class Embedding(Answer, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: Annotated[list[float] | str, Meta(description="numbers, or their bytes in base64")]


class Embeddings(PooledList, kw_only=True):
    data: list[Embedding]
    usage: PooledUsage


class PooledInput(Answer, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]] | str


class Pooled(PooledList, kw_only=True):
    data: list[PooledInput]
    usage: PooledUsage


class Classified(Answer, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(PooledList, kw_only=True):
    data: list[Classified]
    usage: PooledUsage


class Scored(Answer, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(PooledList, kw_only=True):
    data: list[Scored]
    usage: PooledUsage


class RerankedText(Answer, kw_only=True):
    text: str


class RerankedDocument(Answer, kw_only=True):
    index: int
    relevance_score: float
    document: RerankedText | UnsetType = UNSET


class Reranked(Answer, kw_only=True):
    id: str
    model: str
    usage: PooledUsage
    results: Annotated[list[RerankedDocument], Meta(description="the most relevant first")]


class CohereVersion(Answer, kw_only=True):
    version: Literal["2"] = "2"


class CohereUnits(Answer, kw_only=True):
    input_tokens: int
    images: int | UnsetType = UNSET


class CohereMeta(Answer, kw_only=True):
    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbeddings(Answer, kw_only=True):
    """Vectors in each of the forms that were asked for, as Cohere's clients have them."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: dict[str, list[list[float] | str]]
    texts: list[str]
    meta: CohereMeta


# ---- for operators ------------------------------------------------------------------------------------------------


class ServerInfo(Answer, kw_only=True):
    version: str
    names: list[str]
    config: Annotated[dict[str, Any], Meta(description="the server's settings, and the engine's as they were given")]
    engine: Annotated[dict[str, Any] | None, Meta(description="what the engine is; null before it has told")]
    vllm_config: Annotated[dict[str, Any] | None, Meta(description="what trainers read, under vLLM's names")]


class Forgotten(Answer, kw_only=True):
    status: Literal["ok"] = "ok"


class Rendered(Answer, kw_only=True):
    """A request as the engine gets it, with the text of its prompt."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    features: Annotated[None, Meta(description="of images and sound, which there are none of")] = None
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


# ---- responses ----------------------------------------------------------------------------------------------------


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class IncompleteDetails(Answer, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Answer, kw_only=True):
    code: str
    message: str


class InputTokensDetails(Answer, kw_only=True):
    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class ResponseUsage(Answer, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseReasoning(Answer, kw_only=True):
    effort: str | None
    summary: None = None


class ResponseAnswer(Answer, kw_only=True):
    """An answer of /v1/responses. Its items are messages, reasoning and calls of functions, as OpenAI has them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: Literal["default"] = "default"
    store: Annotated[bool, Meta(description="it can be asked for again")]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class ResponseEvent(Answer, kw_only=True):
    """An event of a stream, named by its type, as OpenAI has it. The first and the last hold the response."""

    type: str
    response: ResponseAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    sequence_number: int = 0


class DeletedResponse(Answer, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class InputTokens(Answer, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# ---- messages -----------------------------------------------------------------------------------------------------


class OutputTokensDetails(Answer, kw_only=True):
    thinking_tokens: int


class MessageUsage(Answer, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(Answer, kw_only=True):
    """An answer of /v1/messages. Its blocks are text, thinking and uses of tools, as Anthropic has them."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer, kw_only=True):
    """An event of a stream, named by its type, as Anthropic has it."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class MessageTokens(Answer, kw_only=True):
    input_tokens: int


class AnthropicsError(Answer, kw_only=True):
    type: str
    message: str


class AnthropicsErrorAnswer(Answer, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicsError
    request_id: str | None


class OllamasError(Answer, kw_only=True):
    error: str


# ---- files and batches ----------------------------------------------------------------------------------------------


class File(Answer, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output", "vision", "user_data"]
    expires_at: int | None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(Answer, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Page(Answer, kw_only=True):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page, kw_only=True):
    data: list[File]


class BatchMistake(Answer, kw_only=True):
    code: str
    message: str
    line: Annotated[int | None, Meta(description="from 1")]
    param: str | None


class BatchMistakes(Answer, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchMistake]


class BatchCounts(Answer, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchUsage(Answer, kw_only=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Batch(Answer, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchMistakes | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Page, kw_only=True):
    data: list[Batch]


# ---- KServe ---------------------------------------------------------------------------------------------------------


class KServeFailure(Answer, kw_only=True):
    error: Annotated[str | Error, Meta(description="a sentence; more of it where no route was reached")]


class KServeServer(Answer, kw_only=True):
    name: str
    version: str
    extensions: list[str]


class KServeTensor(Answer, kw_only=True):
    name: str
    datatype: str
    shape: list[int]


class KServeModel(Answer, kw_only=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[KServeTensor]
    outputs: list[KServeTensor]


class KServeConfigured(Answer, kw_only=True):
    name: str
    data_type: str
    dims: list[int]


class KServeConfig(Answer, kw_only=True):
    """The model's config.pbtxt, as JSON."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[KServeConfigured]
    output: list[KServeConfigured]
    model_transaction_policy: dict[str, bool]
    ensemble_scheduling: dict[str, Any] | UnsetType = UNSET


class KServeDuration(Answer, kw_only=True):
    count: int
    ns: int


class KServeCounted(Answer, kw_only=True):
    name: str
    version: str
    last_inference: Annotated[int, Meta(description="milliseconds since 1970")]
    inference_count: int
    execution_count: int
    inference_stats: dict[str, KServeDuration]
    response_stats: Annotated[
        dict[str, dict[str, KServeDuration]], Meta(description="by the response's place in its stream")
    ]
    batch_stats: list[dict[str, int | KServeDuration]]


class KServeStatistics(Answer, kw_only=True):
    model_stats: list[KServeCounted]


class KServeReady(Answer, kw_only=True):
    name: str
    ready: bool


class KServeOutput(KServeTensor, kw_only=True):
    data: Sequence[str | int] | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET


class KServeInferred(Answer, kw_only=True):
    model_name: str
    model_version: str
    outputs: list[KServeOutput]
    id: str | UnsetType = UNSET
    parameters: Annotated[dict[str, Any], Meta(description="why the text ended, and its usage")] | UnsetType = UNSET


class KServeGenerated(OpenAnswer, kw_only=True):
    """The output by its tensor's name, and beside it why the text ended, and its usage."""

    id: str | UnsetType = UNSET
    model_name: str
    model_version: str


class TranscriptUsage(Answer, kw_only=True):
    type: Literal["duration"]
    seconds: Annotated[int, Meta(description="of the sound, rounded up")]


class Transcription(Answer, kw_only=True):
    text: str
    usage: TranscriptUsage


class TranscriptSegment(Answer, kw_only=True):
    """start, end: seconds. seek: the begin of the window in which it was heard, in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(Answer, kw_only=True):
    """start, end: seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(Answer, kw_only=True):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegment]
    words: list[TranscriptWord] | UnsetType = UNSET
    usage: TranscriptUsage


class TranscriptDelta(Answer, kw_only=True):
    """An event of a stream: a further segment."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(Answer, kw_only=True):
    """The last event of a stream."""

    type: Literal["transcript.text.done"]
    text: str
    usage: TranscriptUsage
