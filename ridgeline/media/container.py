"""A file with video or sound, opened by FFmpeg through PyAV: from memory, by one demuxer, for decoders of a list.

No protocol may be opened, so a file cannot name others. It runs in a sealed process, which could open none anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import av
from av.container import InputContainer
from av.error import FFmpegError

from ridgeline.media.bounds import TAKEN, BadMedia, MediaBounds, form_of

# Decoders by FFmpeg's names. libdav1d is the one of AV1.
PICTURED = ("h264", "hevc", "vp8", "vp9", "libvpx-vp9", "libdav1d", "av1", "mpeg4", "mjpeg", "gif")
HEARD = (
    *("aac", "mp3", "mp3float", "flac", "vorbis", "opus", "libopus", "alac"),
    *("pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le"),
    *("pcm_f32be", "pcm_f64le", "pcm_alaw", "pcm_mulaw"),
)
PROBED = 5 << 20  # bytes, and microseconds, that are read to find the streams


@contextmanager
def opened(data: Any, kind: str, bounds: MediaBounds) -> Iterator[InputContainer]:
    """Yield the file. FFmpeg's errors inside the block become BadMedia. kind: video or sound."""
    form = form_of(data, kind)
    options = {
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2" if form == "mov" else form + ",webm" * (form == "matroska"),
        "codec_whitelist": ",".join(PICTURED + HEARD),
        "protocol_whitelist": "none",  # an empty list would be no bound
        "probesize": str(PROBED),
        "analyzeduration": str(PROBED),
        "max_streams": "16",
        "threads": "1",
        "max_pixels": str(8 * bounds.frame_pixels),  # more than is taken, so that the refusal can name the size
    }
    try:
        with av.open(BytesIO(data), "r", format=form, options=options, metadata_errors="replace") as container:
            yield container
    except (BadMedia, MemoryError):
        raise
    except (FFmpegError, ValueError, OSError, IndexError, RuntimeError) as error:
        words = " ".join(str(getattr(error, "strerror", None) or error).split())[:100].rstrip(".")
        name = TAKEN[kind][form]
        raise BadMedia(f"the {kind} cannot be read as {name} ({words}); send it anew, or in another form.") from None


def check_codec(stream: Any, kind: str, known: tuple[str, ...]) -> None:
    """Raise BadMedia for a stream whose decoder is not of the list."""
    context = stream.codec_context
    if context is None or context.name not in known:
        name = "unknown" if context is None else context.name
        raise BadMedia(f"the {kind} is coded as {name[:64]}, which is not taken; convert it to a common codec.")
    context.thread_type, context.thread_count = "NONE", 1
