"""The bodies with which clients speak of files and batches."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import LAX_INT, Body, Name

LEAST_SECONDS, MOST_SECONDS = 3_600, 30 * 86_400  # after which a file may expire
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
MOST_WINDOW = 30 * 86_400

Pair = Annotated[str, Field(max_length=512)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_SECONDS, le=MOST_SECONDS), LAX_INT]


class BatchBody(Body):
    """The body of POST /v1/batches. `completion_window` is OpenAI's 24h, or another time of that form."""

    input_file_id: Name
    endpoint: Name
    completion_window: Name
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Pair], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def seconds_of(window: str) -> int:
    """Return the seconds of a completion window. Raise BadRequest."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW:
        raise BadRequest(
            f"completion_window is a time such as 24h, of at most 30d, got {window[:40]!r}.", param="completion_window"
        )
    return seconds
