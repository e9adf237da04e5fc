"""Prompts with pictures and videos: the places of their vectors among the tokens.

A processor's marker stands in a text where a picture goes. In a conversation only the template writes markers: a text
of a message that spells one stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import PLACEHOLDER as UNKNOWN
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.media.items import Clip, Item, Picture
from ridgeline.media.layout import Layout, Processor, VideoProcessor
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.pooled import Encoded
from ridgeline.text.tokenizer import Tokenizer

KEY_BYTES = 16


class MediaPrompt(NamedTuple):
    """text: with the pieces of each picture, and one placeholder for each run of vectors.

    token_ids: with the placeholder's id in each place of a vector.
    """

    text: str
    token_ids: list[int]
    inserted: tuple[Inserted, ...]


@dataclass(frozen=True)
class Placed:
    """An item with its place in prompts. layout: what stands in the prompt. shown: what the tower sees."""

    layout: Layout
    shown: ShownPictures
    key: bytes

    @property
    def runs(self) -> list[int]:
        """The number of vectors of each run."""
        return [piece for piece in self.layout.pieces if isinstance(piece, int)]

    def inserted(self, run: int, start: int) -> Inserted:
        """Return the vectors of a run that begins at this token."""
        grids, runs = self.layout.grids, self.runs
        return Inserted(
            start=start,
            count=runs[run],
            key=self.key,
            name=self.key.hex(),
            first=sum(runs[:run]),
            shown=self.shown,
            grid=grids[run] if grids else None,
            interval=self.layout.interval,
        )


def prompt_with(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    processor: Processor,
    messages: Sequence[Mapping[str, Any]],
    items: Sequence[Item],
    *,
    open_ended: bool = False,
    **options: Any,
) -> MediaPrompt:
    """Return a conversation as a prompt. Parts {"type": "image"} and {"type": "video"} of messages stand for the items,
    in their order. options: as `ChatTemplate.render` takes them. open_ended: the last message is gone on with.

    Raise InvalidRequest.
    """
    marks = {spelled: f"\ue000{token_hex(8)}\ue001" for spelled in _spellings(processor)}
    hidden = [_hidden(message, marks) for message in messages]
    text = (template.render_open if open_ended else template.render)(hidden, **options)
    return _encoded(text, tokenizer, processor, items, marks, add_special_tokens=False)


def expanded(
    text: str, tokenizer: Tokenizer, processor: Processor, items: Sequence[Item], *, add_special_tokens: bool = True
) -> MediaPrompt:
    """Return a text whose markers stand for the items, in their order, as a prompt. Raise InvalidRequest."""
    return _encoded(text, tokenizer, processor, items, {}, add_special_tokens=add_special_tokens)


def expanded_ids(
    token_ids: Sequence[int], tokenizer: Tokenizer, processor: Processor, items: Sequence[Item]
) -> MediaPrompt:
    """Return token ids, in which the id of a marker stands for each of the items, as a prompt. Raise InvalidRequest."""
    each = placed_items(processor, items)
    marker = tokenizer.encode(processor.marker, add_special_tokens=False)
    if len(marker) != 1:
        raise InvalidRequest(
            f"the marker of pictures, {processor.marker!r}, is no single token; give the prompt as text.",
            param="prompt",
        )
    ids, parts, inserted = list[int](), iter(each), list[Inserted]()
    count = sum(token == marker[0] for token in token_ids)
    _check_count(count, len(each), processor.marker)
    for token in token_ids:
        if token != marker[0]:
            ids.append(token)
            continue
        own, run = next(parts), 0
        for piece in own.layout.pieces:
            if isinstance(piece, str):
                ids += tokenizer.encode(piece, add_special_tokens=False)
                continue
            inserted.append(own.inserted(run, len(ids)))
            ids += [_placeholder_id(tokenizer, processor)] * piece
            run += 1
    return MediaPrompt("", ids, tuple(inserted))


def lone_picture(processor: Processor, items: Sequence[Item]) -> Encoded:
    """Return the prompt of a picture that a tower embeds by itself: one placeholder. Raise InvalidRequest."""
    if len(items) != 1:
        raise InvalidRequest(
            f"each picture is embedded by itself here, and this prompt has {len(items)}; give each its own prompt.",
            param="multi_modal_data",
        )
    [own] = placed_items(processor, items)
    place = Inserted(start=0, count=1, key=own.key, name=own.key.hex(), shown=own.shown)
    return Encoded([UNKNOWN], inserted=(place,))


def placed_items(processor: Processor, items: Sequence[Item]) -> list[Placed]:
    """Return the items with their places. Raise InvalidRequest for one that the model does not take."""
    pictures = [index for index, item in enumerate(items) if isinstance(item, Picture)]
    place = {index: number for number, index in enumerate(pictures)}
    return [_placed(processor, item, len(pictures), place.get(index, 0)) for index, item in enumerate(items)]


def _placed(processor: Processor, item: Item, pictures: int, index: int) -> Placed:
    if isinstance(item, Picture):
        height, width, _ = item.pixels_HWC.shape
        frames: tuple[Pixels, ...] = (Pixels(height, width, item.pixels_HWC.tobytes()),)
        layout = processor.layout(height, width, pictures, index)
    elif isinstance(item, Clip) and isinstance(processor, VideoProcessor):
        _, height, width, _ = item.frames_FHWC.shape
        chosen = processor.chosen(len(item.frames_FHWC), item.fps)
        frames = tuple(Pixels(height, width, item.frames_FHWC[index].tobytes()) for index in chosen)
        layout = processor.video([float(item.times_F[index]) for index in chosen], height, width)
    else:
        kind = "videos" if isinstance(item, Clip) else "sounds"
        raise InvalidRequest(f"this model takes no {kind}; leave them out.", param="messages")
    shown = ShownPictures(frames, layout.views, processor.patching, layout.order, layout.shrunk)
    told = repr((layout.views, layout.order, layout.shrunk, layout.grids, layout.interval, processor.patching))
    return Placed(layout, shown, sha256(item.digest + told.encode()).digest()[:KEY_BYTES])


def _encoded(
    text: str,
    tokenizer: Tokenizer,
    processor: Processor,
    items: Sequence[Item],
    marks: Mapping[str, str],
    *,
    add_special_tokens: bool,
) -> MediaPrompt:
    each = placed_items(processor, items)
    video = processor.video_marker if isinstance(processor, VideoProcessor) else None
    markers = [processor.marker] if video is None else [processor.marker, video]
    wanted = [video if isinstance(item, Clip) else processor.marker for item in items]
    found = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True)))).findall(text)
    _check_count(len(found), len(each), processor.marker)
    if found != wanted:
        raise InvalidRequest("pictures and videos come in another order than their markers.", param="prompt")
    filled = _filled(text, markers, each, processor.placeholder)
    ids = list[int]()
    for index, part in enumerate(_parts(filled, marks)):
        spelled = part if part in marks else None
        if spelled is not None:  # apart, so that no special token is found in it
            ids += tokenizer.encode(spelled[:1], add_special_tokens=False)
            ids += tokenizer.encode(spelled[1:], add_special_tokens=False)
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=add_special_tokens and index == 0)
    shown = filled
    for spelled, mark in marks.items():
        shown = shown.replace(mark, spelled)
    return _with_runs(shown, ids, each, _placeholder_id(tokenizer, processor))


def _filled(text: str, markers: Sequence[str], each: Sequence[Placed], placeholder: str) -> str:
    """Return the text with the pieces of each item in the place of its marker, and one placeholder for each run."""
    parts = iter(each)

    def pieces(match: re.Match[str]) -> str:
        return "".join(piece if isinstance(piece, str) else placeholder for piece in next(parts).layout.pieces)

    return re.sub("|".join(map(re.escape, sorted(markers, key=len, reverse=True))), pieces, text)


def _with_runs(text: str, ids: Sequence[int], each: Sequence[Placed], placeholder: int) -> MediaPrompt:
    """Return a prompt in which each placeholder has become as many as its run has vectors."""
    runs = [(own, run, count) for own in each for run, count in enumerate(own.runs)]
    if sum(token == placeholder for token in ids) != len(runs):
        raise InvalidRequest(
            "the prompt spells the placeholder of pictures where no picture goes; leave it out.", param="prompt"
        )
    following, whole, inserted = iter(runs), list[int](), list[Inserted]()
    for token in ids:
        if token != placeholder:
            whole.append(token)
            continue
        own, run, count = next(following)
        inserted.append(own.inserted(run, len(whole)))
        whole += [placeholder] * count
    return MediaPrompt(text, whole, tuple(inserted))


def _placeholder_id(tokenizer: Tokenizer, processor: Processor) -> int:
    return tokenizer.added.get(processor.placeholder, UNKNOWN)


def _parts(text: str, marks: Mapping[str, str]) -> Iterator[str]:
    """Yield the text's parts between marks, and what each mark stands for."""
    if not marks:
        yield text
        return
    spelled = {mark: each for each, mark in marks.items()}
    for part in re.split("(" + "|".join(map(re.escape, spelled)) + ")", text):
        yield spelled.get(part, part)


def _spellings(processor: Processor) -> list[str]:
    """Return the texts that mean a picture if they stand in a prompt, the longest first."""
    found = {processor.marker, processor.placeholder}
    if isinstance(processor, VideoProcessor):
        found.add(processor.video_marker)
    return sorted(found, key=len, reverse=True)


def _hidden(message: Any, marks: Mapping[str, str]) -> Any:
    """Return a message, or a part of one, with marks in place of texts that would mean a picture."""
    hide: Callable[[str], str] = lambda text: re.sub(  # noqa: E731
        "|".join(map(re.escape, marks)), lambda match: marks[match[0]], text
    )
    if isinstance(message, str):
        return hide(message)
    if isinstance(message, Mapping):
        return {name: _hidden(value, marks) for name, value in message.items()}
    if isinstance(message, (list, tuple)):
        return [_hidden(part, marks) for part in message]
    return message


def _check_count(markers: int, items: int, marker: str) -> None:
    if markers != items:
        raise InvalidRequest(
            f"the prompt has {markers} places for pictures ({marker!r}), and there are {items}; give as many.",
            param="multi_modal_data",
        )
