"""The checks of a model that runs through transformers' modules before it serves: its settings are ones that it has,
and it scores tokens with our attention and cache as its class does by itself.

Legend:
    T  tokens
    V  vocabulary
    R  rows
    S  slots
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.speculation import NGRAM
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.model import ModelSpec, with_attention
from ridgeline.foreign.classes import offline, said
from ridgeline.foreign.decoder import ForeignDecoder
from ridgeline.foreign.trace import TOKENS, unchanged_globals
from ridgeline.kernels.base.kv_format import KVFormat
from ridgeline.models.config import ModelConfig
from ridgeline.weights.quantized.config import method_name
from ridgeline.worker.graphs import record, side_stream
from ridgeline.worker.state.states import DeviceRows, States

logger = logging.getLogger(__name__)

DRAWS = 3
BLOCK = 16  # tokens of a block in the check, which holds each request in one
# How far scores may be from those of the class by itself, as a part of their spread: some hundred roundings
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def check_foreign(config: LLMConfig, model: ModelConfig, folder: Path) -> None:
    """Raise InvalidConfig for settings that models which run through transformers' modules do not have."""
    if model.foreign is None:
        return
    wanted = {
        **dict.fromkeys(config.divided_by, "one device computes it"),
        "quantization": "its weights stay as they are" if config.quantization else "",
        "moe_expert_cache_size": "its experts are on the device" if config.moe_expert_cache_size else "",
        "cpu_offload_gb": "its layers are on the device" if config.cpu_offload_gb else "",
        "runner": "it writes and does not pool" if config.runner == "pooling" else "",
        "speculative_config": _undrafted(config),
    }
    for name, why in wanted.items():
        if why:
            raise InvalidConfig(
                f"{model.spec.architecture} runs through transformers' modules, and {why}; leave {name} out."
            )
    if (method := method_name(folder)) is not None:
        raise InvalidConfig(
            f"{model.spec.architecture} runs through transformers' modules, which read plain weights, and this "
            f"checkpoint is quantized ({method}); take one that is not."
        )


def _undrafted(config: LLMConfig) -> str:
    method = None if config.speculation is None else config.speculation.method
    return "" if method in (None, NGRAM) else f"the method {method} looks into layers of ours (ngram works)"


def check_agrees(decoder: ForeignDecoder) -> None:
    """Raise ModelLoadError if a class does not score as by itself. If it only does not with ops of ours in the place
    of some modules, let it run without them."""
    try:
        _check_agrees(decoder)
    except ModelLoadError as error:
        if not len(decoder.swaps):
            raise
        logger.info(
            "%s runs its own modules alone, since with ops of ours in their place: %s", decoder.found.name, error
        )
        decoder.run_as_written()
        _check_agrees(decoder)


@torch.inference_mode()
def _check_agrees(decoder: ForeignDecoder) -> None:
    """Raise ModelLoadError unless eight tokens have the scores that the class gives them by itself: whole, in chunks,
    after a prefix hit, and beside another request.

    Other tokens are tried, up to DRAWS, where some differ: if two experts have nearly the same score for a token, a
    rounding chooses between them. What a class computes otherwise differs for all tokens.
    """
    name = decoder.found.name
    try:
        with offline(), unchanged_globals(decoder.found), unchanged_modules(decoder):
            for draw in range(DRAWS):
                different = _difference(decoder, draw)
                if not different:
                    break
            else:
                raise ModelLoadError(f"{name} scores eight tokens {different}; it cannot run here.")
    except (ModelLoadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a class does with a step of ours
        raise ModelLoadError(f"{name} does not run with our attention and cache ({said(error)}).") from error
    logger.info("%s runs through transformers' modules: eight tokens have its own scores", name)


def _difference(decoder: ForeignDecoder, draw: int) -> str:
    """Return in which way tokens of a draw have other scores than by themselves; "" if in none."""
    tokens_2T = np.random.default_rng(draw).integers(0, decoder.spec.vocab_size, (2, TOKENS))
    one_T, other_T = torch.from_numpy(tokens_2T).to(next(decoder.parameters()).device)
    tolerance = TOLERANCE[decoder.dtype]
    for how, found_TV, expected_TV in _ways(Trial.of(decoder), one_T, other_T):
        apart = _apart(found_TV.float(), expected_TV.float())
        if not apart <= tolerance:  # NaN too
            return (
                f"{how} otherwise than by itself (by {apart:.2g} of their spread, of at most {tolerance:g}), so it "
                "does more with positions or other tokens than our attention"
            )
    return ""


def _ways(trial: Trial, one_T: Tensor, other_T: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the ways in which a request runs, its scores there, and those that it should have.

    The last way moves it to the end of the context. What depends on positions must then follow those that it is given,
    and not count tokens: a class may treat positions behind some thousand otherwise than the first ones.
    """
    plain_TV, other_TV = trial.decoder.plain_logits(one_T), trial.decoder.plain_logits(other_T)
    yield "as a whole", trial.scores([Row(0, 0, one_T)]), plain_TV
    chunks = ((0, 3), (3, 7), (7, 8))
    yield "in chunks", torch.cat([trial.scores([Row(1, a, one_T[a:b])]) for a, b in chunks]), plain_TV
    yield "after a prefix hit", trial.scores([Row(2, 5, one_T[5:], of=1)]), plain_TV[5:]
    both = [Row(3, 0, other_T), Row(4, 0, one_T[:5])]
    yield "beside another request", trial.scores(both), torch.cat((other_TV, plain_TV[:5]))
    end = max(0, trial.decoder.spec.max_position_embeddings - TOKENS)
    far_TV, far_other_TV = (trial.decoder.plain_logits(each, end) for each in (one_T, other_T))
    yield "at the context's end", trial.scores(both, moved=end), torch.cat((far_other_TV, far_TV[:5]))


def _apart(found_TV: Tensor, expected_TV: Tensor) -> float:
    """Return the root of the mean square of the differences, over that of the expected scores around their mean."""
    spread = (expected_TV - expected_TV.mean()).pow(2).mean().sqrt()
    return float((found_TV - expected_TV).pow(2).mean().sqrt() / spread.clamp(min=1e-12))


class Row(NamedTuple):
    """Tokens of a request that run in one step, the first of them at a position.

    of: the slot whose blocks it has (default: its own).
    """

    slot: int
    start: int
    ids_T: Tensor
    of: int | None = None


class Trial(NamedTuple):
    """A small cache, in which every slot has a block of each group."""

    decoder: ForeignDecoder
    states: States
    blocks_SA: list[list[int]]

    @classmethod
    def of(cls, decoder: ForeignDecoder, slots: int = 5) -> Trial:
        spec = _with_plain_cache(decoder.spec)
        name = str(decoder.dtype).removeprefix("torch.")
        groups = spec.cache_groups  # a page serves one of them, and page 0 none
        layout = CacheLayout(groups=groups, block_size=BLOCK, dtype=name, num_pages=1 + slots * len(groups))
        device = next(decoder.parameters()).device
        blocks = [
            [layout.block_id(g, 1 + slot * len(groups) + g, 0) for g in range(len(groups))] for slot in range(slots)
        ]
        return cls(decoder, States(layout, spec, decoder.dtype, device, decoder.ops), blocks)

    def scores(self, rows: Sequence[Row], moved: int = 0) -> Tensor:
        """Return the scores of all tokens of a step: [T, V]. moved: the network is given positions so much higher."""
        ids_T, positions_T = self.begin(rows)
        return self.decoder.logits(self.decoder(ids_T, positions_T + moved, self.states))

    def begin(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Let the states begin a step. Return its tokens and their positions."""
        device, counts = self.states.memory.device, [len(row.ids_T) for row in rows]
        ends = [row.start + count for row, count in zip(rows, counts, strict=True)]
        positions = [torch.arange(row.start, end, device=device) for row, end in zip(rows, ends, strict=True)]
        blocks_RA = [self.blocks_SA[row.slot if row.of is None else row.of] for row in rows]
        tables = torch.tensor(blocks_RA, dtype=torch.int32, device=device).T.unsqueeze(-1)  # [A, S, C]
        places = [
            torch.cat([block * BLOCK + each for block, each in zip(table[:, 0].tolist(), positions, strict=True)])
            for table in tables
        ]
        start_R1 = np.concatenate(([0], np.cumsum(counts)))
        device_rows = DeviceRows(
            slots_R=torch.arange(len(rows), dtype=torch.int32, device=device),
            start_R1=torch.from_numpy(start_R1).to(device, torch.int32),
            kv_len_R=torch.tensor(ends, device=device),
            last_R=torch.from_numpy(start_R1[1:] - 1).to(device),
            num_tokens=sum(counts),
            tokens_each=counts[0] if len(set(counts)) == 1 else 0,
            num_tokens_R=np.array(counts),
            kv_bound_R=np.array(ends),
        )
        self.states.begin(device_rows, list(tables), places)
        return torch.cat([row.ids_T for row in rows]), torch.cat(positions)


def capture(decoder: ForeignDecoder, capture_all: Callable[[], None]) -> None:
    """Capture a model's steps as graphs, after a trial: of eight tokens, and of one. Where one fails, say so in the
    log and leave steps to run op by op. Raise OutOfMemoryError as the capture does."""
    name = decoder.found.name
    try:
        with offline():
            why = _uncapturable(decoder)
            if not why:
                capture_all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a class does that no graph can hold
        why = said(error)
    if why:
        logger.warning("%s runs op by op, since its steps cannot be captured as graphs (%s)", name, why)


@torch.inference_mode()
def _uncapturable(decoder: ForeignDecoder) -> str:
    """Return the reason why the modules cannot be captured, "" if they can."""
    device = next(decoder.parameters()).device
    trial, tolerance = Trial.of(decoder), TOLERANCE[decoder.dtype]
    one_T, other_T = torch.randint(0, decoder.spec.vocab_size, (2, TOKENS), device=device)
    for start, count in ((0, TOKENS), (TOKENS - 1, 1)):
        ids_T, positions_T = trial.begin([Row(0, start, one_T[start : start + count].clone())])

        def run(ids_T: Tensor = ids_T, positions_T: Tensor = positions_T) -> Tensor:
            return decoder.logits(decoder(ids_T, positions_T, trial.states))

        run()  # compiles kernels
        with unwaiting():
            run()
        graph = torch.cuda.CUDAGraph()
        with side_stream(device):
            found_TV = record(graph, torch.cuda.graph_pool_handle(), run)
        ids_T.copy_(other_T[:count])
        expected_TV = run().float()
        graph.replay()
        if not (apart := _apart(found_TV.float(), expected_TV)) <= tolerance:
            return f"other tokens have other scores in a graph, by {apart:.2g} of their spread"
    return ""


@contextmanager
def unwaiting() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the device meanwhile, which no graph can hold."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is a prototype: a capture follows in any case
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _with_plain_cache(spec: ModelSpec) -> ModelSpec:
    """Return the model with keys and values in the dtype of its activations, since levels are no exact copies."""
    plain = (with_attention(layer, replace(layer.attention, kv_format=KVFormat())) for layer in spec.layers)
    return replace(spec, layers=tuple(plain))


@contextmanager
def unchanged_modules(decoder: ForeignDecoder) -> Iterator[None]:
    """Raise ModelLoadError if a module keeps something of a step: another request's step would then find it."""
    before = _kept(decoder)
    tensors = {name: buffer.clone() for name, buffer in decoder.model.named_buffers()}
    yield
    after = _kept(decoder)
    changed = [name for name, value in after.items() if name not in before or before[name] != value]
    buffers = dict(decoder.model.named_buffers())
    changed += [
        name
        for name in dict.fromkeys((*tensors, *buffers))
        if name not in tensors or name not in buffers or not torch.equal(tensors[name], buffers[name])
    ]
    if changed:
        raise ModelLoadError(f"{decoder.found.name} keeps {changed[0]} from one step to the next, for all requests.")


def _kept(decoder: ForeignDecoder) -> dict[str, Any]:
    """Return the modules' variables by name: the values of plain ones, and the identities of others."""
    plain = (bool, int, float, str, type(None))
    return {
        f"{module_name}.{name}": value if isinstance(value, plain) else id(value)
        for module_name, module in decoder.model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    }
