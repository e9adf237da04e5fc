"""The shapes of answers, for the OpenAPI document. Fields with a default are present only if they were asked for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Logprobs = dict[str, dict[str, Any]]  # by token id: logprob, rank, decoded_token
Finish = Literal["stop", "length", "repetition"]
ChatFinish = Literal["stop", "length", "tool_calls", "repetition"]


class Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="forbid")


class Error(Answer):
    message: str = Field(description="the error, and what to do about it")
    type: str
    param: str | None = Field(description="the field, as a dotted path")
    code: str | None


class ErrorAnswer(Answer):
    error: Error


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Envelope(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    ridgeline: dict[str, Any] | list[dict[str, Any]] | None = Field(None, description="where the time went")
    metrics: dict[str, float] | None = Field(None, description="the same in vLLM's words")


# ---- chats --------------------------------------------------------------------------------------------------------


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChosenLogprob]
    refusal: None


class Function(Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: Function


class Message(Answer):
    role: Literal["assistant"]
    content: str | None = Field(description="null if there are only tool calls")
    refusal: None
    reasoning: str | None = Field(None, description="what the model thought before it answered")
    reasoning_content: str | None = Field(None, description="the same as reasoning")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class Chat(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_text: str | None = None


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """A part of a tool call. Its id, type and name come with the call's first delta."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(None, description="the same as reasoning")
    tool_calls: list[ToolCallDelta] | None = None


class ChatDelta(Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Envelope):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


# ---- completions --------------------------------------------------------------------------------------------------


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None = Field(description="null in a stream until the choice ends")
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None


class Completion(Envelope):
    """An answer, or one chunk of a stream. A chunk has its usage only if stream_options ask for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


# ---- models and tokens --------------------------------------------------------------------------------------------


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Version(Answer):
    version: str


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class TokenizerInfo(BaseModel):
    """The tokenizer's settings, and the names of its special tokens: eos_token, …"""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    vocab_size: int
    model_max_length: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None


# ---- pooling ------------------------------------------------------------------------------------------------------


class PooledUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: PromptTokensDetails


class PooledList(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PooledUsage


class Embedding(Answer):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str = Field(description="numbers, or their bytes in base64")


class Embeddings(PooledList):
    data: list[Embedding]


class PooledInput(Answer):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class Pooled(PooledList):
    data: list[PooledInput]


class Classified(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(PooledList):
    data: list[Classified]


class Scored(Answer):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(PooledList):
    data: list[Scored]


class RerankedText(Answer):
    text: str


class RerankedDocument(Answer):
    index: int
    relevance_score: float
    document: RerankedText | None = None


class Reranked(Answer):
    id: str
    model: str
    usage: PooledUsage
    results: list[RerankedDocument] = Field(description="the most relevant first")


# ---- for operators ------------------------------------------------------------------------------------------------


class ServerInfo(Answer):
    version: str
    names: list[str]
    config: dict[str, Any] = Field(description="the server's settings, and the engine's as they were given")
    engine: dict[str, Any] | None = Field(description="what the engine is; null before it has told")


class Forgotten(Answer):
    status: Literal["ok"]


class Rendered(Answer):
    """A request as the engine gets it, with the text of its prompt."""

    request_id: str
    model: str
    prompt: str | None
    token_ids: list[int]
    features: None = Field(description="of images and sound, which there are none of")
    sampling_params: dict[str, Any]
    stream: bool
    cache_salt: str | None
    priority: int


# ---- responses ----------------------------------------------------------------------------------------------------


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    code: str
    message: str


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseReasoning(Answer):
    effort: str | None
    summary: None


class ResponseAnswer(Answer):
    """An answer of /v1/responses. Its items are messages, reasoning and calls of functions, as OpenAI has them."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: Literal["default"]
    store: bool = Field(description="it can be asked for again")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """An event of a stream, named by its type, as OpenAI has it. The first and the last hold the response."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- messages -----------------------------------------------------------------------------------------------------


class OutputTokensDetails(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard"]


class MessageAnswer(Answer):
    """An answer of /v1/messages. Its blocks are text, thinking and uses of tools, as Anthropic has them."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """An event of a stream, named by its type, as Anthropic has it."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessageTokens(Answer):
    input_tokens: int


class AnthropicsError(Answer):
    type: str
    message: str


class AnthropicsErrorAnswer(Answer):
    type: Literal["error"]
    error: AnthropicsError
    request_id: str | None


# ---- files and batches ----------------------------------------------------------------------------------------------


class File(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None
    expires_at: int | None


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Page(Answer):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    data: list[File]


class BatchMistake(Answer):
    code: str
    message: str
    line: int | None = Field(description="from 1")
    param: str | None


class BatchMistakes(Answer):
    object: Literal["list"]
    data: list[BatchMistake]


class BatchCounts(Answer):
    total: int
    completed: int
    failed: int


class BatchUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Batch(Answer):
    id: str
    object: Literal["batch"]
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


class BatchList(Page):
    data: list[Batch]


# ---- KServe ---------------------------------------------------------------------------------------------------------


class KServeFailure(Answer):
    error: str | Error = Field(description="a sentence; more of it where no route was reached")


class KServeServer(Answer):
    name: str
    version: str
    extensions: list[str]


class KServeTensor(Answer):
    name: str
    datatype: str
    shape: list[int]


class KServeModel(Answer):
    name: str
    versions: list[str]
    platform: str
    inputs: list[KServeTensor]
    outputs: list[KServeTensor]


class KServeConfigured(Answer):
    name: str
    data_type: str
    dims: list[int]


class KServeConfig(Answer):
    """The model's config.pbtxt, as JSON."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, Any]
    max_batch_size: int
    input: list[KServeConfigured]
    output: list[KServeConfigured]
    model_transaction_policy: dict[str, bool]
    ensemble_scheduling: dict[str, Any] | None = None


class KServeDuration(Answer):
    count: int
    ns: int


class KServeCounted(Answer):
    name: str
    version: str
    last_inference: int = Field(description="milliseconds since 1970")
    inference_count: int
    execution_count: int
    inference_stats: dict[str, KServeDuration]
    response_stats: dict[str, dict[str, KServeDuration]] = Field(description="by the response's place in its stream")
    batch_stats: list[dict[str, int | KServeDuration]]


class KServeStatistics(Answer):
    model_stats: list[KServeCounted]


class KServeReady(Answer):
    name: str
    ready: bool


class KServeOutput(KServeTensor):
    data: list[str] | list[int] | None = None
    parameters: dict[str, Any] | None = None


class KServeInferred(Answer):
    id: str | None = None
    model_name: str
    model_version: str
    outputs: list[KServeOutput]
    parameters: dict[str, Any] | None = Field(None, description="why the text ended, and its usage")


class KServeGenerated(BaseModel):
    """The output by its tensor's name, and beside it why the text ended, and its usage."""

    model_config = ConfigDict(protected_namespaces=(), extra="allow")

    id: str | None = None
    model_name: str
    model_version: str
