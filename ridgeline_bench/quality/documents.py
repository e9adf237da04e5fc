"""The texts to evaluate on. A file is one document, and so is each line of a .jsonl file."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.errors import InvalidConfig

# Packages of the standard library, which the embedded models have not read
HELD_OUT = ("json", "logging", "http", "email")


@dataclass(frozen=True)
class TextFile:
    """The documents of a file. They are read apart: none is context for another."""

    path: Path
    documents: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)


def held_out_files() -> list[TextFile]:
    """Return the files of HELD_OUT, for evaluations that are given no text: Python source, which suits the embedded
    models and other models of code. Raise InvalidConfig if this Python has none."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for package in HELD_OUT for path in sorted((root / package).glob("*.py")) if path.stat().st_size]
    if not paths:
        raise InvalidConfig("this Python has no source of its standard library; name texts.")
    return [read_file(path) for path in paths]


def read_file(path: Path) -> TextFile:
    """Return the file's documents. Raise InvalidConfig, naming file and line, if there is no text."""
    try:
        text = path.read_bytes().decode("utf-8")  # not read_text, which would change the ends of lines
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not valid UTF-8 (byte {error.start}); convert it first.") from error
    documents = _json_lines(text, path) if path.suffix == ".jsonl" else [text]
    file = TextFile(path, tuple(document for document in documents if document))
    if not file.documents:
        raise InvalidConfig(f"{path} holds no text; leave it out.")
    return file


def _json_lines(text: str, path: Path) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            document = value["text"] if isinstance(value, dict) else None
            if not isinstance(document, str):
                raise TypeError("it has no string there")
            document.encode()
        except KeyError as error:
            raise InvalidConfig(f"{path}:{number} has no field `text`; it needs one with the document.") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidConfig(
                f"{path}:{number} is not a JSON object with the document in its field `text` ({error})."
            ) from error
        documents.append(document)
    return documents
