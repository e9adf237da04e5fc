"""The time for which a request asks the prefix cache to keep what it leaves."""

from __future__ import annotations

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.requests.bodies import GenerationBody

KEPT, DAY = 300.0, 86400.0  # seconds for which a session is expected back: by its key alone, and with retention 24h


def kept_for(body: GenerationBody) -> float:
    """Return for how many seconds the cache should keep what the request leaves; 0: as long as there is room."""
    if body.prompt_cache_ttl is not None:
        return body.prompt_cache_ttl
    if body.prompt_cache_retention is not None:
        return DAY if body.prompt_cache_retention == "24h" else KEPT
    return KEPT if body.prompt_cache_key else 0.0


def cut_short(api: ApiServer, body: GenerationBody) -> list[str]:
    """Return the entries of the answer's header for a time that is longer than the server's `session_ttl`."""
    if kept_for(body) <= api.service.facts().session_ttl:
        return []
    named = ("prompt_cache_ttl", "prompt_cache_retention")
    return [next((name for name in named if getattr(body, name) is not None), "prompt_cache_key")]
