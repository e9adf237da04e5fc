"""Routes of OpenAI's, Cohere's and vLLM's servers that this one has not, each with a sentence for its callers."""

from __future__ import annotations

from ridgeline.serving.http.paths import is_under

_SOUND = "no sound is written here; /v1/audio/transcriptions reads it"
_TRAINING = "a trainer sends weights by POST /update_weights, which --weight-transfer opens, and ends by finishing"
_TOKENS = "send token ids as the prompt of /v1/completions, with return_token_ids"
_KEPT = "what is kept of pictures and sound is bounded, and the oldest goes first"
_CACHES = "caches are not handed between servers"
_FIXED = "the number of engines is fixed; start the server anew with --data-parallel-size"
_OLLAMAS = "the server has the models that it was started with, and changes none; name another to `ridgeline serve`"
_CHOICES = "use /v1/chat/completions with structured_outputs: {choice: …}, and logprobs"

# A route and all below it → why it is not here, or what to use
ABSENT: dict[str, str] = {
    "/abort_requests": "a request ends when its client hangs up; POST /pause?mode=abort ends all",
    "/api/blobs": _OLLAMAS,
    "/api/copy": _OLLAMAS,
    "/api/create": _OLLAMAS,
    "/api/delete": _OLLAMAS,
    "/api/pull": _OLLAMAS,
    "/api/push": _OLLAMAS,
    "/cohere": "use /v1/chat/completions",
    "/collective_rpc": "no code of a client's is run",
    "/fault_tolerance": "a process that dies is started again by itself; /health tells",
    "/generative_scoring": "use /v1/completions with logprob_token_ids, or /score",
    "/inference/v1": _TOKENS,
    "/is_scaling_elastic_ep": _FIXED,
    "/kv_event_sources": _CACHES,
    "/release_kv_cache_memory": "use POST /sleep, which gives back weights too",
    "/reset_encoder_cache": _KEPT,
    "/reset_mm_cache": _KEPT,
    "/scale_elastic_ep": _FIXED,
    "/shutdown_weight_transfer_engine": _TRAINING,
    "/start_draft_weight_update": _TRAINING,
    "/start_profile": "`ridgeline profile` measures kernels",
    "/stop_profile": "`ridgeline profile` measures kernels",
    "/update_weight_version": _TRAINING,
    "/v1/assistants": "use /v1/responses",
    "/v1/audio/speech": _SOUND,
    "/v1/chat/completions/batch": "send each conversation to /v1/chat/completions, or a file of them to /v1/batches",
    "/v1/chat/completions/derender": _TOKENS,
    "/v1/completions/derender": _TOKENS,
    "/v1/conversations": "use /v1/responses with previous_response_id",
    "/v1/decisions": _CHOICES,
    "/v1/fine_tuning": "`ridgeline train` makes models, and a server runs them",
    "/v1/images": "no pictures are drawn here; parts of chats bring them to models that see them",
    "/v1/moderations": "use /classify with a model that classifies",
    "/v1/realtime": _SOUND,
    "/v1/systemone": _CHOICES,
    "/v1/threads": "use /v1/responses",
    "/v2/chat": "use /v1/chat/completions",
    "/weight_checker": _TRAINING,
}


def absence(path: str) -> str | None:
    """Return the sentence for a path under a route that is not here, without its full stop; None for any other."""
    return next((f"{route} is not here: {why}" for route, why in ABSENT.items() if is_under(route, path)), None)
