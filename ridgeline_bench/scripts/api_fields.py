"""Write docs/api-fields.md: every field of the bodies of OpenAI, Anthropic, Cohere, Jina and vLLM, with what the server
does with it.

python -m ridgeline_bench.scripts.api_fields
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from ridgeline.serving.apis.anthropic.bodies import CountMessagesBody, MessagesBody
from ridgeline.serving.apis.kserve.http import GenerateBody, InferBody
from ridgeline.serving.apis.openai.batches import FORM_SCHEMA
from ridgeline.serving.apis.openai.response_bodies import CountBody, ResponsesBody
from ridgeline.serving.http.absent import ABSENT
from ridgeline.serving.requests.batches import BatchBody
from ridgeline.serving.requests.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
)
from ridgeline.serving.requests.fields import APIS, known_names, state
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

# A form has no body of its own; its parts are named `expires_after[seconds]`.
_FORM: dict[str, Any] = FORM_SCHEMA["content"]["multipart/form-data"]["schema"]["properties"]
FileForm = create_model("FileForm", **{name.partition("[")[0]: (Any, None) for name in _FORM})

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "completions": (CompletionBody,),
    "chat": (ChatBody,),
    "responses": (ResponsesBody,),
    "messages": (MessagesBody,),
    "input_tokens": (CountBody,),
    "count_tokens": (CountMessagesBody,),
    "batches": (BatchBody,),
    "files": (FileForm,),
    "embeddings": (EmbeddingBody, EmbeddingChatBody),
    "pooling": (PoolingBody, PoolingChatBody),
    "classify": (ClassifyBody, ClassifyChatBody),
    "score": (ScoreBody,),
    "rerank": (RerankBody,),
    "tokenize": (TokenizeBody, TokenizeChatBody),
    "detokenize": (DetokenizeBody,),
    "infer": (InferBody,),
    "generate": (GenerateBody,),
}
TITLES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "input_tokens": "/v1/responses/input_tokens",
    "count_tokens": "/v1/messages/count_tokens",
    "batches": "/v1/batches",
    "files": "/v1/files",
    "embeddings": "/v1/embeddings",
    "pooling": "/pooling",
    "classify": "/classify",
    "score": "/score, /v1/score",
    "rerank": "/rerank, /v1/rerank, /v2/rerank",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "infer": "/v2/models/{model}/infer",
    "generate": "/v2/models/{model}/generate, /v2/models/{model}/generate_stream",
}
NOTES = {
    "batches": "Lines of the file are bodies of the endpoint, with its fields.",
    "files": "A form (`multipart/form-data`); `expires_after` comes as `expires_after[anchor]` and\n"
    "`expires_after[seconds]`.",
    "infer": "Of a model that generates, `parameters` are the fields of `/v1/completions` without `n`, and\n"
    "`timeout` in microseconds. `binary_data_output` asks for bytes, as `binary_data` of an output does.",
    "generate": "Fields of `/v1/completions`, without `n`, stand in `parameters` or beside it, with `timeout`\n"
    "and with `stop_words` for `stop`. Empty texts ask for nothing.",
}
HEAD = """# Fields of requests

Written by `python -m ridgeline_bench.scripts.api_fields` from the lists that the server itself
reads by (`ridgeline/serving/requests/fields.py` and `ridgeline/serving/requests/bodies.py`).

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
        note = [NOTES[route], ""] if route in NOTES else []
        rows = [f"## {TITLES[route]}", "", *note, "| field | of | state | |", "|---|---|---|---|"]
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
