"""The Python source on this machine that may be trained on: the standard library and permissively licensed packages.

A package's licence comes from its metadata: the SPDX `License-Expression`, else the licence classifiers, else a
one-line `License` field. A package whose licence does not read as permissive is left out.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import cast

ALLOWED = frozenset({"MIT", "MIT-0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "Python-2.0"})
# Equally permissive. Wheels list these beside an allowed licence for compiled parts that they bundle (AND terms).
ALLOWED_BESIDE = frozenset({"0BSD", "ISC", "Zlib", "CC0-1.0", "BSL-1.0"})

_CLASSIFIERS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_ONE_LINERS = {
    "MIT": r"(the )?mit( licen[cs]e)?",
    "BSD": r"(new |modified )?bsd( licen[cs]e)?|bsd[- ][23][- ]clause( licen[cs]e)?|[23]-clause bsd( licen[cs]e)?",
    "Apache-2.0": r"apache( software)?( licen[cs]e)?,?( version)?[- ]?(v?2(\.0)?)( licen[cs]e)?",
    "PSF-2.0": r"psf(-2\.0)?( licen[cs]e)?|python software foundation licen[cs]e",
}
STANDARD_LIBRARY = "python"
_NOT_STANDARD = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package. `files` holds (path as imported, relative; where it lies) of every Python file, in order."""

    name: str
    version: str
    licence: str
    files: tuple[tuple[str, Path], ...]


def standard_library() -> Package:
    """Return the running interpreter's own library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    files = tuple(sorted((str(name), path) for name, path in found if not _NOT_STANDARD & set(name.parts)))
    return Package(name=STANDARD_LIBRARY, version=platform.python_version(), licence="PSF-2.0", files=files)


def installed_packages(search_path: list[str] | None = None) -> Iterator[Package]:
    """Yield the permissively licensed distributions on `search_path` (default: `sys.path`), by name, each once."""
    found = importlib.metadata.distributions(path=sys.path if search_path is None else search_path)
    distributions = {_canonical(str(distribution.name)): distribution for distribution in found}
    for name, distribution in sorted(distributions.items()):
        licence = permissive_licence(cast("Message", distribution.metadata))
        python = [f for f in distribution.files or () if f.suffix == ".py" and ".." not in f.parts]
        if licence and python:
            files = tuple(sorted((str(f), Path(str(f.locate()))) for f in python))
            yield Package(name=name, version=distribution.version, licence=licence, files=files)


def permissive_licence(metadata: Message) -> str | None:
    """Return the licence as an SPDX-like name if it is permissive, else None."""
    if expression := metadata.get("License-Expression"):
        return expression if _expression_allowed(expression) else None
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or () if c.startswith("License :: OSI")]
    if classifiers:
        known = [_CLASSIFIERS.get(classifier) for classifier in classifiers]
        return " AND ".join(name for name in known if name) if all(known) else None
    line = (metadata.get("License") or "").strip()
    return next((name for name, pattern in _ONE_LINERS.items() if re.fullmatch(pattern, line.lower())), None)


def _expression_allowed(expression: str) -> bool:
    """Return True if one OR alternative consists of allowed terms only. Parentheses are read strictly, as if every OR
    were AND."""
    expression = re.sub(r"\s+WITH\s+\S+", "", expression.strip())
    if "(" in expression:
        expression = re.sub(r"[()]", "", expression).replace(" OR ", " AND ")
    alternatives = [set(re.split(r"\s+AND\s+", part.strip())) for part in re.split(r"\s+OR\s+", expression)]
    return any(terms & ALLOWED and terms <= ALLOWED | ALLOWED_BESIDE for terms in alternatives)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
