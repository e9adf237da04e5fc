"""Pictures, videos and sounds that a caller of the offline API has in memory or in files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidRequest
from ridgeline.kernels.base.sounds import RATE
from ridgeline.media.bounds import MediaBounds
from ridgeline.media.fetch import from_data_url
from ridgeline.media.frames import chosen
from ridgeline.media.items import Clip, HeardVectors, Item, Picture, SeenVectors, Sound, clip, picture, sound
from ridgeline.media.layout import Processor, VideoProcessor
from ridgeline.media.pool import Decoders, NoMemory
from ridgeline.offline.embeds import is_vectors, vectors_given
from ridgeline.text.arguments import short
from ridgeline.text.media_folder import FolderProcessors
from ridgeline.text.requests import check_media_width
from ridgeline.text.sounds import samples_of

KINDS = ("image", "video", "audio")
# Types of a message's parts, and their kinds. The field of the same name holds what they bring.
PARTS = {"image": "image", "image_pil": "image", "image_url": "image", "video": "video", "video_url": "video"}
PARTS |= {"audio": "audio", "audio_url": "audio", "image_embeds": "image", "audio_embeds": "audio"}
NAMED = {Picture: "image", Clip: "video", Sound: "audio", SeenVectors: "image", HeardVectors: "audio"}
_OPENING = threading.Lock()  # threads read at the same time, and have one pool of processes
SETTINGS = ("limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs")  # of LLM(…)


@dataclass(frozen=True)
class CallersMedia:
    """The reader of what callers bring.

    processors: those of the model. most: items of a prompt, by kind. reading: settings of decoding by kind
    (`media_io_kwargs`). widths: the numbers of a vector of a picture, and of a sound, which may come as vectors; 0:
    they may not.
    """

    processors: FolderProcessors | None = None
    most: Mapping[str, int] = field(default_factory=dict)
    reading: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    widths: tuple[int, int] = (0, 0)

    def processor(self, options: object = None) -> Processor:
        """Return the processor with a prompt's `mm_processor_kwargs`. Raise InvalidRequest if there is none."""
        if self.processors is None:
            raise InvalidRequest("this model sees no pictures; leave them out.", param="multi_modal_data")
        return self.processors.adjusted(options)

    def items_of(self, data: Any, processor: Processor) -> list[Item]:
        """Return a prompt's `multi_modal_data` as items, as `read` does. Raise InvalidRequest."""
        return [item for items in self.read(data, processor).values() for item in items]

    def read(self, data: Any, processor: Processor) -> dict[str, list[Item]]:
        """Return a prompt's `multi_modal_data` with items in it: {"image": one picture or a list of them}, {"video":
        …}, {"audio": …}. Raise InvalidRequest."""
        if not isinstance(data, Mapping) or any(kind not in KINDS for kind in data):
            raise InvalidRequest(
                f"multi_modal_data is {{'image': a picture or a list of them, 'video': …, 'audio': …}}, got "
                f"{short(data)}.",
                param="multi_modal_data",
            )
        found = dict[str, list[Item]]()
        for kind, given in data.items():
            several = isinstance(given, list) and not (kind == "video" and _is_frames(given))
            several = several or (isinstance(given, tuple) and not _is_item(given) and kind == "image")
            found[kind] = [self.item(kind, each, processor) for each in (given if several else [given])]
        self._check([item for items in found.values() for item in items])
        return found

    def item(self, kind: str, value: Any, processor: Processor) -> Item:
        """Return a picture, a video or a sound as an item. Raise InvalidRequest."""
        if is_vectors(kind, value):
            found = vectors_given(kind, value)
            check_media_width(found, self.widths[kind == "audio"], "multi_modal_data")
            return found
        if isinstance(value, Sound) and value.rate != RATE:
            value = value.samples_N, value.rate
        if _is_item(value):
            item: Item = value
            return item
        if isinstance(value, (str, Path, bytes)):
            return self._decoded(kind, value, processor)
        if kind == "audio":
            return sound(samples_of(value), RATE)
        return _picture(value) if kind == "image" else _clip(value, processor)

    def with_items(self, messages: Sequence[Any], processor: Processor | None) -> tuple[Sequence[Any], list[Item]]:
        """Return messages with {"type": "image"}, {"type": "video"} or {"type": "audio"} in place of parts that hold
        such, and these: parts {"type": "image", "image": a picture}, {"type": "video", "video": a video}, {"type":
        "audio", "audio": a sound}, and those of servers with `data:` URLs. Raise InvalidRequest."""
        items = list[Item]()

        def mark(kind: str, item: Item) -> dict[str, Any]:
            items.append(item)
            return {"type": kind}

        found = self._parts(messages, processor, mark)
        self._check(items)
        return found, items

    def opened(self, messages: Sequence[Any], processor: Processor | None) -> Sequence[Any]:
        """Return messages with items in their parts, {"type": "image", "image": an item} and so on, which `with_items`
        takes at once. Raise InvalidRequest."""
        return self._parts(messages, processor, lambda kind, item: {"type": kind, kind: item})

    def _parts(
        self, messages: Sequence[Any], processor: Processor | None, put: Callable[[str, Item], dict[str, Any]]
    ) -> Sequence[Any]:
        """Return messages with what `put` makes of each part's kind and item in its place."""

        def part(value: Any) -> Any:
            name = value.get("type") if isinstance(value, Mapping) else None
            if name not in PARTS or name not in value:
                return value
            given = value[name]
            if name.endswith("_url"):
                given = _from_url(given.get("url") if isinstance(given, Mapping) else given)
            return put(PARTS[name], self.item(PARTS[name], given, processor or self.processor()))

        def message(value: Any) -> Any:
            if not isinstance(value, Mapping) or not isinstance(value.get("content"), list):
                return value
            return {**value, "content": [part(each) for each in value["content"]]}

        if not isinstance(messages, (list, tuple)):
            return messages  # the template says what is wrong
        return [message(each) for each in messages]

    def _check(self, items: Sequence[Item]) -> None:
        counts = Counter(NAMED[type(item)] for item in items)
        for kind, count in counts.items():
            if count > (most := self.most.get(kind, count)):
                raise InvalidRequest(
                    f"the prompt has {count} items of {kind}, of at most {most} (limit_mm_per_prompt).",
                    param="multi_modal_data",
                )

    @property
    def _decoders(self) -> Decoders:
        with _OPENING:
            return self._opened

    @cached_property
    def _opened(self) -> Decoders:
        return Decoders(MediaBounds())

    def _decoded(self, kind: str, file: str | Path | bytes, processor: Processor) -> Item:
        """Return a file as an item, decoded as servers do it. Raise InvalidRequest, also where items that are still
        held take all the memory for decoded ones."""
        if not isinstance(file, bytes):
            try:
                file = Path(file).read_bytes()
            except (OSError, ValueError) as error:
                raise InvalidRequest(
                    f"{short(str(file))} cannot be read ({error}).", param="multi_modal_data"
                ) from None
        try:
            return self._item_of(kind, file, processor)
        except NoMemory as error:
            raise InvalidRequest(f"{error}; give fewer files at a time.", param="multi_modal_data") from None

    def _item_of(self, kind: str, file: bytes, processor: Processor) -> Item:
        settings = self.reading.get(kind, {})
        if kind == "image":
            return self._decoders.picture(file, background=settings.get("rgba_background_color", (255, 255, 255)))

        if kind == "audio":
            return self._decoders.sound(file, rate=RATE)

        def choose(total: int, rate: float) -> Sequence[int]:
            if isinstance(processor, VideoProcessor) and not {"num_frames", "fps"} & settings.keys():
                return processor.chosen(total, rate)
            return chosen(total, rate, **{name: settings[name] for name in ("num_frames", "fps") if name in settings})

        return self._decoders.clip(file, choose)


def callers_media(
    options: Mapping[str, Any], processors: FolderProcessors | None, widths: tuple[int, int] = (0, 0)
) -> CallersMedia:
    """Return the reader by the arguments of `LLM` that are `SETTINGS`. Raise InvalidRequest."""
    limits, reading = options.get("limit_mm_per_prompt") or {}, options.get("media_io_kwargs") or {}
    most = {kind: each.get("count", 1 << 16) if isinstance(each, Mapping) else each for kind, each in limits.items()}
    for kind, count in most.items():
        if kind not in KINDS or isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidRequest(
                f"limit_mm_per_prompt holds whole numbers for image, video and audio, got {short(limits)}.",
                param="limit_mm_per_prompt",
            )
    return CallersMedia(processors, most, reading, widths)


def _picture(value: Any) -> Picture:
    """Return a PIL image, an array or a tensor [height, width, 3] of uint8 as an item."""
    array = _pixels(value)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or not array.size:
        raise InvalidRequest(
            f"a picture is a PIL image or an array [height, width, 3] of uint8, got {array.dtype} "
            f"{list(array.shape)}; convert it.",
            param="multi_modal_data",
        )
    return picture(array)


def _clip(value: Any, processor: Processor) -> Clip:
    """Return frames, or (frames, metadata), as an item. Frames are an array [frames, height, width, 3] of uint8 or a
    list of pictures. metadata: "fps", and "total_num_frames" and "frames_indices" if the frames were chosen already. If
    not, they are chosen here as those of a file are. Without metadata all are seen, as many a second as the processor
    chooses."""
    frames, told = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(frames, (list, tuple)):
        pictures = [_pixels(each) for each in frames]
        frames = np.stack(pictures) if len({each.shape for each in pictures}) == 1 else np.empty(0)
    array = np.asarray(frames)
    if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8 or not array.size:
        raise InvalidRequest(
            f"a video is an array [frames, height, width, 3] of uint8, or a list of pictures of one size, got "
            f"{array.dtype} {list(array.shape)}; convert it.",
            param="multi_modal_data",
        )
    if not isinstance(processor, VideoProcessor):
        raise InvalidRequest("this model takes no videos; leave them out.", param="multi_modal_data")
    if told is None:
        return clip(array, np.arange(len(array)) / processor.video_rate, processor.video_rate)
    fps, total, indices = _told(told, len(array), processor.video_rate)
    if told.get("do_sample_frames", processor.samples) and total == len(array):
        seen = list(processor.chosen(len(array), fps))
        array, indices = array[seen], [indices[each] for each in seen]
    return clip(array, np.array(indices) / fps, fps, total)


def _told(metadata: Any, frames: int, rate: float) -> tuple[float, int, list[int]]:
    """Return the frames a second of a video, the number of all of them, and the numbers of those that are given."""
    if isinstance(metadata, Mapping):
        fps, total = metadata.get("fps") or rate, metadata.get("total_num_frames") or frames
        given = metadata.get("frames_indices")
        indices = [int(each) for each in (range(frames) if given is None else given)]
        number = isinstance(fps, (int, float)) and isinstance(total, int) and fps > 0
        if number and len(indices) == frames and 0 <= min(indices) <= max(indices) < total:
            return float(fps), total, indices
    raise InvalidRequest(
        f"a video's metadata has fps, and frames_indices of its {frames} frames below total_num_frames, got "
        f"{short(metadata)}.",
        param="multi_modal_data",
    )


def _pixels(value: Any) -> np.ndarray:
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # of PIL, which need not be there
        value = value.convert("RGB")
    return np.asarray(value)


def _is_frames(value: Sequence[Any]) -> bool:
    """Return True if a list is the frames of one video, rather than videos."""
    return (
        bool(value) and not _is_item(value[0]) and (hasattr(value[0], "getbands") or getattr(value[0], "ndim", 0) == 3)
    )


def _from_url(url: Any) -> bytes:
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise InvalidRequest(
            f"URLs of parts are data: URLs here, got {short(url)}; read the file, and give its path or bytes as "
            '{"type": "image", "image": …}.',
            param="messages",
        )
    return from_data_url(url, MediaBounds().file_bytes)


def _is_item(value: object) -> bool:
    return isinstance(value, (Picture, Clip, Sound, SeenVectors, HeardVectors))
