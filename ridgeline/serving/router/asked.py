"""The parts of a request that routing reads: its model, its session, and the text that it begins with."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ridgeline.core.plan.routing import BLOCK, BYTES, MOST_BLOCKS
from ridgeline.serving.requests.bounded_json import INLINE_BYTES
from ridgeline.serving.shares import off_loop

TEXTS = ("tools", "system", "instructions", "messages", "prompt", "input", "inputs", "text", "query", "documents")
SESSION = ("session_id", "prompt_cache_key", "user")  # fields that name a session, the first that is there counts
LENGTH = ("max_completion_tokens", "max_tokens", "max_output_tokens")
LONGEST = 512  # characters of a name
TYPICAL = 256  # tokens of an output that count at most: few requests write all that they may
LONGEST_PROMPT = BLOCK * BYTES * MOST_BLOCKS  # bytes; more tells no conversations apart


class Asked(NamedTuple):
    """A request as rules see it. prompt: the bytes of its JSON that the prompt is made of, in the order of templates.
    tokens: about as many as it takes. previous: the stored response that it goes on from. request_id: its own.
    """

    model: str = ""
    session: str = ""
    salt: str = ""
    prompt: bytes = b""
    tokens: int = TYPICAL
    previous: str = ""
    request_id: str = ""


async def read(body: bytes, session: str) -> Asked:
    """Return the parts of a body that routing reads. `session` is its header's. Nothing is refused here: a server
    says better what is wrong with a body."""
    return await off_loop(len(body), INLINE_BYTES, lambda: _read(body, session))


def _read(body: bytes, session: str) -> Asked:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Asked(session=session, tokens=len(body) // BYTES + TYPICAL)
    prompt = b"".join(bytes(fields[name]) for name in TEXTS if name in fields)
    limits = [number for name in LENGTH if (number := _number(fields.get(name))) is not None]
    return Asked(
        model=_name(fields.get("model")),
        session=session or next((name for field in SESSION if (name := _name(fields.get(field)))), ""),
        salt=_name(fields.get("cache_salt")),
        prompt=prompt[:LONGEST_PROMPT],
        tokens=len(prompt) // BYTES + min([TYPICAL, *limits]),
        previous=_name(fields.get("previous_response_id")),
        request_id=_name(fields.get("request_id")),
    )


def _name(raw: msgspec.Raw | None) -> str:
    if raw is None or len(bytes(raw)) > LONGEST:
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.MsgspecError:
        return ""


def _number(raw: msgspec.Raw | None) -> int | None:
    if raw is None or len(bytes(raw)) > 16:
        return None
    try:
        return max(0, msgspec.json.decode(raw, type=int))
    except msgspec.MsgspecError:
        return None
