"""URLs lead to public addresses of allowed hosts alone, files below a folder alone, and data: URLs are bounded."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline.media.bounds import BadMedia
from ridgeline.media.fetch import MediaSources, check_address, from_base64

MOST = 10_000
NOT_PUBLIC = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.100.100.200",
    "100.64.0.1",
    "192.0.0.192",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "168.63.129.16",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:1:2:3:4:5:6",
    "2001:db8::1",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(BadMedia, match="no public address"):
        check_address(address, "http://a/")


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_a_public_address_is_dialled(address: str) -> None:
    assert check_address(address, "http://a/") == address.removeprefix("::ffff:")


def fetch(url: str, **options: Any) -> bytes:
    return asyncio.run(MediaSources(**{"most": MOST, "domains": ("*",), **options}).bytes_of(url))


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://localhost:80/", "http://2130706433/", "http://0x7f.1/", "http://[::1]/",
     "http://[::ffff:127.0.0.1]/", "http://[::ffff:a9fe:a9fe]/latest", "http://169.254.169.254/latest/meta-data"],
)  # fmt: skip
def test_urls_inward_are_refused_however_they_are_spelled(url: str) -> None:
    with pytest.raises(BadMedia, match="no public address"):
        fetch(url)


def test_without_allowed_domains_nothing_is_fetched() -> None:
    with pytest.raises(BadMedia, match=r"fetches no URLs \(--allowed-media-domains\)"):
        fetch("https://example.com/a.png", domains=())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/a.png", "none of this server's --allowed-media-domains"),
        ("https://notexample.com/a.png", "none of this server's"),
        ("https://example.com.evil.org/", "none of this server's"),
        ("https://example.com@evil.org/", "name or password"),
        ("https://user:secret@example.com/", "name or password"),
        ("https:///a", "with a host"),
        ("ftp://example.com/a", "is no URL that is taken"),
        ("gopher://example.com/", "is no URL that is taken"),
        ("javascript:alert(1)", "is no URL that is taken"),
        ("cat.png", "is no URL that is taken"),
        ("", "is no URL that is taken"),
        ("http://example.com:99999/", "is no URL"),
        ("http://[bad/", "is no URL"),
        ("http://example.com/a b", "spaces or control characters"),
        ("https://example.com/" + "a" * 9000, "characters, of at most"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
def test_a_url_that_is_not_allowed_gets_one_sentence(url: str, words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        fetch(url, domains=("example.com", "*.images.example.com"))


# ---- a server that answers badly -------------------------------------------------------------------------------------


Answer = Callable[[bytes, asyncio.StreamWriter], Any]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


def through(answer: Answer, path: str = "/", host: str = "pictures.example", **options: Any) -> Any:
    """What comes of a URL whose host is resolved to a server here; only this test's host is taken as public."""

    async def resolve(name: str, _: int) -> list[str]:
        return ["127.0.0.1"] if name == "pictures.example" else ["10.0.0.7"]

    def check(address: str, url: str) -> str:
        return address if address == "127.0.0.1" else check_address(address, url)

    async def run() -> bytes:
        async with server(answer) as port:
            settings = {"most": MOST, "domains": ("*",), "resolve": resolve, "check": check, "seconds": 5.0, **options}
            return await MediaSources(**settings).bytes_of(f"http://{host}:{port}{path}")

    return asyncio.run(run())


def says(*lines: str, body: bytes = b"") -> Answer:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)

    return answer


def test_a_file_is_fetched_with_the_name_of_its_host_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.0.0.1:3128")
    heads: list[bytes] = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    assert through(answer, "/a?b=é#part") == b"hello"
    assert heads[0].startswith(b"GET /a?b=%C3%A9 HTTP/1.1\r\n")
    assert b"host: pictures.example:" in heads[0].lower()
    assert b"cookie" not in heads[0].lower()


@pytest.mark.parametrize("target", ["http://inside.example/", "http://169.254.169.254/", "http://[::1]:80/"])
def test_a_redirect_inward_is_refused(target: str) -> None:
    with pytest.raises(BadMedia, match="no public address"):
        through(says("HTTP/1.1 302 Found", f"Location: {target}", "Content-Length: 0"))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file:///etc/passwd", "no URL of http or https"),
        ("data:image/png;base64,AAAA", "no URL of http or https"),
        ("http://other.example/", "none of this server's"),
        ("/again", "more than 5 times"),
    ],
)
def test_a_redirect_is_checked_as_a_url_is(target: str, words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        through(says("HTTP/1.1 302 Found", f"Location: {target}", "Content-Length: 0"), domains=("pictures.example",))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says("HTTP/1.1 200 OK", "Content-Length: 99999"), "more than 10000 bytes"),
        (says("HTTP/1.1 200 OK", body=bytes(MOST + 1)), "more than 10000 bytes"),
        (says("HTTP/1.1 404 Not Found", "Content-Length: 0"), "status 404"),
        (says("HTTP/1.1 200 OK", "Content-Encoding: gzip", body=b"x"), "compressed"),
        (says("HTTP/1.1 200 OK", "Content-Length: 100", body=b"short"), "could not be fetched"),
        (says("not HTTP at all"), "could not be fetched"),
    ],
)
def test_a_bad_answer_gets_one_sentence(answer: Answer, words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        through(answer)


@pytest.mark.parametrize("slow", [True, False])
def test_an_endless_stream_ends(slow: bool) -> None:
    """Of bytes that come slowly by the clock, and of those that come fast by their number."""

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" if slow else bytes(4096))
            await writer.drain()
            await asyncio.sleep(0.05 if slow else 0)

    with pytest.raises(BadMedia, match="not fetched within 0.5 s" if slow else "more than 10000 bytes"):
        through(answer, seconds=0.5 if slow else 20.0)


# ---- files and data --------------------------------------------------------------------------------------------------


def test_files_are_read_below_the_folder_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "media", tmp_path / "secret"
    (folder / "in ner").mkdir(parents=True)
    (folder / "in ner" / "a.png").write_bytes(b"picture")
    outside.write_bytes(b"secret")
    (folder / "link").symlink_to(outside)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "large").write_bytes(bytes(MOST + 1))
    os.mkfifo(folder / "pipe")

    def read(path: str) -> bytes:
        return fetch(f"file://{path}", folder=str(folder))

    assert read(f"{folder}/in%20ner/a.png") == b"picture"
    assert read(f"localhost{folder}/in%20ner/a.png") == b"picture"
    for path, words in {
        f"{outside}": "not below the folder",
        f"{folder}/../secret": "not below the folder",
        f"{folder}/in%20ner/%2e%2e/%2e%2e/secret": "not below the folder",
        f"{folder}extra/a": "not below the folder",
        f"elsewhere{folder}/in%20ner/a.png": "not below the folder",
        f"{folder}/a%00b": "not below the folder",
        f"{folder}/link": "behind a link",
        f"{folder}/linked/secret": "behind a link",
        f"{folder}/none": "No such file",
        f"{folder}/in%20ner": "no regular file",
        f"{folder}/pipe": "no regular file",
        f"{folder}/large": "more than 10000 bytes",
    }.items():
        with pytest.raises(BadMedia, match=words):
            read(path)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 9_999, 10_000])
def test_data_urls_are_bytes_in_base64(size: int) -> None:
    data = bytes(range(256)) * 40
    text = base64.b64encode(data[:size]).decode()
    assert fetch(f"data:image/png;base64,{text}") == data[:size]
    assert fetch(f"data:;charset=x;BASE64,{text[:8]}\n{text[8:]}") == data[:size]


def test_every_base64_is_what_the_standard_library_makes_of_it() -> None:
    """Texts of any characters, some of them with bits behind the last byte."""
    draw = random.Random(3)
    for _ in range(20_000):
        text = "".join(draw.choices("ABwxyz09+/", k=draw.randrange(10))) + draw.choice(("", "", "=", "==", "ä", "A=A"))
        try:
            wanted = binascii.a2b_base64(text[: None if len(text) % 4 == 0 else 1], strict_mode=True)  # none of 1
        except (binascii.Error, ValueError):
            with pytest.raises(BadMedia):
                from_base64(text, 100)
        else:
            assert from_base64(text, 100) == wanted


@pytest.mark.parametrize("fast", [True, False])
def test_long_base64_is_decoded_in_pieces(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("ridgeline.media.fetch._MSGSPEC", None)
    data = bytes(range(251)) * 10_000
    assert from_base64(base64.b64encode(data).decode(), 1 << 24) == data
    assert from_base64(base64.urlsafe_b64encode(data).decode(), 1 << 24) == data
    lines = "\n\t" + base64.encodebytes(data).decode() + " \n"
    tracemalloc.start()
    try:
        assert from_base64(lines, 1 << 24) == data
        assert tracemalloc.get_traced_memory()[1] < len(data) * 9 / 8 + (6 << 20), "no copy of the whole is made"
    finally:
        tracemalloc.stop()
    for spoiled in (lines.rstrip()[:-1], lines.replace("\n", "=\n", 9000)):
        with pytest.raises(BadMedia, match="no base64"):
            from_base64(spoiled, 1 << 24)
    with pytest.raises(BadMedia, match="no base64"):
        from_base64("AA==" + base64.b64encode(data).decode(), 1 << 24)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png,plain", "data:image/png;base64,"),
        ("data:image/png;base64", "data:image/png;base64,"),
        ("data:image/png;base64,????", "no base64"),
        ("data:image/png;base64,AAA", "no base64"),
        ("data:image/png;base64,ÄÄÄÄ", "no base64"),
        ("data:image/png;base64," + "A" * 13_340, "more than 10000 bytes"),
    ],
)
def test_bad_data_urls_get_one_sentence(url: str, words: str) -> None:
    with pytest.raises(BadMedia, match=words):
        fetch(url)
