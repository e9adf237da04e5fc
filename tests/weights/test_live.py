"""Weights that are replaced in a loaded model give what a model gives that was loaded with them."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.layers.decoder import Decoder
from ridgeline.weights.live import LiveWeights
from ridgeline.worker.local import LocalWorker

TinyModel = Callable[[str], Path]
# Fused projections, rows stored head by head and in pairs, offsets of norms, tied and transposed matrices
FAMILIES = ("qwen3", "phi3", "gemma2", "bloom", "neox", "mixed", "granite")
PROMPT = {"prompt_token_ids": list(range(3, 40))}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, detokenize=False)


def loaded(folder: Path, *, deterministic: bool = True) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", skip_tokenizer_init=True, deterministic=deterministic)


def answer(llm: LLM) -> tuple[int, list[int], list[object]]:
    [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    [one] = output.outputs
    return output.weight_version, list(one.token_ids), list(one.logprobs or [])


def others(folder: Path, target: Path) -> dict[str, Tensor]:
    """The model with other numbers, which `target` then holds."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, each in load_file(folder / "model.safetensors").items():
        drawn = torch.randn(each.shape, generator=generator)
        tensors[name] = (each.float() * (1 + 0.3 * drawn) if each.is_floating_point() else each).to(each.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return {name: each for name, each in tensors.items() if "inv_freq" not in name and "masked_bias" not in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_weights_are_those_that_are_loaded(tiny_model: TinyModel, family: str, tmp_path: Path) -> None:
    folder = tiny_model(family)
    tensors = others(folder, tmp_path / "other")
    with loaded(folder) as llm:
        before = answer(llm)
        addresses = [each.data_ptr() for each in _weights(llm)]
        known = LiveWeights(llm.assembly.worker.runner.decoder, llm.assembly.model.weights)  # type: ignore[attr-defined]
        given = {name: each for name, each in tensors.items() if name in known._shapes}
        assert llm.update_weights(given) == 1
        after = answer(llm)  # of the same prompt, which the cache held
        assert [each.data_ptr() for each in _weights(llm)] == addresses
        with loaded(tmp_path / "other") as other:
            version, *rest = answer(other)
        assert (version, after[0], before[0]) == (0, 1, 0)
        assert list(after[1:]) == rest
        assert after[1:] != before[1:]
        back = load_file(folder / "model.safetensors")
        half = sorted(given)[::2]
        llm.update_weights({name: back[name] for name in half})  # in two parts
        assert llm.update_weights({name: back[name] for name in given if name not in half}) == 3
        assert answer(llm) == (3, *before[1:])


def _weights(llm: LLM) -> list[Tensor]:
    return list(llm.assembly.worker.runner.decoder.parameters())  # type: ignore[attr-defined]


def test_tensors_of_another_model_change_nothing(tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    with loaded(folder) as llm:
        before = answer(llm)
        for wrong, words in (
            ({name: tensors[name][:-1]}, r"up_proj.weight has the shape \[111, 64\], and this model's has \[112, 64\]"),
            ({"model.layers.9.mlp.up_proj.weight": tensors[name]}, "no weights called model.layers.9"),
            ({name: tensors[name].to(torch.int8)}, "holds torch.int8, and weights are float32"),
        ):
            first = {"model.layers.0.mlp.up_proj.weight": torch.zeros_like(tensors[name])}
            with pytest.raises(InvalidConfig, match=words):
                llm.update_weights(first | wrong)
        assert answer(llm) == before


def test_weights_stay_while_outputs_are_under_way(tiny_model: TinyModel) -> None:
    with loaded(tiny_model("qwen3")) as llm:
        pieces = llm.stream(PROMPT, PARAMS)
        next(pieces)
        with pytest.raises(InvalidRequest, match="outputs are under way"):
            llm.update_weights({})
        pieces.close()  # type: ignore[attr-defined]
        assert llm.update_weights({}) == 1


def test_no_weights_are_held_where_the_device_gives_its_memory_back(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gives back what nobody holds any more, so nothing may be let go of behind that."""
    kept, end = list[Decoder | None](), LocalWorker.shutdown

    def watched(self: LocalWorker) -> None:
        decoder = ref(self.runner.decoder)
        end(self)
        gc.collect()
        kept.append(decoder())

    monkeypatch.setattr(LocalWorker, "shutdown", watched)
    with loaded(tiny_model("qwen3")) as llm:
        llm.update_weights({})
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights({})
    assert kept == [None, None]


def test_a_copy_that_fails_ends_the_engine(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of old and new weights never answers."""

    def failing(self: LiveWeights, tensors: object) -> None:
        raise RuntimeError("the device failed")

    with loaded(tiny_model("qwen3")) as llm:
        monkeypatch.setattr(LiveWeights, "replace", failing)
        with pytest.raises(RuntimeError, match="the device failed"):
            llm.update_weights({})
        with pytest.raises(InvalidRequest, match="shut down"):
            answer(llm)


@pytest.mark.parametrize("family", ["mixtral", "mamba2"])
def test_weights_in_another_form_are_refused(tiny_model: TinyModel, family: str) -> None:
    with (
        loaded(tiny_model(family), deterministic=False) as llm,
        pytest.raises(InvalidConfig, match="replaced in place only in models of"),
    ):
        llm.update_weights({})
