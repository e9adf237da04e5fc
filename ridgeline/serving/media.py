"""Pictures, videos and sounds that clients send or name, as decoded items.

    reader = MediaReader(config)
    [picture] = await reader.read([MediaPart("image", "messages.0.content.1", url="data:image/png;base64,…")])

Files are fetched within the event loop, and all else happens in threads that owners share fairly: base64 is decoded
there, or an uploaded file is read, and the file is handed to a process that decodes it (`media.pool`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import ChainMap, Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from typing import Any, NamedTuple

from ridgeline.core.cores import available
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import Embeds
from ridgeline.core.settings.serving import KINDS_OF_MEDIA, ServeConfig
from ridgeline.kernels.base.sounds import RATE
from ridgeline.media.bounds import LONGEST, BadMedia, MediaBounds, kind_of
from ridgeline.media.fetch import MediaSources, begin_of, from_base64, from_data_url
from ridgeline.media.frames import DEFAULT, chosen
from ridgeline.media.items import Item, Picture
from ridgeline.media.layout import Processor, VideoProcessor
from ridgeline.media.pool import PATIENCE as FOR_MEMORY
from ridgeline.media.pool import Decoders, NoMemory
from ridgeline.media.vectors import MOST_FILE, vectors_of
from ridgeline.serving import owner
from ridgeline.serving.errors import BadRequest, RequestFailed
from ridgeline.serving.shares import Busy, Shares
from ridgeline.serving.stored.records import SHOWN_PURPOSES
from ridgeline.serving.stored.store import OFF, NoSuchEntry, Store

FEWEST, MOST = 4, 16  # processes: more than cores, so that one that is busy stops no other
PATIENCE, SECONDS = 30.0, 150.0  # to wait for a thread, and to decode
FETCHES, FETCHES_EACH = 16, 8  # at once, of all owners and of one
LONGEST_UUID = 128  # characters
NAMED = 1 << 16  # uuids whose bytes are known by their hash
KEPT_BYTES = 256 << 20  # of files that a uuid alone may name
RETRY_AFTER = 2  # seconds
WHITE = (255, 255, 255)
LARGE = 1 << 21  # pixels that take a CPU some 40 ms of a step


class MediaPart(NamedTuple):
    """A part of a message.

    kind: image, video or audio. path: its place in the body. url, base64: one of them, or neither where the uuid names
    a file that was sent before. file: the id of an uploaded one. vectors: the file holds what a tower made of it.
    """

    kind: str
    path: str
    url: str | None = None
    base64: str | None = None
    uuid: str | None = None
    vectors: bool = False
    file: str | None = None


class MediaUnsupported(RequestFailed):
    """The packages that decode are not installed."""

    status, kind, code = 501, "not_implemented_error", "media_not_installed"


class MediaReader:
    """The reader of all models of an API server."""

    def __init__(self, config: ServeConfig, files: Store | None = None) -> None:
        """files: those that clients uploaded, or None where they cannot."""
        share = config.api_server_count
        processes = config.media_processes or min(max(available() // share, FEWEST), MOST)
        bounds = MediaBounds(held=max(config.max_media_bytes // share, 1))
        self._config, self._bounds, self._processes, self._files = config, bounds, processes, files
        self._decoders = Decoders(bounds, processes)
        self._threads = Shares(
            max(processes, 2), "media", patience=PATIENCE, seconds=SECONDS, held=max(1, processes // 2)
        )
        self._sources = MediaSources(
            domains=config.allowed_media_domains, folder=config.allowed_local_media_path, most=bounds.file_bytes
        )
        self._turns, self._named = _Turns(), NamedFiles()

    def warm(self) -> None:
        """Start the processes, without waiting for them: their start would keep the first clients waiting."""
        if _installed():
            self._decoders.warm(self._processes)

    async def read(
        self,
        parts: Sequence[MediaPart],
        *,
        salt: str = "",
        processor: Processor | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        on_cpu: bool = False,
    ) -> list[Item]:
        """Return the items of parts, in their order. Raise BadRequest, Busy, MediaUnsupported.

        salt: the request's, under which uuids are known. processor: the one that chooses a video's frames. options: a
        request's `media_io_kwargs`. on_cpu: the model's device is a CPU, where a step would take long to resize large
        pictures, so it is done here.
        """
        if not _installed() and not all(part.vectors for part in parts):
            raise MediaUnsupported('pictures, video and sound need `pip install "ridgeline[media]"` on the server.')
        self._check_counts(parts)
        sources: tuple[Mapping[str, Any], ...] = (self._config.media_io_kwargs or {}, options or {})
        settings = {kind: dict(ChainMap(*(each.get(kind, {}) for each in sources[::-1]))) for kind in KINDS_OF_MEDIA}
        decode = _decoding(self._decoders, settings, processor, owner.current(), on_cpu)
        tasks = [asyncio.ensure_future(self._item(part, salt, decode)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def kinds(self, parts: Sequence[MediaPart], taken: Collection[str]) -> list[str]:
        """Return the kinds of parts that bring a file of any of these kinds: each is what its first bytes say. Raise
        BadRequest for another file, and NoSuchEntry."""

        def kind(part: MediaPart) -> str:
            try:
                return kind_of(self._begin(part), taken)
            except BadMedia as error:
                raise BadRequest(f"{part.path}: {error}", param=part.path) from None

        return await self._threads.run(lambda: [kind(part) for part in parts])

    def _begin(self, part: MediaPart) -> bytes:
        if part.file is not None:
            return self._stored(part, LONGEST)
        text = part.base64 or part.url or ""
        return begin_of(text, 0 if part.url is None else text.find(",") + 1, LONGEST)

    def _stored(self, part: MediaPart, most: int | None = None) -> bytes:
        """Return an uploaded file, or its first `most` bytes. Raise BadRequest, NoSuchEntry."""
        assert part.file is not None
        path = f"{part.path}.file_id"
        if self._files is None:
            raise BadRequest(OFF, param=path)
        try:
            found, content = self._files.opened(part.file, owner.tenant())
        except NoSuchEntry as error:
            raise NoSuchEntry(f"{part.path}: {error}", param=path) from None
        with content:
            if found.purpose not in SHOWN_PURPOSES:
                purposes = " or ".join(SHOWN_PURPOSES)
                raise BadRequest(f"{part.path}: the file's purpose is {found.purpose}, not {purposes}.", param=path)
            return content.read(min(found.bytes, self._bounds.file_bytes + 1 if most is None else most))

    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        counts = Counter(part.kind for part in parts)
        for kind, count in counts.items():
            if count > (most := self._config.most_media(kind)):
                path = [part.path for part in parts if part.kind == kind][most]
                message = f"the request has {count} parts of {kind}, of at most {most} (--limit-mm-per-prompt)."
                raise BadRequest(message, param=path)

    async def _item(self, part: MediaPart, salt: str, decode: Callable[[str, bytes], Item]) -> Item:
        try:
            if part.url is None or part.url[:5].lower() == "data:":
                return await self._threads.run(partial(self._decoded, part, salt, decode, None))
            async with self._turns.turn(owner.current()):  # until it is decoded, so that few files wait
                data = await self._sources.bytes_of(part.url)
                return await self._threads.run(partial(self._decoded, part, salt, decode, data))
        except BadMedia as error:
            raise BadRequest(f"{part.path}: {error}", param=part.path) from None
        except NoMemory as error:
            raise Busy(f"{error}; try again later.", retry_after=RETRY_AFTER) from None

    def _decoded(self, part: MediaPart, salt: str, decode: Callable[[str, bytes], Item], data: bytes | None) -> Item:
        most, key = MOST_FILE if part.vectors else self._bounds.file_bytes, (owner.tenant(), salt, part.uuid or "")
        if data is None and part.url is not None:
            data = from_data_url(part.url, most)
        elif data is None and part.base64 is not None:
            data = from_base64(part.base64, most)
        elif data is None and part.file is not None:
            data = self._stored(part)
            if len(data) > most:
                raise BadMedia(f"the file has more than {most} bytes; send a smaller one.")
        if data is None:
            data = self._named.find(key)
        elif part.uuid is not None:
            self._named.bind(key, data)
        if not part.vectors:
            return decode(part.kind, data)
        found = vectors_of(part.kind, data)
        self.count(found.embeds, FOR_MEMORY)
        return found

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return True if vectors of so many bytes ever are there at once, those of one request."""
        return self._decoders.room.holds(sizes)

    def count(self, embeds: Embeds, patience: float = 0.0) -> None:
        """Count the vectors of a request among decoded items, for as long as it is there. Raise BadMedia, NoMemory."""
        self._decoders.room.count(embeds, len(embeds.data), owner.current(), patience)


def _decoding(
    decoders: Decoders,
    settings: Mapping[str, Mapping[str, Any]],
    processor: Processor | None,
    owned: str,
    on_cpu: bool,
) -> Callable[[str, bytes], Item]:
    """Return the function from a kind and a file to an item."""
    background = _color(settings["image"].get("rgba_background_color", WHITE))
    frames = _number(settings["video"], "num_frames", DEFAULT)
    fps = _number(settings["video"], "fps", -1)
    mode = settings["image"].get("image_mode", "RGB")
    if mode != "RGB":
        raise BadRequest("media_io_kwargs.image.image_mode may be RGB alone.", param="media_io_kwargs")

    def choose(total: int, rate: float) -> Sequence[int]:
        if isinstance(processor, VideoProcessor) and not {"num_frames", "fps"} & settings["video"].keys():
            return processor.chosen(total, rate)
        return chosen(total, rate, int(frames), fps)

    def decode(kind: str, data: bytes) -> Item:
        if kind == "image":
            found = decoders.picture(data, background=background, owner=owned)
            return _ready(decoders, found, processor, owned) if on_cpu and processor is not None else found
        if kind == "video":
            return decoders.clip(data, choose, owner=owned)
        return decoders.sound(data, rate=RATE, owner=owned)

    return decode


def _ready(decoders: Decoders, found: Picture, processor: Processor, owned: str) -> Picture:
    """Return a large picture with what the model sees of it, if that is all of it in another size."""
    height, width, _ = found.pixels_HWC.shape
    if height * width < LARGE:
        return found
    try:
        view = processor.layout(height, width).whole
    except InvalidRequest:  # which the request will be told
        return found
    if view is None or view.height * view.width >= height * width:
        return found
    return decoders.resized(found, view.height, view.width, processor.patching.filter, owned)


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value < 1 << 20:
        message = f"media_io_kwargs.video.{name} is a number from -1, got {value!r:.100}."
        raise BadRequest(message, param="media_io_kwargs")
    return value


def _color(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or len(value) != 3 or any(type(each) is not int for each in value):
        raise BadRequest("rgba_background_color is three whole numbers from 0 to 255.", param="media_io_kwargs")
    if not all(0 <= each <= 255 for each in value):
        raise BadRequest("rgba_background_color is three whole numbers from 0 to 255.", param="media_io_kwargs")
    return list(value)


def _installed() -> bool:
    return find_spec("PIL") is not None and find_spec("av") is not None


class _Turns:
    """The right to fetch, of which there are few, and one owner has at most half."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(FETCHES)
        self._each: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. Raise Busy if none comes in time."""
        own, users = self._each.setdefault(name, (asyncio.Semaphore(FETCHES_EACH), []))
        users.append(None)
        try:
            try:
                async with asyncio.timeout(PATIENCE):
                    await own.acquire()
                    try:
                        await self._all.acquire()
                    except BaseException:
                        own.release()
                        raise
            except TimeoutError:
                raise Busy("too many URLs wait to be fetched; try again later.", retry_after=RETRY_AFTER) from None
            try:
                yield
            finally:
                self._all.release()
                own.release()
        finally:
            users.pop()
            if not users:
                self._each.pop(name, None)


class NamedFiles:
    """The files that clients gave uuids. A uuid belongs to a tenant and a salt, and to the bytes first seen. Those that
    were not used for longest are forgotten, their bytes first."""

    def __init__(self, most: int = NAMED, most_bytes: int = KEPT_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._digests: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._files: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()  # threads bind and find

    def bind(self, key: tuple[str, str, str], data: bytes) -> None:
        """Keep a file. Raise BadMedia if its uuid belongs to other bytes."""
        digest = sha256(data).digest()
        with self._lock:
            if self._digests.setdefault(key, digest) != digest:
                raise BadMedia(f"the uuid {key[2]!r} belongs to other bytes; give each file a uuid of its own.")
            self._digests.move_to_end(key)
            if len(self._digests) > self._most:
                self._digests.popitem(last=False)
            if key not in self._files and len(data) <= self._most_bytes // 4:
                self._files[key] = data
                self._size += len(data)
                while self._size > self._most_bytes:
                    self._size -= len(self._files.popitem(last=False)[1])

    def find(self, key: tuple[str, str, str]) -> bytes:
        """Return the file of a uuid. Raise BadMedia if it is not kept."""
        with self._lock:
            if (data := self._files.get(key)) is None:
                raise BadMedia(f"no file is kept for the uuid {key[2]!r}; send its bytes with it.")
            self._files.move_to_end(key)
            return data
