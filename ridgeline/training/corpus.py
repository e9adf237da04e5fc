"""Conversion of packages to training documents: filtered, de-duplicated, with whole packages held out.

Two files are near-duplicates if they share many *shingles*: hashes of a few consecutive non-blank lines, stripped of
indentation (Broder, "On the resemblance and containment of documents", 1997). Held-out files come first, so nothing
that resembles them can enter the training set, even if it was renamed or vendored.

Legend:
    N  lines
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ridgeline.core.errors import InvalidConfig
from ridgeline.training.packages import STANDARD_LIBRARY, Package

SHINGLE_LINES = 4
_TEST_FOLDERS = frozenset({"test", "tests", "_tests", "idle_test", "testdata", "test_data"})
# Vendored code may have another licence than the package's metadata names.
_VENDOR_FOLDERS = frozenset(
    {"vendor", "_vendor", "vendored", "_vendored", "vendor_packages", "extern", "externals", "third_party"}
    | {"_third_party", "thirdparty", "3rdparty"}
)
_GENERATED = re.compile(r"auto-?(matically )?\s?generated|generated (by|from|using)|do not edit", re.IGNORECASE)
_OTHER_LICENCE = re.compile(
    r"GNU (Lesser |Affero |Library )?General Public|Mozilla Public License|\bL?GPL-?v?[23]"
    r"|SPDX-License-Identifier:(?!\s*\(?(MIT|BSD|Apache|PSF))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Document:
    """One source file. `path` is relative, as imported, with "/"."""

    package: str
    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The rules for files to keep. Sizes are in bytes, and shares are fractions of a file.

    `held_out_modules` are top-level modules of the standard library, and `held_out_packages` are whole distributions.
    `max_overlap` is the largest share of shingles that a training file may have in common with earlier training files,
    and `max_held_out_overlap` the same with held-out files.
    """

    held_out_modules: tuple[str, ...] = ()
    held_out_packages: tuple[str, ...] = ()
    min_bytes: int = 100
    max_bytes: int = 1_000_000
    max_line: int = 1000
    max_digits: float = 0.1
    max_overlap: float = 0.5
    max_held_out_overlap: float = 0.1


@dataclass
class Corpus:
    """The documents. `held_out` maps "standard library" and "packages" to documents, `dropped` a reason to its number
    of files."""

    train: list[Document] = field(default_factory=list)
    held_out: dict[str, list[Document]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)


def build_corpus(packages: Iterable[Package], config: CorpusConfig) -> Corpus:
    """Read, filter, split and de-duplicate. Raise InvalidConfig if a held-out name does not exist."""
    corpus = Corpus(held_out={"standard library": [], "packages": []})
    candidates: list[Document] = []
    for package in packages:
        for document in _read(package, config, corpus.dropped):
            part = _held_out_part(document, config)
            (corpus.held_out[part] if part else candidates).append(document)
    _check_held_out(corpus, config)
    _deduplicate(candidates, corpus, config)
    return corpus


def _held_out_part(document: Document, config: CorpusConfig) -> str | None:
    if document.package == STANDARD_LIBRARY:
        return "standard library" if _top_module(document) in config.held_out_modules else None
    return "packages" if document.package in config.held_out_packages else None


def _top_module(document: Document) -> str:
    return document.path.split("/")[0].removesuffix(".py")


def _check_held_out(corpus: Corpus, config: CorpusConfig) -> None:
    found = {_top_module(d) for d in corpus.held_out["standard library"]}
    found |= {d.package for d in corpus.held_out["packages"]}
    missing = sorted({*config.held_out_modules, *config.held_out_packages} - found)
    if missing:
        raise InvalidConfig(f"held-out {', '.join(missing)} not found among the packages here; pip install them.")


def _read(package: Package, config: CorpusConfig, dropped: Counter[str]) -> list[Document]:
    def read(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except OSError:
            return None

    documents = []
    with ThreadPoolExecutor(16) as pool:
        contents = pool.map(read, (path for _, path in package.files))
        for (name, _), content in zip(package.files, contents, strict=True):
            reason, text = _unsuitable(name, content, config)
            if reason:
                dropped[reason] += 1
            else:
                documents.append(Document(package.name, name.replace("\\", "/"), text))
    return documents


def _unsuitable(name: str, content: bytes | None, config: CorpusConfig) -> tuple[str, str]:
    """Return (the reason why a file is not taken, ""), or ("", its text)."""
    parts = set(Path(name).parts)
    if parts & _TEST_FOLDERS or Path(name).name.startswith(("test_", "conftest")):
        return "test", ""
    if parts & _VENDOR_FOLDERS:
        return "vendored", ""
    if content is None or not config.min_bytes <= len(content) <= config.max_bytes:
        return "size", ""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not UTF-8", ""
    return _unsuitable_text(text, config), text


def _unsuitable_text(text: str, config: CorpusConfig) -> str:
    head = text[:3000]
    if "\r" in text or "\0" in text:
        return "control characters"
    if _GENERATED.search(head[:800]):
        return "generated"
    if _OTHER_LICENCE.search(head):
        return "licence header"
    if max(map(len, text.split("\n"))) > config.max_line:
        return "long lines"
    digits = sum(text.count(digit) for digit in "0123456789")
    return "table" if digits > config.max_digits * len(text) else ""


def _deduplicate(candidates: Sequence[Document], corpus: Corpus, config: CorpusConfig) -> None:
    """Fill `corpus.train` with the candidates that resemble neither held-out files nor earlier candidates."""
    held_out = {int(s) for part in corpus.held_out.values() for d in part for s in shingles(d.text)}
    seen: set[int] = set()
    for document in candidates:
        own = set(shingles(document.text).tolist())
        if len(own & held_out) > config.max_held_out_overlap * len(own):
            corpus.dropped["resembles held-out"] += 1
        elif len(own & seen) > config.max_overlap * len(own):
            corpus.dropped["duplicate"] += 1
        else:
            seen |= own
            corpus.train.append(document)


def shingles(text: str) -> np.ndarray:
    """Return int64 hashes of every run of `SHINGLE_LINES` non-blank lines, or of all lines if there are fewer. They are
    valid in one process."""
    lines_N = np.array([hash(line) for raw in text.split("\n") if (line := raw.strip())], dtype=np.int64)
    if len(lines_N) == 0:
        return lines_N
    width = min(SHINGLE_LINES, len(lines_N))
    count = len(lines_N) - width + 1
    mixed = np.zeros(count, dtype=np.int64)
    for offset in range(width):  # a polynomial modulo 2**64; int64 wraps
        mixed = mixed * np.int64(6364136223846793005) + lines_N[offset : offset + count]
    return mixed
