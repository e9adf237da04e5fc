"""Preparation of everything a training run reads from packages on this machine: documents, tokenizer, token file,
provenance."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ridgeline.training.card import Source
from ridgeline.training.corpus import Corpus, CorpusConfig, Document, build_corpus
from ridgeline.training.data import write_tokens
from ridgeline.training.packages import Package, installed_packages, standard_library
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents, train_tokenizer

TOKENIZER_SAMPLE_BYTES = 64_000_000


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The prepared data. `held_out` maps a set's name to texts, `dropped` a reason to its number of files, and
    `sources` says what each package gave to which part."""

    tokenizer: Tokenizer
    tokens: Path
    held_out: dict[str, list[str]]
    sources: list[Source]
    dropped: dict[str, int]


def prepare(
    folder: Path,
    config: CorpusConfig,
    *,
    vocab_size: int,
    seed: int,
    tokenizer: Path | None = None,
    max_train_bytes: int | None = None,
    max_held_out_bytes: int | None = None,
) -> Prepared:
    """Build the corpus, learn the tokenizer and write `folder`/tokens.bin. Equal machines and seeds give equal bytes.

    tokenizer: the folder of a model whose tokenizer is taken instead of a new one.
    max_train_bytes, max_held_out_bytes: keep about this much of each part, for a trial run.
    """
    packages = [standard_library(), *installed_packages()]
    corpus = build_corpus(packages, config)
    random.Random(seed).shuffle(corpus.train)
    corpus.train = _first(corpus.train, max_train_bytes)
    corpus.held_out = {name: _first(part, max_held_out_bytes) for name, part in corpus.held_out.items()}
    texts = [document.text for document in corpus.train]
    if tokenizer is None:
        made = train_tokenizer(texts, vocab_size, sample_bytes=TOKENIZER_SAMPLE_BYTES, seed=seed)
    else:
        made = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder / "tokens.bin", encode_documents(made, texts), SEPARATOR_ID)
    return Prepared(
        tokenizer=made,
        tokens=folder / "tokens.bin",
        held_out={name: [document.text for document in part] for name, part in corpus.held_out.items() if part},
        sources=_sources(packages, corpus),
        dropped=dict(corpus.dropped),
    )


def _first(documents: Sequence[Document], max_bytes: int | None) -> list[Document]:
    kept: list[Document] = []
    size = 0
    for document in documents:
        size += document.num_bytes
        if max_bytes is not None and kept and size > max_bytes:
            break
        kept.append(document)
    return kept


def _sources(packages: Sequence[Package], corpus: Corpus) -> list[Source]:
    parts = {"train": corpus.train, **{f"held out: {name}": part for name, part in corpus.held_out.items()}}
    sources = []
    for split, documents in parts.items():
        files, num_bytes = Counter(d.package for d in documents), defaultdict[str, int](int)
        for document in documents:
            num_bytes[document.package] += document.num_bytes
        sources += [
            Source(
                name=package.name,
                version=package.version,
                licence=package.licence,
                split=split,
                files=files[package.name],
                num_bytes=num_bytes[package.name],
            )
            for package in packages
            if files[package.name]
        ]
    return sources
