"""Adapters of engines that are not installed where tests run call them as these engines want to be called."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline_bench.child import measure
from ridgeline_bench.engines import ENGINES, LoadOptions, padded
from ridgeline_bench.engines.padded import in_batches
from ridgeline_bench.engines.ridgeline import Ridgeline
from ridgeline_bench.results import read
from ridgeline_bench.scripts import engines_page
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.workloads import PROCESSOR, Size, decode, prefill, single

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7], [8], [9, 9]]


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)  # others ask whether the package is there
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 4),
    st.integers(18, 60),
)  # fmt: skip
def test_batches_run_every_request_once_and_none_is_too_large(
    requests: list[tuple[int, int]], most: int, room: int
) -> None:
    prompts = [[number] * length for number, (length, _) in enumerate(requests)]
    seen: list[int] = []

    def run(batch: Sequence[Sequence[int]], tokens: int) -> int:
        assert len(batch) <= most
        assert len(batch) == 1 or len(batch) * tokens <= room
        seen.extend(prompt[0] for prompt in batch)
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded, "PADDED_TOKENS", room)
        counts = in_batches(prompts, [count for _, count in requests], run, most)
    assert counts == [count for _, count in requests]
    assert sorted(seen) == list(range(len(requests)))


MADE: list[dict[str, Any]] = []  # the options of every generator


class Generator:
    """ONNX Runtime GenAI's."""

    def __init__(self, _model: object, params: Any) -> None:
        self.options, self.rows = params.options, np.zeros((0, 0), np.int32)
        MADE.append(self.options)

    def append_tokens(self, rows: np.ndarray[Any, Any]) -> None:
        assert rows.dtype == np.int32
        assert len(rows) == self.options["batch_size"] <= 32
        self.options["rows"], self.rows = rows.tolist(), rows

    def is_done(self) -> bool:
        return self.rows.shape[1] >= self.options["max_length"]

    def generate_next_token(self) -> None:
        self.rows = np.concatenate([self.rows, np.ones_like(self.rows[:, :1])], axis=1)

    def get_sequence(self, row: int) -> np.ndarray[Any, Any]:
        return self.rows[row]

    def get_output(self, name: str) -> np.ndarray[Any, Any]:
        assert name == "logits"
        return np.zeros((1, 1, 4), np.float16)


class Params:
    def __init__(self, _model: object) -> None:
        self.options: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options.update(options)


def test_onnxruntime_genai_pads_on_the_right_and_runs_to_the_asked_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: list[str] = []

    def config(folder: str) -> SimpleNamespace:
        assert folder == str(tmp_path)
        return SimpleNamespace(clear_providers=list, append_provider=settings.append, overlay=settings.append)

    installed(
        monkeypatch, "onnxruntime_genai", __version__="0.0.stand-in", is_cuda_available=lambda: True, Config=config,
        Model=lambda config: config, GeneratorParams=Params, Generator=Generator,
    )  # fmt: skip
    kind = ENGINES["onnxruntime_genai"]
    with pytest.raises(InvalidConfig, match=r"models\.builder"):
        kind.check(str(tmp_path))
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"pad_token_id": 3}}))
    threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}
    engine = kind(str(tmp_path), LoadOptions(extra=threads))
    assert settings == ["cuda", json.dumps(threads)]
    assert (engine.version, engine.dtype) == ("0.0.stand-in", "float16")
    assert engine.generate(PROMPTS, [4, 2, 3], 0.6) == [4, 2, 3]
    made = MADE[-1]
    assert sorted(made["rows"]) == [[5, 6, 7], [8, 3, 3], [9, 9, 3]]
    assert (made["min_length"], made["max_length"]) == (7, 7)
    assert (made["do_sample"], made["temperature"]) == (True, 0.6)
    assert list(engine.stream([5, 6], 3)) == [1, 2, 3]
    assert engine.generate([[1]] * 70, [2] * 70, 0.0) == [2] * 70, "in batches of 32"
    engine.close()


def test_deepspeed_runs_the_model_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]
) -> None:
    asked: list[Mapping[str, Any]] = []

    def init_inference(model: Any, **arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(generate=model.generate)

    installed(monkeypatch, "deepspeed", __version__="0.0.stand-in", init_inference=init_inference)
    kind = ENGINES["deepspeed"]
    kind.check("")
    engine = kind(str(tiny_model("llama")), LoadOptions(device="cpu", extra={"replace_with_kernel_inject": True}))
    assert asked[0]["replace_with_kernel_inject"]
    assert str(asked[0]["dtype"]) == f"torch.{engine.dtype}"
    assert asked[0]["tensor_parallel"] == {"tp_size": 1}
    assert engine.generate(PROMPTS, [4, 2, 3], 0.0) == [4, 2, 3]
    assert list(engine.stream([5, 6], 3)) == [1, 2, 3]
    assert engine.version == "0.0.stand-in"


class LMDeploys:
    """LMDeploy's engine: two tokens at a time, the last with FINISH."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.sessions = fails, set[int]()
        self.model_config = SimpleNamespace(dtype="torch.bfloat16")

    def create_instance(self) -> LMDeploys:
        return self

    async def async_stream_infer(self, session: int, *, input_ids: list[int], gen_config: Any) -> AsyncIterator[Any]:
        assert session not in self.sessions, "each request is a session of its own"
        self.sessions.add(session)
        assert input_ids
        assert gen_config.ignore_eos
        left = gen_config.max_new_tokens
        while left > 0:
            status = "OUT_OF_MEMORY" if self.fails else "SUCCESS" if left > 2 else "FINISH"
            yield SimpleNamespace(status=SimpleNamespace(name=status), token_ids=[0] * min(2, left))
            left -= 2

    def close(self) -> None:
        pass


def lmdeploy(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[Any]:
    configs: list[Any] = []

    def from_pretrained(model: str, *, engine_config: Any) -> LMDeploys:
        configs.append((model, engine_config))
        return LMDeploys(fails)

    settings = {"PytorchEngineConfig": SimpleNamespace, "GenerationConfig": SimpleNamespace}
    installed(monkeypatch, "lmdeploy", __version__="0.0.stand-in", **settings)
    installed(monkeypatch, "lmdeploy.pytorch", __path__=[])
    engine = SimpleNamespace(from_pretrained=from_pretrained)
    installed(monkeypatch, "lmdeploy.pytorch.engine", Engine=engine)
    return configs


def test_lmdeploy_is_driven_as_its_own_benchmark_drives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = lmdeploy(monkeypatch)
    kind = ENGINES["lmdeploy"]
    kind.check("")
    engine = kind("folder", LoadOptions(max_model_len=256, memory=0.5, extra={"eager_mode": True}))
    model, config = configs[0]
    assert (model, config.session_len, config.cache_max_entry_count) == ("folder", 256, 0.5)
    assert config.eager_mode
    assert (engine.version, engine.dtype) == ("0.0.stand-in", "bfloat16")
    assert engine.generate(PROMPTS, [4, 1, 3], 0.6) == [4, 1, 3]
    assert list(engine.stream([5, 6], 5)) == [2, 4, 5]
    engine.close()


def test_lmdeploy_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lmdeploy(monkeypatch, fails=True)
    kind = ENGINES["lmdeploy"]
    with pytest.raises(InvalidConfig, match="random_model"):
        kind("folder", LoadOptions(dummy=True))
    with pytest.raises(RidgelineError, match="OUT_OF_MEMORY"):
        kind("folder", LoadOptions()).generate(PROMPTS, [4, 1, 3], 0.0)


@pytest.mark.parametrize("name", ["deepspeed", "lmdeploy", "onnxruntime_genai", "sglang", "vllm"])
def test_an_engine_that_is_not_installed_says_how_to_get_it(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name.replace('_', '-')} cannot be imported"):
        ENGINES[name].check("")


def test_the_page_has_the_tables_of_the_stored_results() -> None:
    page = (ROOT / "docs" / "engines.md").read_text().splitlines()
    tables = [engines_page.compared(read([engines_page.COMPARED]))]
    tables += [engines_page.beside(own, peer) for own, peer in engines_page.pairs()]
    assert len(tables) > 1
    for table in tables:
        assert table[0] in page, "python -m ridgeline_bench.scripts.engines_page prints the tables"
        assert page[page.index(table[0]) :][: len(table)] == table


def test_stored_decode_steps_have_the_products_of_seven_layers() -> None:
    """The embedded model's. Ours has four products in a layer, transformers seven; both have one for the scores."""
    for own, peer in (pair for pair in engines_page.pairs() if pair[0]["model"] == "embedded"):
        for side, each in ((own, 4), (peer, 7)):
            assert {name: calls for name, _, calls in side["top"]}["aten::mm"] == 7 * each + 1
            parts = side["busy_ms"] + side["short_pauses_ms"] + side["long_pauses_ms"]
            assert parts == pytest.approx(side["traced_ms"])


def test_the_page_names_every_adapter() -> None:
    page = (ROOT / "docs" / "engines.md").read_text()
    assert {name for name in ENGINES if f"| `{name}` |" not in page} == {"ridgeline"}


def test_experts_that_decode_steps_reached_are_told_before_their_times() -> None:
    """One token reaches exactly its own two experts of each layer, more tokens no fewer, and none is counted where
    nothing decodes or the model has no experts."""
    engine = Ridgeline(str(SHAPES / "mixtral-tiny"), LoadOptions(device="cpu", dummy=True, max_model_len=256))
    told: list[dict[str, Any]] = []

    def say(event: str, **fields: Any) -> None:
        told.append({"event": event, **fields})

    size = Size(scale=0.01, vocab_size=64)
    for workload in (next(single(size)), next(decode(Size(scale=0.2, vocab_size=64))), next(prefill(size))):
        measure(engine, workload, say)
    engine.close()
    figures = [line for line in told if line["event"] == "metric" and not line["name"].endswith(PROCESSOR)]
    assert [line["name"] for line in figures] == [
        "experts touched", "tpot", "ttft", "experts touched", "step b8", "prefill 1x1024",
    ]  # fmt: skip
    one, more = (line for line in figures if line["name"] == "experts touched")
    assert one["value"] == 2
    assert 2 <= more["value"] <= 8
    assert (one["unit"], one["better"]) == ("of 8", "neither")
    dense = Ridgeline(str(SHAPES / "random-25m"), LoadOptions(device="cpu", dummy=True, max_model_len=64))
    assert dense.touched([[1, 2]], 2) is None
    dense.close()
