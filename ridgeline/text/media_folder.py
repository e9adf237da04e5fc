"""The processor of pictures that a model's folder describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.media.layout import Processor
from ridgeline.media.processors import NAMES, READERS, processor_of
from ridgeline.media.processors.options import checked_options
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.formats.json_file import read_json

TRIED = (64, 48), (1500, 2000)  # heights and widths of pictures

logger = logging.getLogger(__name__)


class FolderProcessors:
    """The processors of a folder, whose files are read once.

    options: settings that replace those of the files. plain: the processor with these.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> None:
        self._files = {name: read_json(folder / name) for name in NAMES if (folder / name).is_file()}
        self._tokenizer, self._options = tokenizer, dict(options or {})
        reads = (folder / READERS).is_dir()
        self._reader = Tokenizer.from_folder(folder / READERS) if reads else None
        self.plain = self._made(self._options)

    @staticmethod
    def of(folder: Path, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> FolderProcessors | None:
        """Return those of a folder, or None if it describes none that is known."""
        if not folder.is_dir():
            return None
        try:
            found = FolderProcessors(folder, tokenizer, options)
            for size in TRIED:  # what is wrong in files shows here, and in no request
                with suppress(InvalidRequest):
                    found.plain.layout(*size)
            return found
        except InvalidConfig as error:
            logger.debug("%s has no processor of pictures: %s", folder, error)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("the processor of pictures in %s cannot be used (%r); pictures are refused", folder, error)
        return None

    def adjusted(self, options: object) -> Processor:
        """Return the processor with a request's `mm_processor_kwargs`. Raise InvalidRequest."""
        if not options:
            return self.plain
        return self._made({**self._options, **checked_options(self.plain, options)})

    def _made(self, options: Mapping[str, Any]) -> Processor:
        read = None if self._reader is None else self._reader.encode
        return processor_of(
            self._files, lambda text: self._tokenizer.encode(text, add_special_tokens=False), options, read
        )
