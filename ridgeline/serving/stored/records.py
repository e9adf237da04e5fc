"""Files and batches as they are kept on disk and as clients see them, by OpenAI's names."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Literal

import msgspec

FINAL = ("completed", "failed", "expired", "cancelled")
FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
MOST_ERRORS = 100  # mistakes of an input file that are listed
LONGEST_CUSTOM_ID = 512  # characters

SHOWN_PURPOSES = ("vision", "user_data")  # of files that messages may name

Purpose = Literal["batch", "batch_output", "vision", "user_data"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed. Ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


class StoredFile(msgspec.Struct, kw_only=True):
    """The facts of a file beside its content. `owner` is the client's digest, or "" where no keys are asked for."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    owner: str = ""

    def shown(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["owner"]
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class Mistake(msgspec.Struct):
    """A mistake of an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(msgspec.Struct):
    """The tokens of all answers of a batch."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def shown(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class Batch(msgspec.Struct, kw_only=True):
    """A batch. `endpoint` is None where each line may name one of its own. `output_seconds` are those after which its
    results expire; None keeps them."""

    id: str
    endpoint: str | None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    model: str | None = None
    errors: list[Mistake] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    usage: Usage = msgspec.field(default_factory=Usage)
    metadata: dict[str, str] | None = None
    owner: str = ""
    output_seconds: int | None = None
    ends_as: Status | None = None  # while it is finalizing

    @property
    def final(self) -> bool:
        return self.status in FINAL

    def shown(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in SHOWN}
        errors = {"object": "list", "data": [msgspec.structs.asdict(each) for each in self.errors]}
        return {
            "id": self.id,
            "object": "batch",
            **fields,
            "errors": errors if self.errors else None,
            "request_counts": msgspec.structs.asdict(self.request_counts),
            "usage": self.usage.shown(),
        }


SHOWN = (
    *("endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at", "metadata"),
)
