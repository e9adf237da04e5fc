"""Weights that are loaded by a thread while the first steps run."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path
from weakref import ReferenceType, ref

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.assembly import device, wiring
from ridgeline.assembly.loading import SWITCH_SECONDS, LoadingWeights
from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.weights.loader import Progress, empty_decoder, stored_as
from ridgeline.worker.runner import Runner
from tests.tiny_models import save

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


def test_what_was_loaded_is_there_behind_the_end_and_what_it_raised_is_raised() -> None:
    before, told, loaded = sys.getswitchinterval(), list[float](), threading.Event()

    def load(tell: Progress) -> None:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        tell("loading weights", 0.5)
        loaded.set()

    LoadingWeights(load, lambda what, fraction: told.append(fraction)).finish()
    assert loaded.is_set()
    assert told == [0.5]

    def fail(tell: Progress) -> None:
        raise ModelLoadError("a file is damaged.")

    with pytest.raises(ModelLoadError, match="damaged"):
        LoadingWeights(fail, None).finish()
    LoadingWeights(fail, None).stop()
    assert sys.getswitchinterval() == before


def test_turns_stay_short_until_the_last_of_two_models_is_loaded() -> None:
    before, first, second = sys.getswitchinterval(), *(LoadingWeights(lambda tell: None, None) for _ in range(2))
    first.finish()
    first.stop()
    assert sys.getswitchinterval() == pytest.approx(min(SWITCH_SECONDS, before))
    second.finish()
    assert sys.getswitchinterval() == before


def test_a_start_that_is_given_up_does_not_wait_for_all_weights() -> None:
    begun, parts = threading.Event(), list[int]()

    def load(tell: Progress) -> None:
        for part in range(1_000_000):
            parts.append(part)
            begun.set()
            tell("loading weights", part / 1_000_000)

    loading = LoadingWeights(load, None)
    assert begun.wait(10)
    loading.stop()
    assert len(parts) < 1_000_000


@pytest.mark.parametrize(
    ("name", "kept"), [("llama-8b", True), ("qwen3-0.6b", True), ("mixtral-tiny", False), ("mamba2-2.7b", False)]
)
def test_networks_that_keep_their_weights_as_loaded(name: str, kept: bool) -> None:
    spec = model_config(json.loads((MODELS / name / "config.json").read_text())).spec
    assert empty_decoder(spec).keeps_weights == kept


def test_files_of_one_type_are_told_from_others(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama")
    assert stored_as(folder, "float32")
    assert not stored_as(folder, "bfloat16")


def test_an_engine_whose_weights_came_beside_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, params = save("llama", tmp_path / "llama"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (1, 7, 20)]

    def written() -> list[tuple[int, ...]]:
        llm = LLM(folder, skip_tokenizer_init=True, device="cpu")
        assert ("weights" in {stage.name for stage in llm.timeline.stages}) is True
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.shutdown()
        return [tuple(each.outputs[0].token_ids) for each in found]

    expected = written()
    monkeypatch.setattr(device, "loads_beside", lambda choices, decoder: True)
    assert written() == expected


def test_damaged_files_end_a_start_beside_whose_weights_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("llama", tmp_path / "llama")

    def fail(*_: object, **__: object) -> None:
        raise ModelLoadError("a file is damaged.")

    monkeypatch.setattr(device, "loads_beside", lambda choices, decoder: True)
    monkeypatch.setattr(device, "load_weights", fail)
    made = list[ReferenceType[Runner]]()
    begin = Runner.__init__
    monkeypatch.setattr(Runner, "__init__", lambda self, *a, **k: (begin(self, *a, **k), made.append(ref(self)))[0])
    with pytest.raises(ModelLoadError, match="damaged"):
        LLM(folder, skip_tokenizer_init=True, device="cpu")
    gc.disable()
    try:
        assert [each() for each in made] == [None]  # with its cache: another model may be loaded now
    finally:
        gc.enable()


def test_loading_ends_with_a_start_that_fails_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = save("llama", tmp_path / "llama"), sys.getswitchinterval()

    def load(*_: object, progress: Progress, **__: object) -> None:
        for part in range(1_000_000):
            time.sleep(0.001)
            progress("loading weights", part / 1_000_000)

    def fail(_: object) -> None:
        raise LookupError("no such rates.")

    monkeypatch.setattr(device, "loads_beside", lambda choices, decoder: True)
    monkeypatch.setattr(device, "load_weights", load)
    monkeypatch.setattr(wiring, "hardware_of", fail)
    with pytest.raises(LookupError, match="rates"):
        LLM(folder, skip_tokenizer_init=True, device="cpu")
    assert not any(thread.name.startswith("ridgeline-weights") for thread in threading.enumerate())
    assert sys.getswitchinterval() == before
