"""Pages for people: what there is at this address (GET /), and the API's reference (/docs, /redoc).

They are complete: no script runs, and nothing is loaded from other servers, so they work offline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.version import __version__

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
STYLE = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, summary { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
summary { cursor: pointer; padding: .3rem 0 } summary b { display: inline-block; min-width: 4.5rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem } small { font: .85rem system-ui, sans-serif }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884 }"""
LINKS = {
    "dashboard": ("/dashboard", "What the engine does now"),
    "docs": ("/docs", "The API's routes and fields"),
    "openapi": ("/openapi.json", "The same for programs"),
    "models": ("/v1/models", "The models that are served"),
    "health": ("/health", "Whether the server is well"),
    "metrics": ("/metrics", "Figures for Prometheus"),
}
OF_DOCS = ("docs", "openapi")


def add_pages(app: FastAPI, api: ApiServer) -> None:
    """Give an app the pages that its settings allow."""
    routes, documented = APIRouter(), not api.config.disable_fastapi_docs
    making = asyncio.Lock()
    links = {name: link for name, link in LINKS.items() if documented or name not in OF_DOCS}

    @routes.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        prefix = str(request.scope.get("root_path", ""))
        told = {name: prefix + path for name, (path, _) in links.items()}
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse({"name": "Ridgeline", "version": __version__, "models": _names(api), "links": told})
        listed = (f'<li><a href="{escape(told[name])}">{name}</a>: {text}</li>' for name, (_, text) in links.items())
        served = ", ".join(f"<code>{escape(name)}</code>" for name in _names(api))
        body = f"<h1>Ridgeline {__version__}</h1><p>Serves {served}.</p><ul>{''.join(listed)}</ul>"
        return HTMLResponse(_page("Ridgeline", body), headers=HEADERS)

    async def document(prefix: str) -> dict[str, Any]:
        async with making:  # it is made once, which takes a second: in a thread, so that the others are answered
            made = await asyncio.to_thread(app.openapi)
        return {**made, "servers": [{"url": prefix}]} if prefix else made

    if documented:

        @routes.get(LINKS["openapi"][0], include_in_schema=False)
        async def openapi(request: Request) -> Response:
            return JSONResponse(await document(str(request.scope.get("root_path", ""))))

        @routes.get("/docs", include_in_schema=False)
        @routes.get("/redoc", include_in_schema=False)
        async def docs(request: Request) -> Response:
            prefix = str(request.scope.get("root_path", ""))
            made = await document(prefix)
            return HTMLResponse(await asyncio.to_thread(reference, made, f"{prefix}/openapi.json"), headers=HEADERS)

    app.include_router(routes)


def reference(document: Mapping[str, Any], address: str) -> str:
    """Return the page of an OpenAPI document, which is found at this address."""
    info, groups = document["info"], dict[str, list[str]]()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            group = (operation.get("tags") or ["server"])[0]
            groups.setdefault(group, []).append("".join(_operation(document, path, method, operation)))
    title = f"{info['title']} {info['version']}"
    parts = [f"<h1>{escape(title)}</h1><p>{escape(info.get('description', ''))}"]
    parts.append(f' The document for programs: <a href="{escape(address)}"><code>openapi.json</code></a>.</p>')
    for group, found in groups.items():
        parts += [f"<h2>{escape(group)}</h2>", *found]
    return _page(title, "".join(parts))


def _names(api: ApiServer) -> list[str]:
    return [name for each in api.beside for name in each.all_names]


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>"
    )


def _operation(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation.get("summary", ""))
    yield f"<details><summary><b>{method.upper()}</b> {escape(path)} <small>{summary}</small></summary>"
    rows = [
        (each["name"], each.get("schema", {}), each.get("required", False), each.get("description", each["in"]))
        for each in operation.get("parameters", ())
    ]
    if rows:
        yield _table("Parameters", rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        for name, schema in _objects(document, content.get("schema", {})):
            yield _table(f"{name} ({kind})", _fields(schema))
    for status, response in operation.get("responses", {}).items():
        yield f"<p><code>{escape(status)}</code> {escape(response.get('description', ''))}</p>"
        if status == "200":
            for content in response.get("content", {}).values():
                for name, schema in _objects(document, content.get("schema", {})):
                    yield _table(name, _fields(schema))
    yield "</details>"


def _objects(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects that a schema allows, by name."""
    for each in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        name = each.get("title", "")
        if reference := each.get("$ref"):
            name = reference.rpartition("/")[2]
            each = document.get("components", {}).get("schemas", {}).get(name, {})
        if "properties" in each:
            yield name, each


def _fields(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool, str]]:
    required = schema.get("required", ())
    return [(name, each, name in required, each.get("description", "")) for name, each in schema["properties"].items()]


def _table(title: str, rows: list[tuple[str, Mapping[str, Any], bool, str]]) -> str:
    lines = (
        f"<tr><td><code>{escape(name)}</code>{' *' if required else ''}</td>"
        f"<td><code>{escape(_type(schema))}</code></td><td>{escape(text)}</td></tr>"
        for name, schema, required, text in rows
    )
    head = "<tr><th>name (* needed)</th><th>type</th><th></th></tr>"
    return f"<p>{escape(title)}</p><table>{head}{''.join(lines)}</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in several))
    if "const" in schema or "enum" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
