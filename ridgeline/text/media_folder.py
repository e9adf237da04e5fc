"""The processor of pictures that a model's folder describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.media.layout import Processor
from ridgeline.media.processors import NAMES, processor_of
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.json_file import read_json

logger = logging.getLogger(__name__)


def folder_processor(folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> Processor | None:
    """Return the processor, or None for a folder that describes none that is known. options: as `processor_of`'s."""
    if not folder.is_dir():
        return None
    files = {name: read_json(folder / name) for name in NAMES if (folder / name).is_file()}
    try:
        return processor_of(files, lambda text: tokenizer.encode(text, add_special_tokens=False), options)
    except InvalidConfig as error:
        logger.debug("%s has no processor of pictures: %s", folder, error)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("the processor of pictures in %s cannot be used (%r); pictures are refused", folder, error)
    return None
