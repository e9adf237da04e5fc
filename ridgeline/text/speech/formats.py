"""Transcripts as texts and subtitles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ridgeline.text.speech.segments import SpokenSegment


def clock(seconds: float, separator: str) -> str:
    """Return a time as hours, minutes, seconds and thousandths."""
    whole = round(1000 * max(seconds, 0.0))
    minutes, rest = divmod(whole, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{separator}{rest % 1000:03}"


def srt(segments: Iterable[SpokenSegment]) -> str:
    """Return subtitles as SubRip has them."""
    return "".join(
        f"{n}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_line(each)}\n\n"
        for n, each in enumerate(segments, 1)
    )


def vtt(segments: Iterable[SpokenSegment]) -> str:
    """Return subtitles as WebVTT has them."""
    cues = (f"{clock(each.start, '.')} --> {clock(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def text(segments: Iterable[SpokenSegment]) -> str:
    return "".join(each.text for each in segments).strip() + "\n"


def _line(segment: SpokenSegment) -> str:
    return segment.text.strip().replace("-->", "->")


FORMATS: dict[str, Callable[[Iterable[SpokenSegment]], str]] = {"text": text, "srt": srt, "vtt": vtt}
