"""Routes that load and unload adapters (LoRA). Their names and bodies are vLLM's.

Both ask for the admin key (middleware.py), and read only folders below `--lora-dir`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from secrets import randbelow

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from ridgeline.core.settings.adapters import FILES, GRAMMAR, NAME, TEMPLATES, gguf_adapter
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.exchange import read_body
from ridgeline.serving.http.rest import LOADING_TIMEOUT, REFUSED
from ridgeline.serving.requests.bodies import LoadAdapterBody, UnloadAdapterBody
from ridgeline.transport.messages import LoadAdapter, UnloadAdapter

FIRST = 1 << 20  # above the numbers of adapters that a server is started with
NUMBERS = 1 << 52  # so many that two alike are never drawn, and JSON keeps them
CLOSED = (
    "adapters are not loaded and unloaded over HTTP here; start the server with --enable-lora, --lora-dir FOLDER and "
    "--admin-key KEY (docs/adapters.md)."
)


class AdaptersClosed(BadRequest):
    status, code = 404, "lora_dir_needed"


class AdapterNotFound(BadRequest):
    status, code = 404, "adapter_not_found"


def router(api: ApiServer) -> APIRouter:
    """Return the routes POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""
    routes = APIRouter(tags=["operator"])
    answers = {**REFUSED, 404: {**REFUSED[400], "description": "There is no such adapter, or no --lora-dir"}}

    @routes.post(
        "/v1/load_lora_adapter", summary="Load an adapter", responses=answers, response_class=PlainTextResponse
    )
    async def load(request: Request) -> PlainTextResponse:
        root = _root(api)
        body = await read_body(request, LoadAdapterBody)
        name = _checked(body.lora_name)
        if name in (taken for each in api.beside for taken in each.names):
            raise BadRequest(f"{name!r} is a model's name; give the adapter another.", param="lora_name")
        folder = await asyncio.to_thread(below, root, body.lora_path)
        number = FIRST + randbelow(NUMBERS)
        order = LoadAdapter(id=number, name=name, number=number, folder=str(folder), replaces=body.load_inplace)
        answer = await api.client.change_adapters(order, LOADING_TIMEOUT)
        if answer.error:
            raise BadRequest(answer.error)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @routes.post(
        "/v1/unload_lora_adapter", summary="Unload an adapter", responses=answers, response_class=PlainTextResponse
    )
    async def unload(request: Request) -> PlainTextResponse:
        _root(api)
        name = _checked((await read_body(request, UnloadAdapterBody)).lora_name)
        order = UnloadAdapter(id=FIRST + randbelow(NUMBERS), name=name)
        answer = await api.client.change_adapters(order, LOADING_TIMEOUT)
        if answer.error:
            raise AdapterNotFound(answer.error, param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return routes


def below(root: Path, given: str) -> Path:
    """Return the folder of an adapter, with symbolic links resolved. given: absolute, or relative to `root`. Raise
    BadRequest for one that is not below `root`, or has files that are not, and AdapterNotFound for none."""
    outside = BadRequest("lora_path must name a folder below the server's --lora-dir, whose files lie there too.")
    try:
        top = root.resolve(strict=True)
        folder = (top / given).resolve()
        if not folder.is_relative_to(top):
            raise outside
        if not folder.is_dir():
            raise AdapterNotFound("there is no such folder below the server's --lora-dir.", param="lora_path")
        files = [folder / name for name in (*FILES, *TEMPLATES)]
        files += [each for each in [gguf_adapter(folder)] if each is not None]
        if any(not file.resolve().is_relative_to(top) for file in files):
            raise outside
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a name too long, a null character
        raise outside from error
    return folder


def _root(api: ApiServer) -> Path:
    if api.config.lora_dir is None:
        raise AdaptersClosed(CLOSED)
    return Path(api.config.lora_dir)


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise BadRequest(f"lora_name is {name[:80]!r}; {GRAMMAR}.", param="lora_name")
    return name
