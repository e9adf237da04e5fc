"""Prompts with pictures, videos and sounds: the places of their vectors among the tokens.

A processor's marker stands in a text where a picture goes. In a conversation only the template writes markers: a text
of a message that spells one stays text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from secrets import token_hex
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import PLACEHOLDER as UNKNOWN
from ridgeline.core.plan.embeds import Embeds, Inserted
from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.media.items import Clip, HeardVectors, Item, Picture, SeenVectors, Sound
from ridgeline.media.layout import Layout, Processor, ReadingProcessor, SoundProcessor, VideoProcessor
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.pooled import Encoded
from ridgeline.text.tokenizer import Tokenizer

MOST_PLACES = 1 << 21  # tokens that items may stand for, before anybody asks for the context
NAMES = {Picture: "pictures", Clip: "videos", Sound: "sounds"}
KIND: dict[type[Item], type[Item]] = {SeenVectors: Picture, HeardVectors: Sound}  # what vectors stand for
LONGEST = 1 << 24  # samples of a sound whose vectors are counted, far beyond what any model hears


class MediaPrompt(NamedTuple):
    """text: with the pieces of each picture, and one placeholder for each run of vectors.

    token_ids: with the placeholder's id in each place of a vector.
    """

    text: str
    token_ids: list[int]
    inserted: tuple[Inserted, ...]


@dataclass(frozen=True)
class Placed:
    """An item with its place in prompts.

    layout: what stands in the prompt.
    seen: what the tower sees, or the listener hears, with its key: of all runs together, or of each, so that no step
        needs all of a video.
    placeholder: the text in the place of each run.
    embeds: the vectors, if they were made elsewhere; then `seen` has a key alone.
    """

    layout: Layout
    seen: tuple[tuple[ShownPictures | HeardSound | None, bytes], ...]
    placeholder: str
    embeds: Embeds | None = None

    @property
    def runs(self) -> list[int]:
        """The number of vectors of each run."""
        return [piece for piece in self.layout.pieces if isinstance(piece, int)]

    def stands_for(self, placeholder: int) -> int:
        """Return the id in the place of a vector. That of a picture which layers of cross attention see may lie behind
        the vocabulary."""
        return UNKNOWN if self.layout.across else placeholder

    def inserted(self, run: int, start: int) -> Inserted:
        """Return the vectors of a run that begins at this token."""
        grids, runs = self.layout.grids, self.runs
        apart = len(self.seen) > 1
        shown, key = self.seen[run if apart else 0]
        first = 0 if apart else sum(runs[:run])
        return Inserted(
            start=start,
            count=runs[run],
            key=key,
            embeds=None if self.embeds is None else self.embeds[first : first + runs[run]],
            name="" if self.embeds is not None else key.hex(),
            first=first,
            shown=shown if isinstance(shown, ShownPictures) else None,
            heard=shown if isinstance(shown, HeardSound) else None,
            grid=grids[run] if grids else None,
            interval=self.layout.interval,
            across=self.layout.across,
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
    """Return a text whose markers stand for the items, those of a kind in their order, as a prompt. Raise
    InvalidRequest."""
    return _encoded(text, tokenizer, processor, items, {}, add_special_tokens=add_special_tokens)


def expanded_ids(
    token_ids: Sequence[int], tokenizer: Tokenizer, processor: Processor, items: Sequence[Item]
) -> MediaPrompt:
    """Return token ids, in which the id of a marker stands for each of the items, as a prompt. Raise InvalidRequest."""
    marked = {tuple(tokenizer.encode(marker, add_special_tokens=False)): marker for marker in _markers(processor)}
    if any(len(marker) != 1 for marker in marked):
        raise InvalidRequest(
            f"the marker of pictures, {processor.marker!r}, is no single token; give the prompt as text.",
            param="prompt",
        )
    found = [marked[token,] for token in token_ids if (token,) in marked]
    text = ""
    if items and isinstance(processor, ReadingProcessor):
        text = tokenizer.decode([token for token in token_ids if (token,) not in marked])
    each = placed_items(processor, _ordered(found, items, processor), text)
    ids, parts, inserted = list[int](), iter(each), list[Inserted]()
    for token in token_ids:
        if (token,) not in marked:
            ids.append(token)
            continue
        own, run = next(parts), 0
        for piece in own.layout.pieces:
            if isinstance(piece, str):
                ids += tokenizer.encode(piece, add_special_tokens=False)
                continue
            inserted.append(own.inserted(run, len(ids)))
            ids += [own.stands_for(_id(tokenizer, own.placeholder))] * piece
            run += 1
    return MediaPrompt("", ids, tuple(inserted))


def lone_picture(processor: Processor, items: Sequence[Item]) -> Encoded:
    """Return the prompt of a picture, or a sound, that is embedded by itself: one placeholder. Raise InvalidRequest."""
    if len(items) != 1:
        raise InvalidRequest(
            f"each picture is embedded by itself here, and this prompt has {len(items)}; give each its own prompt.",
            param="multi_modal_data",
        )
    if isinstance(items[0], Clip):
        raise InvalidRequest("videos are not embedded by themselves; send pictures.", param="multi_modal_data")
    [own] = placed_items(processor, items)
    [(made_of, key)] = own.seen
    if made_of is None:
        raise InvalidRequest("vectors are not embedded again; send the picture.", param="multi_modal_data")
    shown = made_of if isinstance(made_of, ShownPictures) else None
    heard = made_of if isinstance(made_of, HeardSound) else None
    place = Inserted(start=0, count=1, key=key, name=key.hex(), shown=shown, heard=heard)
    return Encoded([UNKNOWN], inserted=(place,))


def placed_items(processor: Processor, items: Sequence[Item], text: str = "") -> list[Placed]:
    """Return the items with their places. text: of the prompt, for a tower that reads it. Raise InvalidRequest for one
    that the model does not take."""
    pictures = [index for index, item in enumerate(items) if isinstance(item, (Picture, SeenVectors))]
    place = {index: number for number, index in enumerate(pictures)}
    found, places = list[Placed](), 0
    shown = any(isinstance(item, Picture) for item in items)
    read = processor.read(text) if shown and isinstance(processor, ReadingProcessor) else ()
    for index, item in enumerate(items):
        found.append(_placed(processor, item, (len(pictures), place.get(index, 0)), read))
        places += found[-1].layout.placeholders
        if places > MOST_PLACES:
            raise InvalidRequest(
                f"the prompt's pictures, videos and sounds take more than {MOST_PLACES} tokens; show fewer or smaller "
                "ones.",
                param="messages",
            )
    return found


def _placed(processor: Processor, item: Item, place: tuple[int, int], read: tuple[int, ...]) -> Placed:
    """Return an item with its place. place: the number of pictures, and the item's number among them. read: the tokens
    that the tower reads."""
    pictures, index = place
    if isinstance(item, Clip):
        return _placed_clip(processor, item)
    if isinstance(item, Sound):
        return _placed_sound(processor, item, pictures)
    if isinstance(item, HeardVectors):
        return _placed_heard(processor, item)
    if isinstance(item, SeenVectors):
        return _placed_seen(processor, item, pictures, index)
    height, width, _ = item.pixels_HWC.shape
    layout = processor.layout(height, width, pictures, index)
    frames, view = (Pixels(height, width, item.pixels_HWC),), layout.whole
    if item.ready is not None and view is not None and item.ready.shape[:2] == (view.height, view.width):
        frames = (Pixels(view.height, view.width, item.ready),)
    shown = ShownPictures(frames, layout.views, processor.patching, layout.order, layout.shrunk, read)
    key = _key(item, layout, processor)
    if read:  # the same picture has other vectors in another prompt
        key = sha256(key + repr(read).encode()).digest()
    return Placed(layout, ((shown, key),), processor.placeholder)


def _placed_clip(processor: Processor, item: Clip) -> Placed:
    if not isinstance(processor, VideoProcessor):
        raise InvalidRequest("this model takes no videos; leave them out.", param="messages")
    _, height, width, _ = item.frames_FHWC.shape
    layout = processor.video([float(each) for each in item.times_F], height, width, item.rate)
    frames = [Pixels(height, width, each_HWC) for each_HWC in item.frames_FHWC]
    how, key = processor.patching, _key(item, layout, processor)
    views = layout.views
    if len(views) == 1 or sum(isinstance(piece, int) for piece in layout.pieces) < len(views):
        return Placed(layout, ((ShownPictures(tuple(frames), views, how), key),), processor.video_placeholder)
    seen = []
    for number, view in enumerate(views):
        own = sorted({*view.frames})
        renumbered = view._replace(frames=tuple(map(own.index, view.frames)))
        shown = ShownPictures(tuple(frames[each] for each in own), (renumbered,), how)
        seen.append((shown, sha256(key + number.to_bytes(4)).digest()))
    return Placed(layout, tuple(seen), processor.video_placeholder)


def _placed_sound(processor: Processor, item: Sound, pictures: int) -> Placed:
    if not isinstance(processor, SoundProcessor):
        raise InvalidRequest("this model takes no sounds; leave them out.", param="messages")
    layout = processor.sound(len(item.samples_N), pictures)
    heard = HeardSound(
        samples=SharedOctets(item.samples_N.astype("<f4", copy=False)),
        frames=-(-len(item.samples_N) // HOP),
        vectors=layout.placeholders,
        beside=layout.beside,
    )
    return Placed(layout, ((heard, _key(item, layout, processor)),), processor.sound_placeholder)


def _placed_seen(processor: Processor, item: SeenVectors, pictures: int, index: int) -> Placed:
    height, width, how = item.height, item.width, processor.patching
    if item.grid is not None:
        height, width = item.grid[0] * how.rows, item.grid[1] * how.columns
    layout = processor.layout(height or 16 * how.rows, width or 16 * how.columns, pictures, index)
    if layout.across:
        raise InvalidRequest("this model's pictures do not come as vectors; send pictures.", param="messages")
    rows, columns = (side // how.merge for side in item.grid or (0, 0))
    if item.grid is not None and layout.grids not in ((), ((1, rows, columns),)):
        raise InvalidRequest(
            f"image_grid_thw has {item.grid[0]} x {item.grid[1]} patches, and no picture of this model has; give the "
            "grid with which the vectors were made.",
            param="messages",
        )
    if layout.placeholders != len(item.embeds):
        said = (
            f"a picture of {height} x {width} pixels has" if height else "a picture whose image_size is not given has"
        )
        raise InvalidRequest(
            f"{said} {layout.placeholders} vectors here, and there are {len(item.embeds)}; give image_size (height and "
            "width) beside image_embeds.",
            param="messages",
        )
    return Placed(layout, ((None, _key(item, layout, processor)),), processor.placeholder, item.embeds)


def _placed_heard(processor: Processor, item: HeardVectors) -> Placed:
    if not isinstance(processor, SoundProcessor):
        raise InvalidRequest("this model takes no sounds; leave them out.", param="messages")
    own, count = processor, len(item.embeds)

    def vectors(samples: int) -> int:
        try:
            return own.sound(samples).placeholders
        except InvalidRequest:
            return 0 if samples < RATE else MOST_PLACES  # too short, or longer than what is heard

    samples = bisect_left(range(LONGEST), count, lo=1, key=vectors)
    layout = processor.sound(samples)
    if layout.placeholders != count:
        raise InvalidRequest(f"no sound of this model has {count} vectors; send those of one sound.", param="messages")
    return Placed(layout, ((None, _key(item, layout, processor)),), processor.sound_placeholder, item.embeds)


def _key(item: Item, layout: Layout, processor: Processor) -> bytes:
    told = repr((layout.views, layout.order, layout.shrunk, layout.grids, layout.interval, processor.patching))
    told += " beside" * layout.beside
    return sha256(item.digest + told.encode()).digest()


def _encoded(
    text: str,
    tokenizer: Tokenizer,
    processor: Processor,
    items: Sequence[Item],
    marks: Mapping[str, str],
    *,
    add_special_tokens: bool,
) -> MediaPrompt:
    markers = re.compile("|".join(map(re.escape, sorted(_markers(processor), key=len, reverse=True))))
    alone = text if items and isinstance(processor, ReadingProcessor) else ""
    for name, mark in marks.items():
        alone = alone.replace(mark, name)
    alone = markers.sub("", alone)
    each = placed_items(processor, _ordered(markers.findall(text), items, processor), alone)
    filled = _filled(text, markers, each)
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
    return _with_runs(shown, ids, each, tokenizer)


def _filled(text: str, markers: re.Pattern[str], each: Sequence[Placed]) -> str:
    """Return the text with the pieces of each item in the place of its marker, and one placeholder for each run."""
    parts = iter(each)

    def pieces(_: re.Match[str]) -> str:
        own = next(parts)
        return "".join(piece if isinstance(piece, str) else own.placeholder for piece in own.layout.pieces)

    return markers.sub(pieces, text)


def _with_runs(text: str, ids: Sequence[int], each: Sequence[Placed], tokenizer: Tokenizer) -> MediaPrompt:
    """Return a prompt in which each placeholder has become as many as its run has vectors."""
    runs = [(own, run, count) for own in each for run, count in enumerate(own.runs)]
    wanted = [_id(tokenizer, own.placeholder) for own, _, _ in runs]
    placeholders = set(wanted)
    if [token for token in ids if token in placeholders] != wanted:
        raise InvalidRequest(
            "the prompt spells the placeholder of pictures where no picture goes; leave it out.", param="prompt"
        )
    following, whole, inserted = iter(runs), list[int](), list[Inserted]()
    for token in ids:
        if token not in placeholders:
            whole.append(token)
            continue
        own, run, count = next(following)
        inserted.append(own.inserted(run, len(whole)))
        whole += [own.stands_for(token)] * count
    return MediaPrompt(text, whole, tuple(inserted))


def _id(tokenizer: Tokenizer, placeholder: str) -> int:
    return tokenizer.added.get(placeholder, UNKNOWN)


def _markers(processor: Processor) -> list[str]:
    return list(dict.fromkeys(_kinds(processor).values()))


@lru_cache(64)
def _kinds(processor: Processor) -> Mapping[type[Item], str]:
    """Return the markers by the kinds of items that they stand for."""
    found: dict[type[Item], str] = {Picture: processor.marker}
    if isinstance(processor, VideoProcessor):
        found[Clip] = processor.video_marker
    if isinstance(processor, SoundProcessor):
        found[Sound] = processor.sound_marker
    if found.get(Sound) == processor.marker:  # the model sees nothing
        del found[Picture]
    return found


def _parts(text: str, marks: Mapping[str, str]) -> Iterator[str]:
    """Yield the text's parts between marks, and what each mark stands for."""
    if not marks:
        yield text
        return
    spelled = {mark: each for each, mark in marks.items()}
    for part in re.split("(" + "|".join(map(re.escape, spelled)) + ")", text):
        yield spelled.get(part, part)


@lru_cache(64)
def _spellings(processor: Processor) -> Sequence[str]:
    """Return the texts that mean a picture if they stand in a prompt, the longest first."""
    found = {*_markers(processor), processor.placeholder}
    if isinstance(processor, VideoProcessor):
        found.add(processor.video_placeholder)
    if isinstance(processor, SoundProcessor):
        found.add(processor.sound_placeholder)
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


def _kind(item: Item) -> type[Item]:
    return KIND.get(type(item), type(item))


def _ordered(found: Sequence[str], items: Sequence[Item], processor: Processor) -> list[Item]:
    """Return the items in the order of the markers in their prompt. Raise InvalidRequest if there are not as many."""
    kinds = _kinds(processor)
    if odd := next((item for item in items if _kind(item) not in kinds), None):
        raise InvalidRequest(f"this model takes no {NAMES[_kind(odd)]}; leave them out.", param="messages")
    following = {}
    for kind, marker in kinds.items():
        own = [item for item in items if _kind(item) is kind]
        if (count := found.count(marker)) != len(own):
            raise InvalidRequest(
                f"the prompt has {count} places for {NAMES[kind]} ({marker!r}), and there are {len(own)}; give as "
                "many.",
                param="multi_modal_data",
            )
        following[marker] = iter(own)
    return [next(following[marker]) for marker in found]
