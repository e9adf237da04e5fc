"""No bit of a request depends on how it ran, with kernels that promise so: alone, in chunks of any size, from a kept
state, or in parts after it gave way. One family for each kind of state, and for layers with two.

On a CPU the kernels run in Triton's interpreter. A GPU has prompts of more tokens than its chunks have.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ridgeline.assembly import choices
from ridgeline.core.plan.request import Preemption, Request
from ridgeline.core.specs.model import LayerSpec, MLPSpec, ModelSpec
from ridgeline.kernels.ops import DETERMINISTIC
from ridgeline.models import model_config
from ridgeline.weights.loader import read_model_config
from tests.driving import Rig, ask, rig
from tests.models.test_linear import CONFIGS, KIMI, NORM
from tests.test_triton_engine import TRITON
from tests.tiny_models import VOCAB
from tests.worker.test_company import Bits, bits_of

# short convolutions; the gated delta rule; Mamba-2 beside attention; Mamba; RWKV's weighted means; states side by side
FAMILIES = ("lfm2", "qwen3_5", "bamba", "mamba", "rwkv", "falcon_h1", "zamba2")
LINEAR: dict[str, ModelSpec] = {name: model_config(config).spec for name, config in CONFIGS.items()}
LINEAR["kimi"] = replace(
    LINEAR["gla"],
    layers=(LayerSpec(mixer=KIMI, feed_forward=MLPSpec(intermediate_size=40), norm=NORM),) * 2,
)
SLOW = tuple(pytest.param(family, marks=pytest.mark.thorough) for family in FAMILIES[1:])  # to interpret
CHUNKS = (1, 2, 5, 63, 64, 65, 200, 512)  # of GPUs
Open = Callable[..., AbstractContextManager[Rig]]


def words(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 300) for _ in range(count))


def asked(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return ask(name, prompt, max_tokens=max_tokens, logprobs=1)


def run(own: Rig, *requests: Request) -> dict[str, Bits]:
    own.run(*requests)
    return bits_of(own)


def interpreted(folder: Path, **settings: Any) -> AbstractContextManager[Rig]:
    pytest.importorskip("triton")
    options = {"kernels": {**TRITON, **DETERMINISTIC}, "debug_checks": False, "kv_cache_memory": 1 << 22}
    return rig(folder, **{**options, **settings})


def with_context(folder: Path, copy: Path, tokens: int) -> Path:
    """Return a copy of a tiny model that takes so many tokens."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part |= dict.fromkeys({"max_position_embeddings", "context_length"} & part.keys(), tokens)
        if (rope := part.get("rope_parameters") or {}).get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = int(tokens / rope["factor"])
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def on_gpu(folder: Path, **settings: Any) -> AbstractContextManager[Rig]:
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "kv_cache_memory": 1 << 26}
    return rig(folder, **{**options, "max_model_len": 900, **settings})


@contextmanager
def linear(name: str, llama: Path, opened: Open, **settings: Any) -> Iterator[Rig]:
    """An engine for one of `LINEAR`, which no library has, with random weights. llama: a folder in whose place it is
    loaded."""
    config = replace(
        read_model_config(llama), spec=replace(LINEAR[name], vocab_size=VOCAB, max_position_embeddings=1024)
    )
    known = patch.object(choices, "described", lambda folder, *more: config)
    with known, opened(llama, load_format="dummy", **settings) as own:
        fill(own.runner.decoder)
        yield own


@torch.inference_mode()
def fill(decoder: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in decoder.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim >= 2 else 0.2)
        parameter.copy_(values + name.endswith("norm.weight"))


def check_bits(
    open_rig: Open, length: int, max_tokens: int, chunks: tuple[int, ...], rounds: int, *, recurs: bool = True
) -> None:
    """A conversation of two turns, a prompt that shares half of the first turn's, and nothing else in the same rig."""
    first = asked("first", words(length, 1), max_tokens)
    half = asked("half", (*words(length, 1)[: length // 2], *words(length // 3, 2)), max_tokens)
    with open_rig(max_num_batched_tokens=4 * length, enable_prefix_caching=False) as own:
        alone = run(own, first)
        # the second turn begins with all of the first but its last token, which was drawn and not run
        known = (*first.prompt_token_ids, *alone["first"][0])
        second = asked("second", (*known, *words(5, 3)), max_tokens)
        run(own, second)
        alone = run(own, half)
    assert all(len(tokens) == len(scored) == max_tokens for tokens, scored, _ in alone.values())
    assert len({tuple(tokens) for tokens, _, _ in alone.values()}) > 1
    for chunk in chunks:
        with open_rig(max_num_batched_tokens=chunk, max_num_seqs=min(4, chunk)) as own:
            cache = own.engine.scheduler.cache
            run(own, first)
            assert cache.hit_tokens == 0
            run(own, second)
            assert cache.hit_tokens == len(known) - 1, "the second turn did not begin where the first one ended"
            assert run(own, half) == alone
    with open_rig(max_num_batched_tokens=max(4, length // 3)) as own:
        scheduler = own.engine.scheduler
        for _ in range(rounds):  # in the second round they share what the first one left
            own.add(first, second, half)
            for step in range(1000):
                if not own.engine.has_work:
                    break
                running = sorted(scheduler.running.leaders(), key=lambda seq: seq.id)
                if step % 3 == 2 and step < 40 and running:
                    scheduler._preempt(running[step % len(running)], Preemption.BLOCKS)
                own.step()
            assert bits_of(own) == alone
        assert scheduler.preemptions.total() > (2 if recurs else 1)
        assert not recurs or scheduler.cache.checkpoints.counts.used > 0


@pytest.mark.thorough
def test_no_bit_depends_on_how_a_request_of_latents_ran(tiny_model: Callable[[str], Path]) -> None:
    """They are no states, but a long prompt's tiles and a token's items must agree as well."""
    folder = tiny_model("deepseek_v3")
    check_bits(lambda **settings: interpreted(folder, **settings), 12, 3, (1, 5), rounds=1, recurs=False)


@pytest.mark.dealt
def test_no_bit_depends_on_how_a_request_of_chosen_latents_ran(tiny_model: Callable[[str], Path]) -> None:
    """An indexer chooses ten of up to 20 tokens, in a first chunk as behind others, after hits and after preemption."""
    folder = tiny_model("deepseek_v32")
    settings = {"kv_cache_dtype": "int8"}
    check_bits(lambda **own: interpreted(folder, **settings, **own), 12, 3, (5,), rounds=1, recurs=False)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_no_bit_depends_on_how_a_request_of_latents_ran_on_a_gpu(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_context(tiny_model(family), tmp_path / "longer", 1024)
    check_bits(lambda **settings: on_gpu(folder, **settings), 530, 24, CHUNKS, rounds=2, recurs=False)


@pytest.mark.dealt
@pytest.mark.parametrize("family", [FAMILIES[0], *SLOW])
def test_no_bit_depends_on_how_a_request_ran(family: str, tiny_model: Callable[[str], Path]) -> None:
    check_bits(lambda **settings: interpreted(tiny_model(family), **settings), 12, 3, (1, 5), rounds=1)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in LINEAR])
def test_no_bit_depends_on_how_linear_attention_ran(name: str, tiny_model: Callable[[str], Path]) -> None:
    check_bits(lambda **own: linear(name, tiny_model("llama"), interpreted, **own), 12, 3, (1, 5), rounds=1)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_depends_on_how_a_request_ran_on_a_gpu(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_context(tiny_model(family), tmp_path / family, 1024)
    check_bits(lambda **settings: on_gpu(folder, **settings), 530, 24, CHUNKS, rounds=2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
def test_no_bit_depends_on_how_linear_attention_ran_on_a_gpu(name: str, tiny_model: Callable[[str], Path]) -> None:
    check_bits(lambda **own: linear(name, tiny_model("llama"), on_gpu, **own), 530, 24, CHUNKS, rounds=2)
