"""What the KV cache may take, and what is said where it is too little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ridgeline.assembly import Assembly, choices
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import Reserved, StepSizes, reserved
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.settings.config import EngineConfig, LLMConfig
from ridgeline.core.settings.draft_tree import LookaheadTree
from ridgeline.core.settings.speculation import speculation_of
from ridgeline.core.specs.cache_layout import CacheLayout, group_layers
from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import AttentionSpec, MLPSpec, ModelSpec, with_draft
from ridgeline.core.specs.state import DTYPE_BYTES, KVSpec, RecurrentSpec, StatePart, StateSpec
from ridgeline.defaults import choose_dtype
from ridgeline.kernels.attention.expanded import cost
from ridgeline.kernels.attention.paged.cost import pieces_bytes
from ridgeline.kernels.base.kv_format import KVFormat
from ridgeline.models import model_config
from ridgeline.parallel.scan import TOLD_COPIES
from ridgeline.perf import latent
from ridgeline.perf.activations import Activations
from ridgeline.serving.processes.loaded import facts_of
from ridgeline.weights.loader import empty_decoder
from ridgeline.worker import memory
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.lookahead import Lookahead
from ridgeline.worker.state import expanding
from ridgeline.worker.state.states import DeviceRows
from tests.damaged_files import config_of

GB = 10**9
SPEC = model_config(config_of("LlamaForCausalLM")).spec


def planned(spec: ModelSpec, config: LLMConfig, **choices: Any) -> memory.MemoryReport:
    """Plan for 2 requests of 64 tokens in steps of 16, in float32 on a CPU, unless `choices` say otherwise."""
    of: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "weights": 0, "loaded": True, "draft": None, "ranks": 1, "longest": 64,
        "max_seqs": 2, "max_tokens": 16, **choices,
    }  # fmt: skip
    dtype, draft, device = of.pop("dtype"), of.pop("draft"), torch.device(of.pop("device"))
    budget = memory.Budget(device=device, config=config, weights=of.pop("weights"), loaded=of.pop("loaded"))
    sizes = StepSizes.of(config, device_type=device.type, itemsize=DTYPE_BYTES[dtype], **of)
    cache = CacheLayout(
        groups=with_draft(spec, draft).cache_groups,
        block_size=sizes.ranks * (config.block_size or DEFAULT_BLOCK_SIZE[device.type]),
        dtype=dtype,
        num_pages=2,
        ranks=sizes.ranks,
        scratch=sizes.scratch,
    )
    return memory.plan_memory(cache, sizes, memory.parts_of(spec, config, draft), budget)


def plan(config: LLMConfig, device: str, **choices: Any) -> int:
    return planned(SPEC, config, device=device, **choices).max_model_len


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB, of which this process holds 16, and others 56."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 16 * GB)


@pytest.mark.usefixtures("gpu")
def test_a_full_gpu_is_told_apart_from_a_large_model() -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan(LLMConfig(gpu_memory_utilization=0.9), "cuda:0")
    words = str(caught.value)
    for part in ("has 0 B", "80.00 GB on cuda:0", "8.00 GB are free", "16.00 GB hold", "56.00 GB are in other use"):
        assert part in words
    assert "keeps 8.00 GB back" in words
    assert "activations take" in words
    assert words.index("end what else runs there") < words.index("lower max_model_len")
    assert plan(LLMConfig(gpu_memory_utilization=0.95), "cuda:0") == 64


@pytest.mark.usefixtures("gpu")
def test_weights_that_are_not_loaded_yet_are_counted() -> None:
    config = LLMConfig(gpu_memory_utilization=0.95)  # leaves 4 GB
    assert plan(config, "cuda:0", weights=3 * GB, loaded=False) == 64
    with pytest.raises(InvalidConfig, match=r"the weights 5\.00 GB"):
        plan(config, "cuda:0", weights=5 * GB, loaded=False)


def test_kv_cache_memory_that_is_too_small_is_named_itself() -> None:
    with pytest.raises(InvalidConfig, match=r"has 9\.00 KB.*that is kv_cache_memory; raise it.*lower max_model_len to"):
        plan(LLMConfig(kv_cache_memory=9000, max_model_len=64), "cpu")


def test_a_cpu_without_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 4 * GB)
    monkeypatch.setattr(memory, "reserved", lambda *_: 3 * GB)
    with pytest.raises(InvalidConfig, match=r"4\.00 GB are free on this machine, of which it may use half"):
        plan(LLMConfig(), "cpu")


def test_the_table_of_recent_outputs_is_counted() -> None:
    def activations(tokens: int) -> int:
        config = {"method": "ngram", "num_speculative_tokens": 4, "lookup_recent_tokens": tokens}
        return planned(SPEC, LLMConfig(speculative_config=config)).activations

    assert activations(65_536) - activations(0) == 2 << 20  # 262,144 places of 8 bytes
    assert activations(65_537) - activations(0) == 4 << 20


def drafted(config: dict[str, Any] | None, max_seqs: int = 2) -> int:
    draft = SPEC if config and config["method"] == "eagle" else None
    asked = LLMConfig(speculative_config=config)
    return planned(SPEC, asked, max_seqs=max_seqs, max_tokens=64 * max_seqs, draft=draft).activations


def test_the_pools_of_lookahead_decoding_are_counted() -> None:
    config = {"method": "lookahead", "window_size": 1, "ngram_size": 2, "verification_set_size": 62}
    chain = {"method": "medusa", "num_speculative_tokens": 16}
    asked, slots = speculation_of(config), Slots(2, 1, 16, 1, torch.device("cpu"))
    assert asked is not None
    assert isinstance(asked.tree, LookaheadTree)
    made = Lookahead(asked.tree, slots, 64)
    pools = made.pool_SEX.nbytes + made.turn_SB.nbytes
    scores = 2 * (63 - 16) * 3 * 4 * SPEC.vocab_size  # of the further drafts of two rows
    assert drafted(config) - drafted(chain) == pools + scores + 3 * 4 * (63 - 16)


@pytest.mark.parametrize(
    ("tree", "scored"),
    [
        ({"num_speculative_tokens": 2, "eagle_topk": 60, "num_draft_tokens": 3}, 60),
        ({"num_speculative_tokens": 1, "eagle_topk": 2, "num_draft_tokens": 3}, 3),  # two drafts and the last token
        ({"speculative_token_tree": [[0], [0, 0]]}, 3),
    ],
)
def test_the_scores_of_all_nodes_that_are_expanded_at_once_are_counted(tree: dict[str, Any], scored: int) -> None:
    """A wide tree of which few drafts are verified has more rows of scores while it is drafted."""
    each = drafted({"method": "eagle", **tree}, 3) - drafted({"method": "eagle", **tree}, 2)
    chain = {"method": "eagle", "num_speculative_tokens": 1}  # two tokens a row are scored
    plain = drafted(chain, 3) - drafted(chain, 2)
    assert each - plain == (scored - 2) * 3 * 4 * SPEC.vocab_size + 4


@pytest.mark.parametrize(("max_seqs", "max_chunk", "pieces"), [(3, 64, 6 + 3), (64, 64, 14 + 3), (64, 8, 3)])
def test_what_ranks_tell_of_recurrent_states_is_counted(max_seqs: int, max_chunk: int, pieces: int) -> None:
    """Rows of more than 8 tokens are told, of which 64 tokens have room for seven: two pieces each, and a cut of each
    rank."""
    spec = model_config(config_of("Qwen3NextForCausalLM")).spec

    def activations(token_ranks: int) -> int:
        return planned(
            spec, LLMConfig(), dtype="bfloat16", max_seqs=max_seqs, max_tokens=max_chunk, ranks=token_ranks
        ).activations

    each = 2 * 4 * (4 * 4 * 8)  # of a delta rule's state, which is larger than a convolution's: float32, twice
    assert activations(2) - activations(1) == TOLD_COPIES * pieces * each
    assert activations(300) - activations(2) == TOLD_COPIES * 298 * each


@pytest.mark.parametrize("limit", [1, 3000, 20_000, 1 << 20])
@pytest.mark.parametrize("rows", [[(128, 128)], [(128, 500), (128, 200), (128, 140), (128, 500)], [(300, 301)] * 3])
def test_what_long_rows_take_at_once_is_planned_for(
    rows: list[tuple[int, int]], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (expanding, cost):
        monkeypatch.setattr(module, "EXPANDED_BYTES", limit)
    mixer = LatentAttentionSpec(
        num_heads=3, key_dim=5, rope_dim=2, value_dim=6, rank=9, query_rank=0, scale=1.0, norm=SPEC.final_norm
    )
    tokens_R, length_R = np.array(rows, np.int32).T
    on_device = DeviceRows(
        slots_R=torch.arange(len(rows)), start_R1=torch.empty(0), kv_len_R=torch.from_numpy(length_R),
        last_R=torch.empty(0), num_tokens=int(tokens_R.sum()), tokens_each=0, num_tokens_R=tokens_R,
        kv_bound_R=length_R,
    )  # fmt: skip
    long_R, table_SC = expanding.long_rows(on_device, mixer), torch.arange(len(rows) * 40).view(-1, 40)
    parts = list(expanding.expanding(on_device, long_R, table_SC, 16, mixer.width * 2))
    assert sum(len(part.rows.first_R) for part in parts) == len(rows)
    kept = sum(part.block_J.nbytes + part.offset_J.nbytes for part in parts)
    most = 0
    for keys in (len(part.block_J) for part in parts):
        heads = min(mixer.num_heads, expanding._heads_at_once(mixer, keys, 2))
        most = max(most, 2 * keys * (mixer.width + heads * (mixer.key_dim + mixer.value_dim)))
    planned = cost.expanded_bytes(
        int(tokens_R.sum()), int(length_R.max()), num_heads=3, key_dim=5, rope_dim=2, value_dim=6, rank=9, itemsize=2
    )
    assert kept + most <= planned
    if len(rows) == 1:  # but for tables that are needed before, and a part of a head
        head, tables = (2 * size * int(length_R[0]) for size in (mixer.key_dim + mixer.value_dim, 3 * 4))
        assert planned - tables - head < kept + most


def test_a_context_whose_steps_leave_no_room_is_shortened(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of the context takes 8 MB of a step here, and there is 1 GB: the model's 256 would leave nothing."""
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * GB)
    monkeypatch.setattr(latent, "expanded_bytes", lambda tokens, longest, **_: 8_000_000 * longest)
    config = LLMConfig(
        model=tiny_model("deepseek_v2"), dtype="float32", device="cpu", max_num_batched_tokens=32, max_num_seqs=2
    )
    assert choices.choose(config, torch.device("cpu")).longest == 64
    with pytest.raises(InvalidConfig, match="one request of 256 tokens"):
        choices.choose(replace(config, max_model_len=256), torch.device("cpu"))
    monkeypatch.setattr(memory, "host_memory", lambda: GB // 10)
    with pytest.raises(InvalidConfig, match="one request of 256 tokens"):
        choices.choose(config, torch.device("cpu"))


@pytest.mark.parametrize("windows", [(8, 8), (8, None), (None, None)])
def test_what_an_api_server_refuses_is_what_could_never_run(windows: tuple[int | None, int | None]) -> None:
    """A window's layers do not keep every token, so the cache serves longer requests than it could hold whole."""
    spec = replace(SPEC, layers=tuple(replace(SPEC.layers[0], mixer=_attention(window)) for window in windows))
    report = planned(spec, LLMConfig(kv_cache_memory=40_000, block_size=4), longest=256)
    pages, longest, layout = report.layout.num_pages - 1, report.max_model_len, report.layout
    needed = [layout.pages_needed(length, 16) for length in range(longest + 1)]
    together = max(a + b for a in range(longest + 1) for b in range(longest + 1) if needed[a] + needed[b] <= pages)
    engine = SimpleNamespace(
        config=EngineConfig(max_model_len=longest, max_num_seqs=2, max_num_batched_tokens=16), layout=layout
    )
    assembly = SimpleNamespace(
        engine=engine,
        memory=report,
        model=SimpleNamespace(spec=spec, eos_token_ids=()),
        folder=Path(),
        dtype="float32",
        precision=SimpleNamespace(name="F32"),
        device="cpu",
    )
    assert longest <= together <= facts_of(cast("Assembly", assembly), LLMConfig(), "", 0).cache_tokens <= 2 * longest


@pytest.mark.parametrize("kinds", ["a", "aas", "s"])
def test_the_tokens_told_are_at_least_those_of_the_requests_told(kinds: str) -> None:
    """A state that every token replaces is no token's; there are a hundred times as many bytes in it."""
    state = RecurrentSpec(parts=(StatePart((8, 64, 64)),))
    specs: list[StateSpec] = [state if kind == "s" else KVSpec(num_kv_heads=1, head_dim=64) for kind in kinds]
    layout = CacheLayout(
        groups=group_layers([(spec,) for spec in specs]), block_size=16, dtype="bfloat16", num_pages=4001
    )
    sizes = StepSizes(device_type="cpu", itemsize=2, max_tokens=512, max_seqs=1, longest=9000)
    report = memory.MemoryReport(weights=0, activations=0, kv_cache=0, layout=layout, max_model_len=9000, sizes=sizes)
    assert report.full_requests > 0
    assert report.tokens >= report.full_requests * report.max_model_len
    assert report.state == kinds.count("s") * 8 * 64 * 64 * 4
    assert ("each with a state of 131.07 KB" in str(report)) == ("s" in kinds)


def _attention(window: int | None) -> AttentionSpec:
    return AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0, window=window)


def test_tables_of_every_rotation_are_counted() -> None:
    """Gemma 3 has two."""
    two = model_config(config_of("Gemma3ForCausalLM")).spec
    more = memory.weight_bytes(two, dtype_bytes=4, positions=1001) - memory.weight_bytes(
        two, dtype_bytes=4, positions=1
    )
    assert more == 1000 * 2 * 8 * 4


def activation_bytes(spec: ModelSpec, **sizes: Any) -> int:
    """Of one request of two bytes a number, unless `sizes` say otherwise."""
    of: dict[str, Any] = {"device_type": "cpu", "itemsize": 2, "max_seqs": 1, "longest": 0, **sizes}
    return Activations(spec).reserve(StepSizes(**of)).passing


def test_pieces_of_keys_are_planned_for_beside_widened_ones() -> None:
    """A cache of plain numbers needs no widened keys, whose memory pieces then take."""
    levels = SPEC.with_kv_format(KVFormat("fp8_e4m3", "row"))
    for device, more in (("cpu", 0), ("cuda", pieces_bytes(SPEC.layers[0].attention.head_dim))):
        plain, quantized = (activation_bytes(each, device_type=device, max_tokens=64) for each in (SPEC, levels))
        assert quantized - plain == more
    assert pieces_bytes(128) > 132 * 4 * 128 * 128 * 4


@dataclass(frozen=True)
class Keeps:
    """A part that keeps some bytes of every request, and takes more while it runs."""

    held: int
    passing: int

    def reserve(self, sizes: StepSizes) -> Reserved:
        return Reserved(self.held * sizes.max_seqs, self.passing)


def test_a_part_that_nobody_knows_is_planned_for() -> None:
    """What is held adds up, and of what passes the largest counts, since networks run one after another."""
    sizes = StepSizes(device_type="cpu", itemsize=4, max_tokens=16, max_seqs=2, longest=64)
    own = reserved([Activations(SPEC)], sizes)
    assert reserved([Activations(SPEC), Keeps(100, 5), Keeps(10, own + 3)], sizes) == 2 * 110 + own + 3
    assert reserved([], sizes) == 0


SHARED = ExpertsSpec(
    routing=RoutingSpec(experts=6, top_k=2, bias=True, correction=True, expert_scale=True),
    intermediate_size=24,
    bias=True,
    shared=MLPSpec(intermediate_size=40),
    shared_gate=True,
)


@pytest.mark.parametrize(
    "feed_forward", [SPEC.layers[0].feed_forward, SHARED, replace(SHARED, shared=None, shared_gate=False)]
)
def test_every_parameter_is_counted(feed_forward: MLPSpec | ExpertsSpec) -> None:
    model = replace(SPEC, layers=tuple(replace(layer, feed_forward=feed_forward) for layer in SPEC.layers))
    tables = memory.weight_bytes(model, dtype_bytes=0, positions=1)
    assert memory.weight_bytes(model, dtype_bytes=4, positions=1) - tables == empty_decoder(model).weight_bytes


def test_the_rows_of_every_pair_have_room() -> None:
    """One float32 row for each of the two experts of a token, on top of what lies between the products."""

    def room(spec: ExpertsSpec, tokens: int) -> int:
        layers = tuple(replace(layer, feed_forward=spec) for layer in SPEC.layers)
        return activation_bytes(replace(SPEC, layers=layers), max_tokens=tokens)

    wide = replace(SHARED, intermediate_size=4096)  # so that experts, and not attention, need most
    each = room(wide, 101) - room(wide, 100)
    assert each == 2 * (4 * SPEC.hidden_size + wide.scratch) + 4 * 2 * SPEC.hidden_size
    assert wide.scratch >= 2 * 2 * 4096  # gate and up of both pairs


@pytest.mark.parametrize("has", [False, True])
def test_the_dtype_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_dtype("auto", "bfloat16", cpu).name == ("bfloat16" if has else "float32")
    assert ("has no instructions" in choose_dtype("auto", "bfloat16", cpu).why) is not has
    assert choose_dtype("auto", "bfloat16", gpu) == ("bfloat16", "the checkpoint's own")
    assert choose_dtype("auto", "float32", cpu) == ("float32", "the checkpoint's own")
    assert choose_dtype("bfloat16", "float32", cpu) == ("bfloat16", "it was asked for")


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from ridgeline import LLM
    from tests.damaged_files import write_base

    with caplog.at_level("INFO", logger="ridgeline"):
        LLM(write_base("LlamaForCausalLM", tmp_path / "model"), device="cpu", kv_cache_memory=1 << 20).shutdown()
    assert "computing in float32 on cpu: the checkpoint's own" in caplog.text
