"""The name under which a client saves a file that another client may have named."""

from __future__ import annotations

import re
from urllib.parse import quote

MOST_CHARACTERS = 128
_NOT_IN_NAMES = re.compile(r'[<>:"|?*]')  # what file systems or the header's grammar give a meaning


def attachment(name: str) -> str:
    """Return the header Content-Disposition (RFC 6266) for a file of this name.

    Folders, control characters, marks that change the direction of text, and dots at either end are left out. A name
    that is not ASCII comes twice: with "_" for what ASCII lacks, and as it is (RFC 8187).
    """
    last = re.split(r"[/\\]", name)[-1]
    visible = "".join(character for character in last if character.isprintable())
    kept = _NOT_IN_NAMES.sub("_", visible).strip(" .")[:MOST_CHARACTERS].rstrip(" .") or "file"
    plain = re.sub(r"[^ -~]|%", "_", kept)  # some browsers decode %41 even here
    extended = "" if plain == kept else f"; filename*=UTF-8''{quote(kept, safe='')}"
    return f'attachment; filename="{plain}"{extended}'
