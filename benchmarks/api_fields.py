"""Write docs/api-fields.md: every field of the bodies of OpenAI, Anthropic, Cohere, Jina and vLLM, with what the server
does with it.

python -m benchmarks.api_fields
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from ridgeline.serving.http.absent import ABSENT
from ridgeline.serving.requests.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from ridgeline.serving.requests.fields import APIS, known_names, state
from ridgeline.serving.requests.messages import MessagesBody
from ridgeline.serving.requests.pooling import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolingBody,
    PoolingChatBody,
    RerankBody,
    ScoreBody,
)
from ridgeline.serving.requests.responses import ResponsesBody

PAGE = Path(__file__).parents[1] / "docs" / "api-fields.md"
BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "completions": (CompletionBody,),
    "chat": (ChatBody,),
    "responses": (ResponsesBody,),
    "messages": (MessagesBody,),
    "embeddings": (EmbeddingBody, EmbeddingChatBody),
    "pooling": (PoolingBody, PoolingChatBody),
    "classify": (ClassifyBody, ClassifyChatBody),
    "score": (ScoreBody,),
    "rerank": (RerankBody,),
    "tokenize": (TokenizeBody, TokenizeChatBody),
    "detokenize": (DetokenizeBody,),
}
TITLES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "pooling": "/pooling",
    "classify": "/classify",
    "score": "/score, /v1/score",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
HEAD = """# Fields of requests

Written by `python -m benchmarks.api_fields` from the lists that the server itself reads by
(`ridgeline/serving/requests/fields.py` and `ridgeline/serving/requests/bodies.py`).

* *Implemented*: does what it says there.
* *Refused*: 400 that names it, because the answer would not be the one that was asked for. Null,
  and what is empty, zero or false, ask for nothing and are taken.
* *Harmless*: changes nothing of the answer. The header `ridgeline-ignored` names it, and the log
  does once.

A field that none of these APIs has is refused, with the nearest name: most are misspelled, and
`temprature` would leave the temperature at its default without a word. OpenAI refuses it too; vLLM
ignores it, as `--unknown-fields ignore` does here. The header names it then.

A route of another server that is not here is answered with 404 and what to use. They are listed at
the end.
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for route, apis in APIS.items():
        bodies = BODIES[route]
        rows = [f"## {TITLES[route]}", "", "| field | of | state | |", "|---|---|---|---|"]
        for name in sorted(frozenset().union(*apis.values(), *map(known_names, bodies))):
            owners = ", ".join(api for api, names in apis.items() if name in names) or "Ridgeline"
            found, remark = state(bodies, name)
            rows.append(f"| `{name}` | {owners} | {found} | {remark} |")
        parts.append("\n".join(rows) + "\n")
    rows = ["## Routes of other servers that are not here", "", "| route | 404 that says |", "|---|---|"]
    rows += [f"| `{route}` | {why}. |" for route, why in ABSENT.items()]
    return "\n".join([*parts, *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
