"""The routes of Ollama's API that tell of models: GET /api/tags, /api/ps and /api/version, and POST /api/show.

Models are those that the server was started with. The routes that would fetch or change some are not here
(http/absent.py).
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.ollama.answers import Details, Loaded, LoadedModels, OllamasVersion, Shown, Tag, Tags
from ridgeline.serving.apis.ollama.bodies import ShowBody, known_name
from ridgeline.serving.http.answers import OllamasError
from ridgeline.serving.http.describe import answers, described
from ridgeline.serving.http.exchange import read_body
from ridgeline.serving.http.pieces import json_of
from ridgeline.serving.requests.validation import check_model
from ridgeline.text.infill import marks
from ridgeline.weights.folder import fingerprint
from ridgeline.weights.formats.gguf_file import is_gguf

VERSION = "0.13.0"  # of Ollama, whose API this is: clients refuse servers that are too old for them
NEVER = "9999-12-31T23:59:59Z"
LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["ollama"])

    @routes.get("/api/tags", summary="The models, under each of their names", responses=answers(Tags))
    async def tags() -> Response:
        return json_of(Tags(models=[tag for each in api.beside for tag in _tags(each)]))

    @routes.get("/api/ps", summary="The models whose weights are loaded", responses=answers(LoadedModels))
    async def loaded() -> Response:
        awake = [each for each in api.beside if each.client.facts is not None and not each.client.asleep]
        return json_of(LoadedModels(models=[_loaded(each, tag) for each in awake for tag in _tags(each)]))

    @routes.get("/api/version", summary="The version of Ollama's API", responses=answers(OllamasVersion))
    async def version() -> Response:
        return json_of(OllamasVersion(version=VERSION))

    @routes.post("/api/show", **described(ShowBody, "A model", Shown, error=OllamasError))
    async def show(request: Request) -> Response:
        body = await read_body(request, ShowBody)
        return json_of(shown(api, check_model(api, known_name(api, body.model or body.name))))

    for path in ("/", "/api/tags", "/api/version"):  # how clients ask whether a server is there
        routes.add_api_route(path, _there, methods=["HEAD"], include_in_schema=False)
    return routes


async def _there() -> Response:
    return Response()


def shown(api: ApiServer, name: str) -> Shown:
    """Return the description of a model. Raise Unavailable while no engine is there."""
    facts, defaults = api.service.facts(), api.defaults.sampling
    family = family_of(facts.architecture)
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": facts.parameters,
        f"{family}.context_length": facts.max_model_len,
        f"{family}.embedding_length": facts.width,
        f"{family}.block_count": facts.layers,
    }
    return Shown(
        modelfile=f"# served by Ridgeline\nFROM {name}\n",
        parameters="\n".join(f"{option} {value}" for option, value in defaults.items()),
        template=api.chat_template.source or "",
        details=details_of(api),
        model_info=info,
        capabilities=capabilities_of(api),
        modified_at=_began(api),
    )


def capabilities_of(api: ApiServer) -> list[Any]:
    """Return the model's abilities, in Ollama's words."""
    if api.service.facts().pooling is not None:
        return ["embedding"]
    can = {
        "completion": True,
        "tools": api.chat_template.mentions("tools"),
        "thinking": api.forms.reasoning is not None,
        "insert": marks(api.tokenizer) is not None,
    }
    return [name for name, true in can.items() if true]


def details_of(api: ApiServer) -> Details:
    facts = api.service.facts()
    family = family_of(facts.architecture)
    return Details(
        format="gguf" if is_gguf(api.folder) else "safetensors",
        family=family,
        families=[family],
        parameter_size=spelled(facts.parameters),
        quantization_level=LEVELS.get(facts.precision, facts.precision.upper()),
    )


def family_of(architecture: str) -> str:
    """Return an architecture's name without what all of them have: LlamaForCausalLM is llama."""
    return architecture.partition("For")[0].removesuffix("Model").lower()


def spelled(count: int) -> str:
    """Return a number of parameters as people say it: 7.6B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _tags(api: ApiServer) -> list[Tag]:
    """Return the model under each of its names; none while no engine has told of it."""
    if (facts := api.client.known) is None or api.client.facts is None:
        return []
    about: dict[str, Any] = {"modified_at": _began(api), "size": facts.weight_bytes, "digest": _digest(api.folder)}
    return [Tag(name=name, model=name, details=details_of(api), **about) for name in api.all_names]


def _loaded(api: ApiServer, tag: Tag) -> Loaded:
    facts = api.service.facts()
    return Loaded(
        name=tag.name,
        model=tag.model,
        size=tag.size,
        digest=tag.digest,
        details=tag.details,
        expires_at=NEVER,
        size_vram=0 if facts.device.startswith("cpu") else tag.size,
        context_length=facts.max_model_len,
    )


def _began(api: ApiServer) -> str:
    return datetime.fromtimestamp(api.started, UTC).isoformat().replace("+00:00", "Z")


@lru_cache
def _digest(folder: Path) -> str:
    """Return a text that changes with the model's files, as long as Ollama's."""
    return hashlib.sha256(fingerprint(folder).encode()).hexdigest()
