"""The alphabet of byte-level BPE, in which every byte is a visible character (GPT-2's, used by most since)."""

from __future__ import annotations


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for. A printable byte is spelled as itself, and the
    others as characters from 256 upwards."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
