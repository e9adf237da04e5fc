"""The text that heads learn from, with the target's trace of it: text of the corpus, and text that the target wrote.

A head meets the states of text that its target wrote, so half of the sequences begin in the corpus and are then
continued by the target. The target runs over all of it once, whatever the number of epochs.

Legend:
    B  sequences
    S  tokens per sequence
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.training.data import PackedTokens
from ridgeline.training.target import Trace, continued, traced

TRACED_TOKENS = 2048  # that the target runs at once on a CPU
WRITTEN_ROWS = 128  # sequences that it continues at once on a CPU
ON_GPU = 16  # times as many of both run at once on a GPU


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The amount of text.

    corpus_rows, corpus_length: sequences of the corpus alone.
    own_rows, own_length: sequences of which the target writes the second half.
    temperatures: those at which it does, in turns. 0: its likeliest tokens.
    """

    corpus_rows: int = 96
    corpus_length: int = 2048
    own_rows: int = 384
    own_length: int = 512
    temperatures: tuple[float, ...] = (0.0, 0.5)
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.corpus_rows, self.own_rows) < 0 or self.corpus_rows + self.own_rows == 0:
            raise InvalidConfig(
                f"the numbers of sequences must be 0 or more, and not both 0, got {self.corpus_rows} and "
                f"{self.own_rows}."
            )


class Traces:
    """Traces of sequences, in groups of equal length, from which steps draw in turns."""

    def __init__(self, groups: list[Trace], *, batch_tokens: int, seed: int) -> None:
        self.groups, self.batch_tokens, self.seed = groups, batch_tokens, seed
        sizes = np.array([group.tokens_BS.numel() for group in groups], dtype=np.float64)
        self._share = sizes / sizes.sum()

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(group.tokens_BS.numel() for group in self.groups)

    def batch(self, step: int) -> Trace:
        """Return the sequences of a step, a function of (seed, step) alone. Groups come as often as they have
        tokens."""
        generator = np.random.default_rng((self.seed, step))
        group = self.groups[generator.choice(len(self.groups), p=self._share)]
        rows, length = group.tokens_BS.shape
        count = min(rows, max(1, self.batch_tokens // length))
        return group.rows(torch.from_numpy(generator.choice(rows, count, replace=False))).restored()


def make_traces(
    target: Decoder,
    tokens: Path,
    config: TextConfig,
    taps: tuple[int, ...],
    folder: Path,
    of: str,
    say: Callable[[str], None],
) -> list[Trace]:
    """Return the groups of traces, from `folder` if they were made there before. of: tells one target and corpus from
    others."""
    sizes = {
        "corpus": (config.corpus_rows, config.corpus_length),
        "own": (config.own_rows, config.own_length, config.temperatures),
    }
    groups = []
    for name, size in sizes.items():
        if not size[0]:
            continue
        digest = hashlib.sha256(json.dumps([size, config.seed, taps, of]).encode()).hexdigest()[:16]
        file = folder / f"traces-{name}-{digest}.safetensors"
        if not file.exists():
            say(f"{name} text")
            tokens_BS = (_corpus if name == "corpus" else _own)(target, tokens, config)
            say(f"running the target over {tokens_BS.numel():,} tokens")
            trace = _trace(target, tokens_BS, taps)
            save_whole({each.name: getattr(trace, each.name) for each in fields(Trace)}, file)
        groups.append(Trace(**load_file(file, device=str(_device(target)))))
    return groups


def _corpus(target: Decoder, tokens: Path, config: TextConfig) -> Tensor:
    return _rows(target, tokens, config.corpus_rows, config.corpus_length, config.seed)


def _own(target: Decoder, tokens: Path, config: TextConfig) -> Tensor:
    """Return sequences of which the target wrote the second half: [B, S]."""
    half = config.own_length // 2
    at_once = min(_at_once(target, WRITTEN_ROWS), max(1, config.own_rows // 2))
    prompts_BS = _rows(target, tokens, config.own_rows, half, config.seed + 1)
    return torch.cat(
        [
            continued(
                target,
                part_BS,
                config.own_length - half,
                temperature=config.temperatures[index % len(config.temperatures)],
                seed=config.seed + index,
            )
            for index, part_BS in enumerate(prompts_BS.split(at_once))
        ]
    )


def _rows(target: Decoder, tokens: Path, count: int, length: int, seed: int) -> Tensor:
    data = PackedTokens(tokens, seq_len=length, batch_size=min(count, 1), seed=seed)
    rows = [data.sequence(index)[:length] for index in range(min(count, data.num_sequences))]
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(_device(target))


def _trace(target: Decoder, tokens_BS: Tensor, taps: tuple[int, ...]) -> Trace:
    size = max(1, _at_once(target, TRACED_TOKENS) // tokens_BS.shape[1])
    parts = [traced(target, part_BS, taps, bf16=True).stored() for part_BS in tokens_BS.split(size)]
    return Trace(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(Trace)))


def _device(target: Decoder) -> torch.device:
    return next(target.parameters()).device


def _at_once(target: Decoder, on_cpu: int) -> int:
    return on_cpu * (1 if _device(target).type == "cpu" else ON_GPU)


def save_whole(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors so that a file with its name is always whole."""
    part = file.with_suffix(".part")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part)
    part.replace(file)
