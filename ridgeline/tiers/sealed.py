"""Records: what is on the disk about a block, sealed with a key that lies in the directory.

    field      bytes
    magic      4      and version 2, reserved 2
    length     8      of the payload
    written    8      seconds since 1970, as are
    expires    8      0: never
    cost       8      milliseconds to compute the block again, for cost-aware eviction
    tag        16     HMAC of identity, tenant and name
    tenant     16     HMAC of the tenant
    identity   16     HMAC of model, weights, dtype, layout, …
    checksum   32     HMAC-SHA256 of all of the above and the payload
    seal       8      keyed BLAKE2b of all of the above, by which an index is built without reading payloads

Without the key, tags say nothing about prompts, and no record can be forged. HMAC-SHA256 runs at
twice the rate of keyed BLAKE2b where processors have SHA instructions (1.8 and 0.9 GB/s on one core).
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.tiers.private import NotPrivate, PrivateDirectory

KEY, KEY_BYTES = "key", 32
MAGIC, VERSION = b"RLKV", 1
_FIELDS = struct.Struct("<4sHHQddd16s16s16s")
_CHECKSUM, _SEAL = 32, 8
RECORD_BYTES = _FIELDS.size + _CHECKSUM + _SEAL
EMPTY = bytes(RECORD_BYTES)

Buffer = bytes | bytearray | memoryview


class BlockName(NamedTuple):
    """The name of a block: the hash of its tokens and all before them, the cache group, and the rank that holds it."""

    chain: bytes
    group: int = 0
    rank: int = 0


class BlockRecord(NamedTuple):
    length: int
    written: float
    expires: float
    cost: float
    tag: bytes
    tenant: bytes
    identity: bytes

    def expired(self, now: float) -> bool:
        return 0 < self.expires <= now


class TierKeys:
    """The directory's keys. All of them follow from 32 random bytes in the file `key`."""

    def __init__(self, secret: bytes) -> None:
        self._names, self._sums, self._seals = (
            hmac.digest(secret, label, "sha256") for label in (b"names", b"checksums", b"seals")
        )

    def tag(self, identity: bytes, tenant: str, name: BlockName) -> bytes:
        salt = tenant.encode("utf-8", "surrogatepass")
        place = b"%d/%d/" % (name.group, name.rank) + name.chain
        parts = b"".join(len(part).to_bytes(8, "little") + part for part in (identity, salt, place))
        return hmac.digest(self._names, b"block" + parts, "sha256")[:16]

    def tenant(self, tenant: str) -> bytes:
        return hmac.digest(self._names, b"tenant" + tenant.encode("utf-8", "surrogatepass"), "sha256")[:16]

    def identity(self, identity: bytes) -> bytes:
        return hmac.digest(self._names, b"identity" + identity, "sha256")[:16]

    def seal(self, data: bytes) -> bytes:
        return blake2b(data, key=self._seals, digest_size=_SEAL).digest()

    def packed(self, record: BlockRecord, parts: Iterable[Buffer]) -> bytes:
        """Return the record's bytes for a payload of these parts."""
        fields = _FIELDS.pack(MAGIC, VERSION, 0, *record)
        data = fields + self._checksum(fields, parts)
        return data + self.seal(data)

    def unpacked(self, data: bytes) -> BlockRecord | None:
        """Return the record that these bytes are, or None if they are not one that was sealed here."""
        body = data[:-_SEAL]
        if len(data) != RECORD_BYTES or not hmac.compare_digest(self.seal(body), data[-_SEAL:]):
            return None
        magic, version, _, *fields = _FIELDS.unpack_from(data)
        return BlockRecord(*fields) if (magic, version) == (MAGIC, VERSION) else None

    def holds(self, data: bytes, parts: Iterable[Buffer]) -> bool:
        """Return True if the parts are the payload that the bytes of a record were made for."""
        return hmac.compare_digest(self._checksum(data[: _FIELDS.size], parts), data[_FIELDS.size : -_SEAL])

    def _checksum(self, fields: bytes, parts: Iterable[Buffer]) -> bytes:
        found = hmac.new(self._sums, fields, "sha256")
        for part in parts:
            found.update(part)
        return found.digest()


def load_keys(directory: PrivateDirectory, *, make: bool) -> TierKeys:
    """Return the directory's keys, made if there are none and `make`. Raise InvalidConfig if they cannot be read.

    With `make` the directory must be locked.
    """
    try:
        secret = directory.read(KEY, KEY_BYTES + 1)
    except FileNotFoundError as error:
        if not make:
            raise InvalidConfig(
                f"{directory.path} is no KV cache's directory (it has no file `{KEY}`); name one that a server used."
            ) from error
        secret = os.urandom(KEY_BYTES)
        directory.create(KEY, secret)
    except NotPrivate as error:
        raise InvalidConfig(f"{error}; remove it, and the cache with it, if you do not know why.") from error
    if len(secret) != KEY_BYTES:
        raise InvalidConfig(
            f"the key of the KV cache {directory.path / KEY} has {len(secret)} bytes instead of {KEY_BYTES}; "
            "delete the directory's content."
        )
    return TierKeys(secret)
