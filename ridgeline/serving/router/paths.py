"""The paths that clients may reach through the router. All others stay with the servers themselves."""

from __future__ import annotations

import re
from urllib.parse import quote

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.middleware import Forbidden, is_admin

OWN = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/v1/models", "/load")
GET = (
    r"/v1/models/.+|/v1/responses/[^/]+(/input_items)?|/version|/tokenizer_info|/props|/api/(ps|tags|version)"
    r"|/v2|/v2/health/(live|ready)|/v2/models/.+"
)
POST = (
    r"/v1/(chat/completions|completions|responses|messages)(/render)?|/v1/responses/input_tokens"
    r"|/v1/responses/[^/]+/cancel|/v1/messages/count_tokens|/v1/(embeddings|score|rerank|classify|tokenize|detokenize)"
    r"|/v1/audio/(transcriptions|translations|speech)|/(completions?|embeddings?|generate|encode|infill|invocations)"
    r"|/(pooling|classify|score|rerank|tokenize|detokenize|apply-template)|/v2/(embed|rerank)"
    r"|/api/(chat|generate|embed|embeddings|show)|/v2/models/.+/(infer|generate|generate_stream)"
)
DELETE = r"/v1/responses/[^/]+"
OPEN = {
    method: re.compile(paths) for method, paths in (("GET", GET), ("HEAD", GET), ("POST", POST), ("DELETE", DELETE))
}
STORED = re.compile(r"/v1/(files|batches)(/.*)?")
RESPONSE = re.compile(r"/v1/responses/([^/]+)(/.*)?")
NAMED = re.compile(r"(?:/v1/models/(.+)|/v2/models/(.+?)(?:/versions/[^/]+)?(?:/(?:infer|generate|generate_stream))?)")
UNRESERVED = "/:@!$&'()*+,;=~-._"


class NotRouted(BadRequest):
    status, code = 404, "not_routed"


def target(method: str, path: str, query: bytes) -> bytes:
    """Return the target of a request to a server, for a decoded path. The path that was looked at is sent: it is quoted
    anew. Raise Forbidden for a route of the operator's, NotRouted for another that is not passed on."""
    if any(part in (".", "..") for part in path.split("/")) or "//" in path or "\\" in path:
        raise NotRouted("the path has empty parts, dots or backslashes; write it plainly.")
    if is_admin(path):
        raise Forbidden("the router passes no admin routes on; ask the server itself.")
    if STORED.fullmatch(path):
        raise NotRouted("files and batches are on one server's disk, so they are not routed; ask the server itself.")
    if not OPEN.get(method, OPEN["DELETE"]).fullmatch(path) or method not in OPEN:
        raise NotRouted(f"the router does not pass {method[:16]} {path[:128]} on.")
    return quote(path, safe=UNRESERVED).encode() + (b"?" + query if query else b"")


def model_in(path: str) -> str:
    """Return the model that a path names, or ""."""
    found = NAMED.fullmatch(path)
    return "" if found is None else found[1] or found[2]


def response_in(path: str) -> str:
    """Return the stored response that a path names, or ""."""
    found = RESPONSE.fullmatch(path)
    return "" if found is None or found[1] in ("render", "input_tokens") else found[1]
