"""The reader of a `tiktoken.model`: one token a line, its bytes in base64 and its rank, which is its id.

The format is that of tiktoken's own loader (https://github.com/openai/tiktoken).
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from pathlib import Path

from ridgeline.core.errors import ModelLoadError

MAX_BYTES = 1 << 24  # Kimi K2's file has a sixth of it
MAX_TOKEN = 256  # bytes
# The squares of all tokens' lengths together, because the time to find a token's merges grows with the square of its
# length. Real vocabularies have a tenth of it, which takes a second.
MAX_SQUARES = 1 << 27
_MAX_LINE = 4 * (MAX_TOKEN + 2) // 3 + 12  # a token in base64, a space and a rank
_AGAIN = "copy the file again from the model's source"


def read_tiktoken(path: Path) -> list[bytes]:
    """Return the tokens in the order of their ranks, which begin at 0 and have no gaps. Each single byte is one of
    them. Raise ModelLoadError if the file holds anything else, or more than MAX_BYTES."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); {_AGAIN}.") from error
    if len(content) > MAX_BYTES:
        raise ModelLoadError(f"{path} has {path.stat().st_size} bytes, of at most {MAX_BYTES}; {_AGAIN}.")
    ranked: dict[int, bytes] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        token, rank = _parsed(line, number, path)
        if rank in ranked:
            raise ModelLoadError(f"{path} gives the rank {rank} twice, again in line {number}; {_AGAIN}.")
        ranked[rank] = token
    if (gap := next((rank for rank in range(len(ranked)) if rank not in ranked), None)) is not None:
        raise ModelLoadError(f"{path} has {len(ranked)} tokens and none of rank {gap}; {_AGAIN}.")
    tokens = [ranked[rank] for rank in range(len(ranked))]
    check_tokens(tokens, path)
    return tokens


def _parsed(line: bytes, number: int, path: Path) -> tuple[bytes, int]:
    parts = line.split()
    if len(line) > _MAX_LINE or len(parts) != 2 or not parts[1].isdigit():
        shown = line[:40].decode("ascii", "backslashreplace")
        raise ModelLoadError(f"line {number} of {path} is no token with its rank ({shown!r}); {_AGAIN}.")
    try:
        return binascii.a2b_base64(parts[0], strict_mode=True), int(parts[1])
    except binascii.Error as error:
        shown = parts[0][:40].decode("ascii", "backslashreplace")
        raise ModelLoadError(f"line {number} of {path} is no base64 ({shown!r}: {error}); {_AGAIN}.") from error


def check_tokens(tokens: Sequence[bytes], path: Path) -> None:
    """Raise ModelLoadError for a token that is there twice, is empty or too long, and for a byte that is none."""
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(tokens):
        if token in ranks:
            raise ModelLoadError(
                f"{path} holds the token {token!r} with the ranks {ranks[token]} and {rank}; {_AGAIN}."
            )
        if not 0 < len(token) <= MAX_TOKEN:
            raise ModelLoadError(
                f"{path} gives the rank {rank} to a token of {len(token)} bytes, of 1 to {MAX_TOKEN}; {_AGAIN}."
            )
        ranks[token] = rank
    if (squares := sum(len(token) ** 2 for token in tokens)) > MAX_SQUARES:
        raise ModelLoadError(
            f"{path} has too many long tokens: the squares of their lengths add up to {squares}, of at most "
            f"{MAX_SQUARES}; {_AGAIN}."
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelLoadError(f"{path} has no token for the byte 0x{missing[0]:02X}; {_AGAIN}.")
