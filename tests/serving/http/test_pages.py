"""Pages for people: they hold all that the document holds, and need nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx
import pytest

from ridgeline.serving.http.pages import reference
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Read(HTMLParser):
    """The tags, the addresses and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.text = set[str](), list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_reference_has_every_route_and_field_and_works_offline(server: Server, path: str) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()
    answer = httpx.get(server.url + path, timeout=PATIENCE)
    page = Read(answer.text)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script" not in page.tags
    assert set(page.addresses) == {"data:,", "/openapi.json"}
    assert not re.search("url\\(|@import", answer.text)
    shown = set(" ".join(page.text).split())
    assert document["paths"].keys() <= shown
    for name in ("CompletionBody", "ChatBody", "ResponsesBody"):
        fields = document["components"]["schemas"][name]["properties"]
        assert len(fields) > 10
        assert fields.keys() <= shown


def test_the_reference_shows_what_it_is_told_as_text() -> None:
    told = "<script>alert(1)</script>"
    field = {"type": "string", "description": told}
    body = {"content": {"x/y": {"schema": {"title": told, "properties": {told: field}}}}}
    operation = {"summary": told, "tags": [told], "requestBody": body, "responses": {told: {"description": told}}}
    info = {"title": told, "version": told, "description": told}
    page = Read(reference({"info": info, "paths": {told: {"post": operation}}}, f'"{told}'))
    assert "script" not in page.tags
    assert sum(told in text for text in page.text) > 8


def test_the_root_leads_to_what_there_is(server: Server, start_server: StartServer) -> None:
    told = httpx.get(server.url, timeout=PATIENCE)
    assert told.json()["models"][0] == MODEL
    page = Read(httpx.get(server.url, headers=BROWSER, timeout=PATIENCE).text)
    assert MODEL in page.text
    assert set(told.json()["links"].values()) == set(page.addresses) - {"data:,"}
    for link in told.json()["links"].values():
        assert httpx.get(server.url + link, timeout=PATIENCE).status_code == 200
    with start_server(disable_fastapi_docs=True, root_path="/llm", api_key=("k",)) as other:
        assert httpx.get(other.url, headers=BROWSER, timeout=PATIENCE).status_code == 401
        key = {"authorization": "Bearer k"}
        links = httpx.get(f"{other.url}/llm/", headers=key, timeout=PATIENCE).json()["links"]
        assert "docs" not in links
        assert links["health"] == "/llm/health"
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert httpx.get(other.url + path, headers=key, timeout=PATIENCE).status_code == 404
