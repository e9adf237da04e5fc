"""The engine over ranks that divide tokens and cache, as threads: each way to attend together, with every kind of
layer, gives the tokens of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.assembly.choices import choose
from ridgeline.assembly.device import device_worker
from ridgeline.assembly.wiring import Wiring, _engine
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import MaskedDrafts, StepPlan, StepResult
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.models import model_config
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.scan import PieceScan
from ridgeline.worker.local import LocalWorker
from ridgeline.worker.memory import MemoryReport
from ridgeline.worker.share import Stripes
from ridgeline.worker.state import context, context_latents
from tests.driving import Rig, ask, disturbed, rig
from tests.models.latent_configs import DEEPSEEK_V2_LITE
from tests.parallel.threads import ThreadAxis, on_ranks

CPU = torch.device("cpu")
LONG = [int(token) for token in np.random.default_rng(5).integers(5, 250, 90)]


class Threads:
    """A worker whose ranks are threads. All compute; the first one's results count, and the others' must equal them."""

    def __init__(self, config: LLMConfig, ranks: int) -> None:
        def rank(axis: ThreadAxis) -> tuple[LocalWorker, MemoryReport]:
            return device_worker(choose(config, CPU, Mesh(cp=axis)), None)

        made = on_ranks(ranks, rank)
        self.workers, self.memory = [worker for worker, _ in made], made[0][1]

    def submit(self, plan: StepPlan) -> None:
        for worker in self.workers:
            worker.submit(plan)

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        for worker in self.workers:
            worker.provide_masks(plan_id, masks, drafts)

    def collect(self) -> StepResult:
        first, *others = [worker.collect() for worker in self.workers]
        for other in others:
            assert other.error == first.error
            np.testing.assert_array_equal(other.tokens_RK, first.tokens_RK)
        return first

    def shutdown(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(LocalWorker.shutdown, self.workers))


def asked() -> list[Request]:
    return [
        ask("short", [9, 9, 4], max_tokens=12),
        ask("long", LONG, max_tokens=8),
        ask("found", [*LONG[:60], 7], max_tokens=8),
        ask("drawn", LONG[:41], max_tokens=8, seed=1, temperature=1.0),
        ask("scored", LONG[:30], prompt_logprobs=1, max_tokens=3),
    ]


def divided(folder: Path, ranks: int, **settings: Any) -> tuple[Threads, Rig]:
    config = LLMConfig(
        model=folder,
        dtype="float32",
        device="cpu",
        debug_checks=True,
        max_num_batched_tokens=32,
        block_size=4,
        max_num_seqs=4,
        prefill_context_parallel_size=ranks,
        prefill_context_parallel_threshold=ranks,
        **settings,
    )
    group = Threads(config, ranks)
    vocabulary = group.workers[0].runner.decoder.spec.vocab_size
    return group, Rig(_engine(config, group, Wiring(group.memory, vocabulary, 4, False, None, False)))


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("family", "ranks", "form"),
    [
        ("llama", 2, "heads"),
        ("gpt2", 4, "heads"),
        ("llama", 8, "keys"),
        ("mistral", 4, "keys"),
        ("mistral", 3, "queries"),
        ("gemma2", 2, "keys"),
        ("gemma2", 2, "heads"),
        ("gpt_oss", 2, "keys"),
        ("gpt_oss", 4, "queries"),
        ("gpt_oss", 2, "heads"),
        ("bloom", 4, "keys"),
        ("bloom", 2, "queries"),
        ("bloom", 2, "heads"),
    ],
)
def test_ranks_give_the_tokens_of_one_device(
    family: str, ranks: int, form: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, used = tiny_model(family), Counter[str]()

    def forced(*_: object) -> str:
        used[form] += 1
        return form

    monkeypatch.setattr(context, "cheapest", forced)
    with rig(folder) as one:
        want = one.run(*asked())
    _, own = divided(folder, ranks)
    try:
        got = own.run(*asked())
        assert own.errors == []
    finally:
        own.engine.shutdown()
    assert used[form] >= 3 * ranks, "too few steps were divided"
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert len(got[name].prompt) == len(outcome.prompt)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "ranks", "form"),
    [
        ("deepseek_v2", 2, "keys"),
        ("deepseek_v3", 3, "queries"),
        ("kimi_linear", 2, "queries"),
        ("minicpm3", 4, "keys"),
        ("kimi_linear", 3, "keys"),
        ("deepseek_v3", 2, "heads"),
        ("kimi_linear", 2, "heads"),
        ("minicpm3", 4, "heads"),
    ],
)
def test_ranks_divide_latents_and_give_the_tokens_of_one_device(
    family: str, ranks: int, form: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors go around, or queries do, also between layers whose states need stretches. Or ranks have some heads each,
    and make their keys and values."""
    folder, used = tiny_model(family), Counter[str]()

    def forced(*_: object) -> str:
        used[form] += 1
        return form

    monkeypatch.setattr(context_latents.ContextLatents, "form", forced)
    with rig(folder) as one:
        want = one.run(*asked())
    _, own = divided(folder, ranks, kv_cache_memory=1 << 23)
    try:
        got = own.run(*asked())
        assert own.errors == []
    finally:
        own.engine.shutdown()
    assert used[form] >= 3 * ranks, "too few steps were divided"
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert len(got[name].prompt) == len(outcome.prompt)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(("qwen3_5", 2), ("qwen3_5", 4), ("falcon_h1", 3), ("zamba2", 2), ("mamba2", 4), ("mamba", 3), ("jamba", 2)),
        *(("lfm2", 4), ("rwkv", 2)),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("lfm2", 8), ("rwkv", 4))),
    ],
)
def test_ranks_divide_the_tokens_of_recurrent_layers(
    family: str, ranks: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests begin at states that divided prompts have left at marks and at their ends."""
    folder, scanned, run = tiny_model(family), Counter[int](), PieceScan.run

    def counted(scan: PieceScan, metadata: ScanMetadata, *arguments: Any) -> Tensor:
        outputs_T = run(scan, metadata, *arguments)
        scanned[metadata.num_tokens] += len(outputs_T)
        return outputs_T

    monkeypatch.setattr(PieceScan, "run", counted)
    again = [ask("again", [*LONG, 11], max_tokens=4), ask("turn", [*LONG[:41], 8, 8, 8], max_tokens=4)]
    with rig(folder) as one:
        want = {**one.run(*asked()), **one.run(*again)}
    assert not scanned
    _, own = divided(folder, ranks, kv_cache_memory=1 << 23)
    try:
        got = {**own.run(*asked()), **own.run(*again)}
        assert own.errors == []
        assert own.engine.scheduler.cache.checkpoints.counts.used > 0
    finally:
        own.engine.shutdown()
    assert sum(scanned.values()) > 0
    for tokens, of_all_ranks in scanned.items():
        assert of_all_ranks % tokens == 0, "ranks together scan each token once"
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert len(got[name].prompt) == len(outcome.prompt)


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen3_5", 2), ("falcon_h1", 3), pytest.param("mamba2", 4, marks=pytest.mark.thorough)]
)
def test_states_survive_requests_that_give_way_and_leave(
    family: str, ranks: int, tiny_model: Callable[[str], Path]
) -> None:
    """Conversations that begin alike, in any chunks, some of them with guidance, of which some are lost and made
    again."""
    draw = Random(ranks)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "guidance_scale": 1.6},
        {"logprobs": 2, "repetition_penalty": 1.4},
        {"prompt_logprobs": 1},
    ]
    begun = [(LONG[: draw.choice([1, 2, 9, 33, 60])], draw.choice([0, 1, 8, 20])) for _ in range(10)]
    prompts = [[*start, *(draw.randrange(5, 250) for _ in range(more))] for start, more in begun]
    requests = [ask(str(n), prompt, seed=n, **kinds[n % 4]) for n, prompt in enumerate(prompts)]
    with rig(tiny_model(family)) as one:
        want = {request.id: one.run(request)[request.id].tokens for request in requests}
    _, own = divided(tiny_model(family), ranks, kv_cache_memory=1 << 22)
    try:
        own.add(*requests)
        left = disturbed(own, draw, gives_way=0.4, leaves=0.04)
        assert own.errors == []
        pool = own.engine.scheduler.cache.pool
        assert pool.free_pages == pool.num_pages
    finally:
        own.engine.shutdown()
    for name, tokens in want.items():
        got = own.outcomes[name].tokens
        assert got == (tokens[: len(got)] if name in left else tokens), name


def test_ranks_never_go_on_with_unlike_tokens(tiny_model: Callable[[str], Path]) -> None:
    """As where one of them has rounded otherwise: all take the first one's."""
    with rig(tiny_model("llama")) as one:
        want = one.run(*asked())
    group, own = divided(tiny_model("llama"), 2)
    ops = group.workers[1].runner.segments._ops
    drawn = ops.sample
    ops.sample = lambda *arguments: 0 * drawn(*arguments) + 7  # type: ignore[method-assign]
    try:
        got = own.run(*asked())
    finally:
        own.engine.shutdown()
    assert {name: outcome.tokens for name, outcome in got.items()} == {n: o.tokens for n, o in want.items()}


@pytest.mark.parametrize(
    ("ranks", "rows", "form"),
    [
        (2, [(8192, 8192)], "heads"),  # a prompt
        (2, [(2048, 30_000)], "heads"),
        (2, [(128, 60_000)], "keys"),  # a few tokens behind many: keys and values would be made of all of these
        (2, [(1024, 1024)] + [(1, 30_000)] * 64, "queries"),
        (3, [(8192, 8192)], "keys"),  # three ranks do not divide 16 heads
        (2, [(4, 900_000)], "queries"),  # one layer's vectors are more than 1 GiB
    ],
)
def test_ranks_have_some_heads_each_where_that_takes_fewer_flops(
    ranks: int, rows: list[tuple[int, int]], form: str
) -> None:
    mixer = model_config(DEEPSEEK_V2_LITE).spec.layers[0].mixer
    assert isinstance(mixer, LatentAttentionSpec)
    new_R, end_R = np.array(rows).T

    def found(axis: ThreadAxis) -> str:
        share = Stripes(axis, new_R, end_R, CPU)
        held = 32
        blocks = SimpleNamespace(id_B=np.zeros(int((-(-end_R // (held * ranks))).sum())))
        group = SimpleNamespace(
            _block_size=held, _dtype=torch.bfloat16, ops=SimpleNamespace(platform=SimpleNamespace(device_type="cuda"))
        )
        return context_latents.ContextLatents.form(group, mixer, share, blocks)  # type: ignore[arg-type]

    assert set(on_ranks(ranks, found)) == {form}
