"""What experiments with small models share: text of this machine in the embedded model's tokens, and loss by position.

Training text is Python source, read as `ridgeline train pretrain` reads it, but only as much as is asked for, the
standard library first. Held-out text is the modules that the embedded models have not read.

Legend:
    B  sequences
    S  tokens per sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.models import model_config
from ridgeline.training.corpus import build_corpus
from ridgeline.training.data import PackedTokens, write_tokens
from ridgeline.training.embedded import EMBEDDED
from ridgeline.training.objective import training_decoder
from ridgeline.training.optimizer import initialize
from ridgeline.training.packages import Package, installed_packages, standard_library
from ridgeline.training.pretrain import TrainConfig, Trainer
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents
from ridgeline.weights.folder import EMBEDDED_MODEL

QUIET = Console(quiet=True)
CORPUS = replace(EMBEDDED.corpus, held_out_packages=())
SCORED = 4096  # tokens whose logits exist at once


def embedded_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


def packages_up_to(num_bytes: float) -> Iterator[Package]:
    """Yield the standard library and permissively licensed packages, until their files have so many bytes."""
    size = 0
    for package in (standard_library(), *installed_packages()):
        yield package
        size += sum(path.stat().st_size for _, path in package.files if path.exists())
        if size >= num_bytes:
            return


def training_text(folder: Path, megabytes: float, seed: int = 0) -> Path:
    """Write about so many megabytes of source to `folder`/tokens.bin, files in a random order, and return its path. A
    file that is there already is taken as it is."""
    path = folder / "tokens.bin"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    documents = build_corpus(packages_up_to(1e6 * megabytes), CORPUS).train
    order = np.random.default_rng(seed).permutation(len(documents))
    texts, size = list[str](), 0.0
    for index in order:
        if size < 1e6 * megabytes:
            texts.append(documents[index].text)
            size += documents[index].num_bytes
    write_tokens(path, encode_documents(embedded_tokenizer(), texts), SEPARATOR_ID)
    return path


def held_out_tokens() -> np.ndarray:
    """Return the held-out modules of the standard library as one stream, a separator before each file: int64."""
    parts = build_corpus([standard_library()], CORPUS).held_out["standard library"]
    ids = encode_documents(embedded_tokenizer(), [document.text for document in parts])
    return np.concatenate([np.concatenate(([SEPARATOR_ID], each)) for each in ids]).astype(np.int64)


def sequences(stream: np.ndarray, length: int, count: int | None = None) -> Tensor:
    """Return [B, S + 1] sequences of a stream: S inputs and, one later, targets, so each token is a target once."""
    most = (len(stream) - 1) // length
    count = most if count is None else min(count, most)
    return torch.stack([torch.from_numpy(stream[at * length : (at + 1) * length + 1]) for at in range(count)])


def new_decoder(config: Mapping[str, Any], device: torch.device, seed: int = 0) -> Decoder:
    """Return a decoder with initial weights, as `ridgeline train pretrain` begins."""
    decoder = training_decoder(model_config(config).spec, torch.float32, device)
    initialize(decoder, config["num_hidden_layers"], seed)
    return decoder


def trained(decoder: Decoder, tokens: Path, length: int, batch: int, train: TrainConfig, folder: Path) -> Trainer:
    """Train the decoder in place on sequences of `length` tokens, `batch` of them a step."""
    data = PackedTokens(tokens, seq_len=length, batch_size=batch, seed=0)
    trainer = Trainer(decoder, data, train, folder, QUIET)
    trainer.run()
    return trainer


@torch.inference_mode()
def losses(decoder: Decoder, tokens_BS1: Tensor, at_once: int = 65_536) -> Tensor:
    """Return the nats of every target, float32 [B, S] on the CPU, in the decoder's own dtype. Sequences of about
    `at_once` tokens run together."""
    device = next(decoder.parameters()).device
    length, found = tokens_BS1.shape[1] - 1, []
    for part_BS1 in tokens_BS1.split(max(1, at_once // length)):
        inputs_N, targets_N = (t.flatten().to(device) for t in (part_BS1[:, :-1], part_BS1[:, 1:]))
        positions_N = torch.arange(length, device=device).repeat(len(part_BS1))
        states = dense_states(decoder.spec, len(part_BS1), length, decoder.embed.weight.dtype, device)
        hidden = decoder(inputs_N, positions_N, states)
        nats = [
            F.cross_entropy(decoder.logits(hidden.at(part)).float(), targets_N[part], reduction="none")
            for start in range(0, len(targets_N), SCORED)
            for part in [slice(start, start + SCORED)]
        ]
        found.append(torch.cat(nats).view(len(part_BS1), length).cpu())
    return torch.cat(found)
