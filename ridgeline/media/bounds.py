"""MediaBounds on pictures, video and sound, and the forms that are taken, which are found in their first bytes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequest


class BadMedia(InvalidRequest):
    """A client's picture, video or sound that cannot be taken. The message is one sentence."""


class MemoryTaken(Exception):
    """There is no memory for a result now. size: its bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(frozen=True, kw_only=True)
class MediaBounds:
    """The bounds of one item, and of all items that are there at once.

    file_bytes: of what a client sends or names, before it is decoded.
    pixels, side: of a picture. frame_pixels: of a video's frame.
    packets: compressed frames of a video, and of a sound. frames: those chosen of a video.
    clip_bytes: of the chosen frames. sound_seconds: of a sound.
    rates: samples a second, from and to. channels: of a sound.
    picture_seconds, seconds: of the processor, for a picture, and for a video or sound.
    memory: bytes that a process may take while it decodes.
    held: bytes of decoded items that are there at once. One owner's have at most half of it.
    """

    file_bytes: int = 64 << 20
    pixels: int = 1 << 26
    side: int = 1 << 16
    frame_pixels: int = 9 << 20
    packets: int = 1 << 20
    frames: int = 1024
    clip_bytes: int = 1 << 29
    sound_seconds: int = 3600
    rates: tuple[int, int] = (1000, 384_000)
    channels: int = 8
    picture_seconds: float = 10.0
    seconds: float = 60.0
    memory: int = 1280 << 20
    held: int = 2 << 30


PICTURES = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF"}
VIDEOS = {"mov": "MP4", "matroska": "WebM or Matroska", "avi": "AVI", "gif": "GIF"}
SOUNDS = {
    **{"wav": "WAV", "flac": "FLAC", "mp3": "MP3", "ogg": "Ogg", "aac": "AAC"},
    **{"mov": "MP4", "matroska": "WebM or Matroska"},
}
TAKEN = {"picture": PICTURES, "video": VIDEOS, "sound": SOUNDS}
NAMES = {"image": "picture", "video": "video", "audio": "sound"}  # of kinds of parts
# The first bytes of files: pattern, its form, and how it is called where that form is not taken.
_BRANDS = rb"....ftyp(?:heic|heix|hevc|mif1|msf1|avif|avis)"
SIGNATURES: tuple[tuple[re.Pattern[bytes], str, str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), form, name)
    for pattern, form, name in (
        (rb"\xff\xd8\xff", "jpeg", "JPEG"),
        (rb"\x89PNG\r\n\x1a\n", "png", "PNG"),
        (rb"RIFF....WEBP", "webp", "WebP"),
        (rb"GIF8[79]a", "gif", "GIF"),
        (rb"II\*\0|MM\0\*", "tiff", "TIFF"),
        (rb"RIFF....WAVE", "wav", "WAV"),
        (rb"RIFF....AVI ", "avi", "AVI"),
        (_BRANDS, "heif", "HEIF or AVIF"),
        (rb"....(?:ftyp|moov|mdat|free|skip|wide)", "mov", "MP4"),
        (rb"\x1aE\xdf\xa3", "matroska", "WebM or Matroska"),
        (rb"OggS", "ogg", "Ogg"),
        (rb"fLaC", "flac", "FLAC"),
        (rb"\xff[\xf0\xf1\xf8\xf9]", "aac", "AAC"),
        (rb"ID3|\xff[\xe2-\xff]", "mp3", "MP3"),
        (rb"BM", "bmp", "BMP"),
        (rb"%PDF", "pdf", "PDF"),
        (rb"%!PS", "eps", "PostScript"),
        (rb"8BPS", "psd", "PSD"),
        (rb"\0\0\x01\0", "ico", "ICO"),
        (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "jp2", "JPEG 2000"),
        (rb"\xff\x0a|\0\0\0\x0cJXL ", "jxl", "JPEG XL"),
        (
            rb"(?:\xef\xbb\xbf)?\s*(?:#EXTM3U|\[playlist\]|<MPD|ffconcat|<\?xml[^>]*>\s*<(?:MPD|playlist))",
            "m3u",
            "a playlist",
        ),
        (rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml|!--|!DOCTYPE svg|svg)", "svg", "SVG or XML"),
        (rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body)", "html", "HTML"),
        (rb"FLV\x01", "flv", "FLV"),
        (rb"\x30\x26\xb2\x75", "asf", "ASF"),
        (rb"FORM....AIF[FC]", "aiff", "AIFF"),
        (rb"PK\x03\x04", "zip", "a ZIP archive"),
    )
)
LONGEST = 256  # bytes in which a signature must stand
_SOUND = re.compile(rb"....ftypM4[AB] ", re.DOTALL)  # a file of MP4's form that says it has no picture


def form_of(data: bytes, kind: str) -> str:
    """Return the form of a file, by its content alone. Raise BadMedia for one that is not taken for this kind: picture,
    video or sound."""
    if not len(data):
        raise BadMedia(f"the {kind} is empty; send its bytes.")
    form, name = _found(data)
    if form in TAKEN[kind]:
        return form
    raise _not_taken(kind, form, name, [*TAKEN[kind].values()])


def kind_of(data: bytes, kinds: Collection[str]) -> str:
    """Return which of these kinds of parts a file is: image, video or audio. Its content alone decides, and its first
    LONGEST bytes suffice. A GIF is an image, and what may hold video or sound alone is a video, where these are among
    the kinds. Raise BadMedia for a file that is none of them."""
    if not len(data):
        raise BadMedia("the file is empty; send its bytes.")
    form, name = _found(data)
    order = ("audio", "image", "video") if _SOUND.match(data) else ("image", "video", "audio")
    for kind in order:
        if kind in kinds and form in TAKEN[NAMES[kind]]:
            return kind
    taken = [name for kind in order if kind in kinds for name in TAKEN[NAMES[kind]].values()]
    raise _not_taken("file", form, name, list(dict.fromkeys(taken)))


def _found(data: bytes) -> tuple[str, str]:
    """Return the form of a file and its name, or two empty texts."""
    begin = bytes(data[:LONGEST])
    return next(((form, name) for pattern, form, name in SIGNATURES if pattern.match(begin)), ("", ""))


def _not_taken(what: str, form: str, name: str, taken: list[str]) -> BadMedia:
    is_it = f"is {name}" if form else "has the form of no known file"
    *others, last = taken
    return BadMedia(f"the {what} {is_it}, which is not taken; send {', '.join(others)} or {last}.")


def check_bytes(size: int, kind: str, bounds: MediaBounds) -> None:
    """Raise BadMedia for a file that is too long."""
    if size > bounds.file_bytes:
        raise BadMedia(f"the {kind} has {size} bytes, of at most {bounds.file_bytes}; send a smaller one.")
