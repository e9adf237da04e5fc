"""Adapters' folders: what PEFT saves is read as PEFT reads it, or refused in a sentence that names the reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.settings.adapters import TENSORS
from ridgeline.weights.adapters import matching, reader
from ridgeline.weights.adapters.content import read_content
from ridgeline.weights.adapters.places import ModulePlace, adaptable
from ridgeline.weights.adapters.reader import ReadAdapter, read_adapter
from ridgeline.weights.convert.convert import convert
from ridgeline.weights.loader import read_model_config

pytest.importorskip("peft")

from tests import tiny_models
from tests.peft_adapters import PeftAdapter

TinyModel = Callable[[str], Path]


@pytest.fixture
def places(tiny_model: TinyModel) -> dict[str, ModulePlace]:
    model = read_model_config(tiny_model("llama"))
    return adaptable(model.spec, model.weights)


def read(folder: Path, places: dict[str, ModulePlace], most_rank: int = 16) -> ReadAdapter:
    return read_adapter(folder, places, most_rank=most_rank, dtype=torch.float32)


def refused(folder: Path, places: dict[str, ModulePlace], **options: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        read(folder, places, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def deltas(adapter: ReadAdapter) -> dict[str, torch.Tensor]:
    return {each.place.source.name: each.up_OR @ each.down_RI for each in adapter.pairs}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*layers\.0\.(self_attn\.[qv]|mlp\.up)_proj"},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 7, r"layers\.1\..*up_proj": 2}},
        {"target_modules": "all-linear", "alpha_pattern": {r".*\.0\..*_proj": 3}, "use_rslora": True},
        {"target_modules": ["o_proj", "up_proj"], "exclude_modules": ["model.layers.0.mlp.up_proj"]},
        {"target_modules": ["o_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    ],
    ids=str,
)
def test_modules_ranks_and_scales_are_those_of_peft(
    options: dict[str, Any], places: dict[str, ModulePlace], tmp_path: Path
) -> None:
    adapted = PeftAdapter("llama", tmp_path / "a", **options)
    wanted = {
        f"{name.removeprefix('base_model.model.')}.weight": module.get_delta_weight("default")
        for name, module in adapted.model.named_modules()
        if hasattr(module, "lora_A") and len(module.lora_A)
    }
    found = deltas(read(adapted.folder, places))
    assert found.keys() == wanted.keys()
    for name, delta in found.items():
        torch.testing.assert_close(delta, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"made_up": 3}, "made_up"),
        ({"r": 0}, "r 0"),
        ({"r": 17}, "rank 17, above max_lora_rank 16"),
        ({"r": 5}, "rank 5 wants [5, 112]"),
        ({"rank_pattern": {"q_proj": "a"}}, "rank_pattern of q_proj"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"target_modules": ["q_proj"]}, "does not mean"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "(["}, "expression"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform"),
        ({"use_rslora": 1}, "use_rslora"),
    ],
    ids=str,
)
def test_what_a_config_asks_for_in_vain_is_refused_by_name(
    changes: dict[str, Any], said: str, places: dict[str, ModulePlace], tmp_path: Path
) -> None:
    adapted = PeftAdapter("llama", tmp_path / "a")
    adapted.write_config(**changes)
    assert said in refused(adapted.folder, places)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, "embed_tokens"),
        ({"target_modules": ["lm_head", "q_proj"]}, "lm_head"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    ],
    ids=["embeddings", "head", "tokens", "whole embeddings"],
)
def test_adapters_of_tables_are_refused_by_name(
    options: dict[str, Any], said: str, places: dict[str, ModulePlace], tmp_path: Path
) -> None:
    assert said in refused(PeftAdapter("llama", tmp_path / "a", **options).folder, places)


def test_factors_are_read_where_they_are_served(places: dict[str, ModulePlace], tmp_path: Path) -> None:
    """Those of a fused map's inputs, of other shapes and names, and numbers that are not finite are refused."""
    both = ["q_proj", "down_proj"]
    folder = PeftAdapter("llama", tmp_path / "a", target_modules=both, feedforward_modules=["down_proj"]).folder
    tensors = load_file(folder / TENSORS)
    assert "set enable_lora_factors" in refused(folder, places)

    def with_tensors(changes: dict[str, torch.Tensor]) -> str:
        save_file({**tensors, **changes}, folder / TENSORS)
        with pytest.raises(ModelLoadError) as error:
            read_adapter(folder, places, most_rank=16, dtype=torch.float32, factors=True)
        return str(error.value)

    [down, *_, query] = sorted(tensors, key=lambda name: "q_proj" in name)
    assert "of shape [3, 1]" in with_tensors({query: torch.ones(3, 1)})
    assert "which other projections get too" in with_tensors({query: torch.ones(1, tensors[query].shape[0] or 1)})
    assert "not finite" in with_tensors({down: torch.full_like(tensors[down], torch.nan)})
    assert "as I8" in with_tensors({down: tensors[down].to(torch.int8)})
    assert "only ia3_l" in with_tensors({query.replace("ia3_l", "lora_A.weight"): torch.ones(4, 4)})


def test_an_expression_has_a_time_limit(
    places: dict[str, ModulePlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "SECONDS", 0.5)
    adapted = PeftAdapter("llama", tmp_path / "a")
    adapted.write_config(target_modules=r"([a-z._0-9]*)*!")
    begun = time.monotonic()
    assert "take more than 0.5 seconds" in refused(adapted.folder, places)
    assert time.monotonic() - begun < 30


def test_damaged_and_foreign_files_are_refused(places: dict[str, ModulePlace], tmp_path: Path) -> None:
    folder = PeftAdapter("llama", tmp_path / "a").folder
    path, tensors = folder / TENSORS, load_file(folder / TENSORS)
    whole, names = path.read_bytes(), sorted(tensors)
    assert read(folder, places).key == read(folder, places).key

    def with_tensors(changes: dict[str, Any]) -> str:
        save_file({name: each for name, each in {**tensors, **changes}.items() if each is not None}, path)
        return refused(folder, places)

    assert "one of two matrices" in with_tensors({names[0]: None})
    assert "of shape [4, 111]" in with_tensors({names[0]: tensors[names[0]][:, :-1].contiguous()})
    assert "not finite" in with_tensors({names[0]: torch.full_like(tensors[names[0]], torch.inf)})
    assert "as I8" in with_tensors({names[0]: tensors[names[0]].to(torch.int8)})
    assert "only lora_A and lora_B" in with_tensors({"base_model.model.lm_head.weight": torch.ones(2)})
    strange = {f"base_model.model.model.layers.9.mlp.up_proj.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    assert "model.layers.9.mlp.up_proj" in with_tensors(strange)
    large = json.dumps({names[0]: {"dtype": "F32", "shape": [10**4000] * 2000, "data_offsets": [0, 4]}}).encode()
    for damaged in (
        len(large).to_bytes(8, "little") + large,
        whole[:-1],
        whole[:50],
        b"",
        (1 << 62).to_bytes(8, "little") + whole[8:],
        b"\x02" + bytes(7) + b"{]",
    ):
        path.write_bytes(damaged)
        assert "damaged" in refused(folder, places)
    path.write_bytes(whole + bytes(1 << 25))
    assert "bytes" in refused(folder, places)
    path.unlink()
    assert f"holds no {TENSORS}" in refused(folder, places)
    (folder / "adapter_model.bin").write_bytes(b"x")
    assert "weights_only=True" in refused(folder, places)
    assert "is not a folder" in refused(tmp_path / "none", places)
    other = PeftAdapter("qwen3", tmp_path / "b")
    assert "adapter of another model" in refused(other.folder, places)
    (other.folder / "adapter_config.json").write_text(json.dumps([1]))
    assert "adapter_config.json" in refused(other.folder, places)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1e5), (torch.bfloat16, 3.4028e38)], ids=str)
def test_numbers_that_the_dtype_cannot_hold_are_refused(
    dtype: torch.dtype, value: float, places: dict[str, ModulePlace], tmp_path: Path
) -> None:
    folder = PeftAdapter("llama", tmp_path / "a").folder
    tensors = load_file(folder / TENSORS)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.full_like(tensors[name], value)}, folder / TENSORS)
    read(folder, places)
    with pytest.raises(ModelLoadError, match=f"not finite in {str(dtype).removeprefix('torch.')}"):
        read_adapter(folder, places, most_rank=16, dtype=dtype)


def test_page_locked_matrices_are_those_that_were_read_in_one_piece(
    places: dict[str, ModulePlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = read(PeftAdapter("llama", tmp_path / "a").folder, places)
    empty, pieces = torch.empty, list[torch.Tensor]()

    def locked(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pieces.append(empty(*shape, **options))  # a machine without a GPU locks no pages
        return pieces[-1]

    monkeypatch.setattr(torch, "empty", locked)
    pinned = adapter.pinned()
    assert len(pieces) == 1
    assert pinned.nbytes == adapter.nbytes
    for one, other in zip(pinned.pairs, adapter.pairs, strict=True):
        assert torch.equal(one.down_RI, other.down_RI)
        assert torch.equal(one.up_OR, other.up_OR)
        assert one.up_OR.untyped_storage().data_ptr() == pieces[0].data_ptr()


def test_sums_that_overflow_are_no_numbers_that_are_not_finite(places: dict[str, ModulePlace], tmp_path: Path) -> None:
    folder = PeftAdapter("llama", tmp_path / "a").folder
    tensors = load_file(folder / TENSORS)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], 3e38)}, folder / TENSORS)
    assert any(bool((pair.down_RI == 3e38).all()) for pair in read(folder, places).pairs)


def test_matrices_with_and_without_the_prefix_are_refused(places: dict[str, ModulePlace], tmp_path: Path) -> None:
    folder = PeftAdapter("llama", tmp_path / "a").folder
    tensors = load_file(folder / TENSORS)
    more = {name.removeprefix("base_model.model."): torch.zeros_like(each) for name, each in tensors.items()}
    save_file({**tensors, **more}, folder / TENSORS)
    assert "under two names" in refused(folder, places)


def test_names_of_any_length_make_short_sentences(places: dict[str, ModulePlace], tmp_path: Path) -> None:
    assert len(refused(Path("a" * 5000), places)) < 400
    adapted = PeftAdapter("llama", tmp_path / "a")
    adapted.write_config(r=10**4000)
    assert len(refused(adapted.folder, places).removeprefix(str(tmp_path))) < 400
    adapted.write_config(r=4)
    save_file({f"{'m' * 10_000}.lora_A.weight": torch.zeros(1)}, adapted.folder / TENSORS)
    assert len(refused(adapted.folder, places).removeprefix(str(tmp_path))) < 400


def test_a_file_that_is_replaced_while_it_is_read_changes_nothing(
    places: dict[str, ModulePlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key names what runs, since the prefix cache and later loads go by it. A shorter file ends no process."""
    folder = PeftAdapter("llama", tmp_path / "a").folder
    before = read(folder, places)

    def replaced(*arguments: Any) -> Any:
        with (folder / TENSORS).open("r+b") as file:
            file.truncate(100)
        (folder / "adapter_config.json").write_text("{}")
        return matching.meant_modules(*arguments)

    monkeypatch.setattr(reader, "meant_modules", replaced)
    after = read(folder, places)
    assert after.key == before.key
    assert all(torch.equal(after_each, each) for after_each, each in zip(
        deltas(after).values(), deltas(before).values(), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "phi3", "falcon_h1"])
def test_merged_weights_are_those_of_peft(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    options = {"target_modules": ["in_proj", "q_proj", "gate_proj"]} if family == "falcon_h1" else {}
    adapted = PeftAdapter(family, tmp_path / "a", r=5, use_rslora=True, **options)
    how: dict[str, Any] = {"dtype": None, "shard_size": 10**9, "write_texts": lambda *_: None}
    source, target = tiny_model(family), tmp_path / "merged"
    convert(source, target, **how, progress=lambda *_: None, adapter=adapted.folder)
    wanted = adapted.model.merge_and_unload().state_dict()
    found, before = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    changed = {name for name, each in found.items() if not torch.equal(each, before[name])}
    assert changed == {f"{pair.place.source.name}" for pair in adapter_of(source, adapted.folder).pairs}
    for name in changed:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"use_dora": True}),
        ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}),
        ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}),
        ("llama", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
        ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]}),
        ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]}),
        ("qwen2", {"bias": "lora_only"}),
        ("qwen2", {"bias": "all"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_other_kinds_are_merged_as_peft_merges_them(
    family: str, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, target = tiny_model(family), tmp_path / "merged"
    network = tiny_models.build(family)
    adapted = PeftAdapter.of(network, tmp_path / "a", **options)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "modules_to_save.default" in name or (name.endswith("bias") and parameter.requires_grad):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    adapted.model.save_pretrained(str(adapted.folder))
    how: dict[str, Any] = {"dtype": None, "shard_size": 10**9, "write_texts": lambda *_: None}
    convert(source, target, **how, progress=lambda *_: None, adapter=adapted.folder)
    wanted = adapted.model.merge_and_unload().state_dict()
    found, before = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    changed = {name for name, each in found.items() if not torch.equal(each, before[name])}
    assert changed == {name for name, each in wanted.items() if name in before and not torch.equal(each, before[name])}
    for name in changed:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def test_a_grown_vocabulary_is_not_merged(tiny_model: TinyModel, tmp_path: Path) -> None:
    network = tiny_models.build("llama")
    network.resize_token_embeddings(network.config.vocab_size + 8)
    adapted = PeftAdapter.of(network, tmp_path / "a", modules_to_save=["embed_tokens", "lm_head"])
    how: dict[str, Any] = {"dtype": None, "shard_size": 10**9, "write_texts": lambda *_: None}
    with pytest.raises(ModelLoadError, match="another vocabulary; merge it by PEFT"):
        convert(tiny_model("llama"), tmp_path / "m", **how, progress=lambda *_: None, adapter=adapted.folder)


def adapter_of(model: Path, folder: Path) -> ReadAdapter:
    config = read_model_config(model)
    return read(folder, adaptable(config.spec, config.weights))


def test_pieces_that_threads_read_are_the_file_and_name_it(
    places: dict[str, ModulePlace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte counts, and so does its place. What was read before is not looked at again."""
    folder = PeftAdapter("llama", tmp_path / "a").folder
    path = folder / TENSORS
    first = read(folder, places)
    monkeypatch.setattr("ridgeline.weights.adapters.content.PIECE", 4096)
    octets, found = path.read_bytes(), read_content(path, 1 << 30)
    assert found.octets.numpy().tobytes() == octets
    for at in (0, 4095, 4096, len(octets) - 1):
        path.write_bytes(octets[:at] + bytes([octets[at] ^ 1]) + octets[at + 1 :])
        assert read_content(path, 1 << 30).digest != found.digest
    path.write_bytes(octets[4096:8192] + octets[:4096] + octets[8192:])
    assert read_content(path, 1 << 30).digest != found.digest
    path.write_bytes(octets)
    monkeypatch.undo()
    monkeypatch.setattr(reader, "_is_finite", lambda _: False)
    again = read_adapter(folder, places, most_rank=16, dtype=torch.float32, known=first.key)
    with pytest.raises(ModelLoadError, match="not finite"):
        read_adapter(folder, places, most_rank=16, dtype=torch.float32, known="adapter of another content")
    assert again.key == first.key
    for one, other in zip(again.pairs, first.pairs, strict=True):
        assert torch.equal(one.up_OR, other.up_OR)
