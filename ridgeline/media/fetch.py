"""Bytes of a picture, video or sound by its URL: `data:`, and where the operator allows it `https:`, `http:`, `file:`.

    sources = MediaSources(domains=("images.example.com",), folder=None, most=64 << 20)
    data = await sources.bytes_of("https://images.example.com/cat.png")

A host's name is resolved once, every address that it has must be public, and the connection goes to such an address.
Each redirect is a new URL with all of these checks. Proxies and credentials of the environment are not used.
"""

from __future__ import annotations

import asyncio
import binascii
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpcore
from httpcore import AsyncNetworkBackend, AsyncNetworkStream

from ridgeline.media.bounds import BadMedia

REDIRECTS = 5
SECONDS = 15.0  # for a whole download
LONGEST_URL = 8192  # characters, of those that name a place
PIECE = 1 << 20  # characters that are decoded of base64 at a time, since the decoder keeps the interpreter
_MSGSPEC: Any = import_module("msgspec") if find_spec("msgspec") is not None else None  # servers have it
_USUAL = str.maketrans("-_", "+/")  # in place of the characters of URLs
ANY = "*"
PORTS = {"http": 80, "https": 443}
MOVED = (301, 302, 303, 307, 308)
SHOWN = 100  # characters of a URL in a sentence
# Public by the registries, and yet services within a cloud (Azure's), or ways to addresses that are not (translations)
INWARD = tuple(
    map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)

Resolve = Callable[[str, int], Any]  # to a coroutine of addresses, as texts


def check_address(text: str, url: str) -> str:
    """Return an address that may be dialled. Raise BadMedia for one that is not public."""
    address: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and (inner := address.ipv4_mapped or _compatible(address)) is not None:
        address = inner
    inward = any(address.version == net.version and address in net for net in INWARD)
    if not address.is_global or address.is_multicast or address.is_reserved or inward:
        raise BadMedia(f"{_shown(url)} leads to {address}, which is no public address; send the bytes as a data: URL.")
    return str(address)


def _compatible(address: IPv6Address) -> IPv4Address | None:
    """Return the address of version 4 within one of the old form ::1.2.3.4."""
    value = int(address)
    return IPv4Address(value) if 1 < value < 1 << 32 else None


class PublicBackend(AsyncNetworkBackend):
    """A network on which only public addresses are there."""

    def __init__(self, url: str, resolve: Resolve, check: Callable[[str, str], str], seconds: float) -> None:
        self._url, self._resolve, self._check, self._seconds = url, resolve, check, seconds
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        found = await asyncio.wait_for(self._resolve(host, port), self._seconds)
        addresses = [self._check(address, self._url) for address in found]
        if not addresses:
            raise httpcore.ConnectError("the name has no address")
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> AsyncNetworkStream:
        raise httpcore.ConnectError("no sockets of files are dialled")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raise OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class MediaSources:
    """The places that URLs may name.

    domains: hosts that may be named: "example.com", "*.example.com" for all below it, or "*" for every host (none: no
    URL is fetched). folder: the one below which files may be read (None: no files). most: bytes of an item. seconds:
    those of a download. context: of TLS (None: the system's certificates). resolve, check: how a host becomes
    addresses, and which of these are dialled; tests alone choose others.
    """

    def __init__(
        self,
        *,
        domains: Sequence[str] = (),
        folder: str | None = None,
        most: int,
        seconds: float = SECONDS,
        context: ssl.SSLContext | None = None,
        resolve: Resolve = resolved,
        check: Callable[[str, str], str] = check_address,
    ) -> None:
        self._domains = tuple(domain.lower().rstrip(".") for domain in domains)
        self._folder = None if folder is None else os.path.realpath(folder)
        self._most, self._seconds, self._context = most, seconds, context
        self._resolve, self._check = resolve, check

    async def bytes_of(self, url: str) -> bytes:
        """Return the bytes that a URL names. Raise BadMedia."""
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(from_data_url, url, self._most)
        if len(url) > LONGEST_URL:
            raise BadMedia(f"the URL has {len(url)} characters, of at most {LONGEST_URL}; send a shorter one.")
        if scheme == "file":
            return await asyncio.to_thread(self._read, url)
        if scheme in PORTS:
            return await self._fetched(url)
        raise BadMedia(f"{_shown(url)} is no URL that is taken; send one that begins with data: or https:.")

    # ---- http --------------------------------------------------------------------------------------------------------

    async def _fetched(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                for _ in range(REDIRECTS + 1):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
                raise BadMedia(f"{_shown(url)} is redirected more than {REDIRECTS} times; send its last URL.")
        except TimeoutError:
            words = f"{_shown(url)} was not fetched within {self._seconds:g} s; send the bytes as a data: URL."
            raise BadMedia(words) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            reason = " ".join(str(error).split())[:SHOWN].rstrip(".") or type(error).__name__
            raise BadMedia(f"{_shown(url)} could not be fetched ({reason}); send the bytes as a data: URL.") from None

    async def _get(self, url: str) -> bytes | str:
        """Return the content, or the place that it moved to."""
        target = self._allowed(url)
        backend = PublicBackend(url, self._resolve, self._check, self._seconds)
        context = self._context or ssl.create_default_context()
        headers: dict[bytes | str, bytes | str] = {
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": "ridgeline",
            "connection": "close",
        }
        async with (
            httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend, max_connections=1) as pool,
            pool.stream("GET", target, headers=headers) as answer,
        ):
            told = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
            if answer.status in MOVED and b"location" in told:
                return told[b"location"]
            if answer.status != 200:
                raise BadMedia(f"{_shown(url)} was answered with status {answer.status}; send one that has the file.")
            if told.get(b"content-encoding", "identity").lower() not in ("", "identity"):
                raise BadMedia(f"{_shown(url)} is sent compressed although it should not be; send its bytes.")
            length = told.get(b"content-length", "0")
            if length.isdecimal() and int(length[:20]) > self._most:
                raise self._too_long(url)
            found = bytearray()
            async for piece in answer.aiter_stream():
                found += piece
                if len(found) > self._most:
                    raise self._too_long(url)
            return bytes(found)

    def _allowed(self, url: str) -> httpcore.URL:
        """Return a URL that may be fetched. Raise BadMedia."""
        if not self._domains:
            raise BadMedia(
                f"{_shown(url)} is not fetched, because this server fetches no URLs (--allowed-media-domains); send "
                "the bytes as a data: URL."
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise BadMedia(f"{_shown(url)} is no URL; check how it is spelled.") from None
        if parts.scheme not in PORTS or not host:
            raise BadMedia(f"{_shown(url)} is no URL of http or https with a host; send such a one.")
        if parts.username is not None or parts.password is not None:
            raise BadMedia("the URL holds a name or password, which are not sent on; leave them out.")
        try:
            name = host.rstrip(".").lower().encode("idna" if not host.isascii() else "ascii").decode()
            target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
            path = target.encode("ascii" if target.isascii() else "utf-8")
        except UnicodeError:
            raise BadMedia(f"{_shown(url)} is no URL; check how it is spelled.") from None
        if not any(_covers(domain, name) for domain in self._domains):
            raise BadMedia(
                f"{_shown(url)} is of {name[:SHOWN]}, which is none of this server's --allowed-media-domains; send the "
                "bytes as a data: URL."
            )
        if any(byte <= 32 or byte == 127 for byte in path):
            raise BadMedia(f"{_shown(url)} holds spaces or control characters; encode them by %.")
        path = b"".join(bytes([byte]) if byte < 128 else b"%%%02X" % byte for byte in path)
        return httpcore.URL(scheme=parts.scheme, host=name, port=port or PORTS[parts.scheme], target=path)

    def _too_long(self, url: str) -> BadMedia:
        return BadMedia(f"{_shown(url)} has more than {self._most} bytes; send a smaller file.")

    # ---- file --------------------------------------------------------------------------------------------------------

    def _read(self, url: str) -> bytes:
        """Return a file below the folder. Each part of its path is opened by itself and may be no link, so what is
        changed meanwhile leads nowhere else."""
        if self._folder is None:
            raise BadMedia("file: URLs are not read by this server (--allowed-local-media-path); send a data: URL.")
        try:
            place = urlsplit(url)
        except ValueError:
            raise BadMedia(f"{_shown(url)} is no URL; check how it is spelled.") from None
        path, outside = unquote(place.path), BadMedia(f"{_shown(url)} is not below the folder that this server reads.")
        root = self._folder.rstrip("/") + "/"
        if place.netloc not in ("", "localhost") or "\0" in path or not path.startswith(root):
            raise outside
        names = path[len(root) :].split("/")
        if any(name in ("", ".", "..") for name in names):
            raise outside
        try:
            descriptor = _opened(self._folder, names)
        except OSError as error:
            reason = (
                "it is or lies behind a link"
                if error.errno in (errno.ELOOP, errno.ENOTDIR)
                else os.strerror(error.errno or 0)
            )
            raise BadMedia(f"{_shown(url)} cannot be read ({reason}); check the path.") from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise BadMedia(f"{_shown(url)} is no regular file; check the path.")
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(self._most + 1) if found.st_size <= self._most else b""
        if found.st_size > self._most or len(data) > self._most:
            raise self._too_long(url)
        return data


def _covers(domain: str, name: str) -> bool:
    return domain in (ANY, name) or (domain[:2] == "*." and name.endswith(domain[1:]))


def _opened(folder: str, names: Sequence[str]) -> int:
    """Return a descriptor of a file. Raise OSError, for links too."""
    *inner, last = names
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in inner:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        # a pipe without a writer must not block
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


# ---- data ------------------------------------------------------------------------------------------------------------


def from_data_url(url: str, most: int) -> bytes:
    """Return the bytes of a `data:` URL in base64. Its type means nothing. Raise BadMedia."""
    comma = url.find(",")
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise BadMedia("a data: URL has the form data:image/png;base64,…; send the bytes in base64.")
    return from_base64(url, most, comma + 1)


def from_base64(text: str, most: int, start: int = 0) -> bytes:
    """Return the bytes of base64, in which spaces and line ends mean nothing. start: where it begins in the text. Raise
    BadMedia.

    No call into the interpreter's own code takes the whole of a long text, since other threads wait meanwhile.
    """
    if (len(text) - start) // 4 * 3 > most + 3:
        raise BadMedia(f"the base64 text has more than {most} bytes decoded; send a smaller file.")
    found, left, ended = BytesIO(), "", False  # of which the bytes are taken without a copy
    try:
        for at in range(start, len(text), PIECE):
            piece = text[at : at + PIECE]
            if not left and not ended and (decoded := _plain(piece)) is not None:
                if len(piece) == len(text) - start:
                    return decoded
                found.write(decoded)
                ended = piece.endswith("=")
                continue
            piece = left + "".join(piece.split()).translate(_USUAL)
            if ended and piece:
                raise binascii.Error("padding within the text")
            whole = len(piece) // 4 * 4
            found.write(binascii.a2b_base64(piece[:whole], strict_mode=True))
            left, ended = piece[whole:], piece[:whole].endswith("=")
        found.write(binascii.a2b_base64(left, strict_mode=True))
    except (binascii.Error, ValueError):
        raise BadMedia("the bytes are no base64; check how they were encoded.") from None
    if found.tell() > most:
        raise BadMedia(f"the base64 text has more than {most} bytes decoded; send a smaller file.")
    return found.getvalue()


def _plain(piece: str) -> bytes | None:
    """Return the bytes of base64 without spaces and in its usual characters, in a quarter of binascii's time; None: it
    is not that, or msgspec is not installed. It takes less than binascii does, and what it takes means the same."""
    if _MSGSPEC is None:
        return None
    try:
        decoded: bytes = _MSGSPEC.convert(piece, bytes)
    except _MSGSPEC.ValidationError:
        return None
    return decoded


def begin_of(text: str, start: int, count: int) -> bytes:
    """Return the first `count` bytes or more of base64 that begins at `start`, or all of it. Raise BadMedia."""
    begin = "".join(text[start : start + 4 * count].split())
    return from_base64(begin[: len(begin) // 4 * 4], len(begin))


def _shown(url: str) -> str:
    return repr(url if len(url) <= SHOWN else url[: SHOWN - 1] + "…")
