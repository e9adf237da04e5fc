"""The text that a model reads while its linear maps' inputs are measured.

Legend:
    B  sequences
    S  tokens per sequence
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.text.tokenizer import Tokenizer

# Modules of the standard library, on which the embedded model is not evaluated
DEFAULT_MODULES = ("argparse", "difflib", "inspect", "subprocess", "tarfile", "threading", "typing", "zipfile")
SEQUENCES, LENGTH = 128, 512


def default_documents() -> list[str]:
    """Return the texts that are read if none is given: Python source, which suits the embedded models and other models
    of code."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (root / f"{name}.py" for name in DEFAULT_MODULES)
    packages = (root / name / "__init__.py" for name in DEFAULT_MODULES)
    texts = [path.read_text(encoding="utf-8") for path in (*paths, *packages) if path.exists()]
    if not texts:
        raise InvalidConfig("this Python has no source of its standard library; give --calibration a text.")
    return texts


def sequences(documents: Sequence[str], tokenizer: Tokenizer, *, count: int, length: int, bos: int | None) -> Tensor:
    """Return token ids: int64 [B, S], taken evenly from the documents, at most `count`. Raise InvalidConfig if there is
    not enough text for one.

    bos: the token that each document begins with.
    """
    if count < 1 or length < 2:
        raise InvalidConfig(f"calibration needs at least 1 sequence of 2 tokens, got {count} of {length}.")
    ids: list[int] = []
    for document in documents:
        ids += ([] if bos is None else [bos]) + tokenizer.encode(document, add_special_tokens=False)
    whole = len(ids) // length
    if not whole:
        raise InvalidConfig(
            f"the calibration text has {len(ids)} tokens, and a sequence {length}; "
            "give more text or a smaller --length."
        )
    rows_BS = torch.tensor(ids[: whole * length]).view(whole, length)
    step = max(1.0, whole / count)
    return rows_BS[[int(row * step) for row in range(min(count, whole))]]
