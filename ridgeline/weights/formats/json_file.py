"""The reader of a JSON file that came with a model: an object of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError

MAX_BYTES = 1 << 26  # the largest real files have a tenth of it; a parsed file takes about ten times its size


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in a file, or {} if there is no file and none is required. Raise ModelLoadError if it holds
    something else."""
    try:
        if not required and not path.exists():
            return {}
        content = json.loads(bounded_text(path))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist; a model folder needs it.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} cannot be read as JSON ({error}); copy it again from the model's source."
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(
            f"{path} holds {type(content).__name__} where a JSON object should be; copy it again from its source."
        )
    return content


def bounded_text(path: Path) -> str:
    """Return a text file's content. Raise ModelLoadError if it is too large or no regular file (a pipe would never
    end), and OSError and ValueError as reading does."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path} is not a file; copy the model again from its source.")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes, of at most {MAX_BYTES}; copy it again from the model's source.")
    return path.read_text(encoding="utf-8")
