"""A GGUF file is the model that it was written from, or one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.weights.folder import resolve_model
from ridgeline.weights.formats.gguf_file import read_gguf
from ridgeline.weights.loader import read_model_config
from tests import gguf_files, gguf_near, tiny_models
from tests.weights.loading import dense_logits, load
from tests.weights.test_quantized import assert_same_numbers, kept
from tests.weights.test_quantized_gpu import apart, scores

gguf = pytest.importorskip("gguf")

TinyModel = Callable[[str], Path]

IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))


def written(family: str, folder: Path, **how: Any) -> Path:
    if family in gguf_near.FAMILIES:
        return gguf_files.write(gguf_near.model_of(family), folder / "model.gguf", family=family, **how)
    return gguf_files.write(
        tiny_models.build(family, **gguf_files.CHANGES.get(family, {})), folder / "model.gguf", **how
    )


@pytest.mark.parametrize("family", [*gguf_files.ARCHITECTURES, *gguf_near.FAMILIES])
def test_parameters_and_logits_are_those_of_the_model_it_was_written_from(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if family in gguf_near.FAMILIES:
        gguf_near.model_of(family).save_pretrained(folder)
    else:
        tiny_models.save(family, folder, **gguf_files.CHANGES.get(family, {}))
    ours, path = load(folder), written(family, tmp_path)
    theirs = load(path)
    expected = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if name.endswith(("rate.log", "log_rate")):  # which the file holds as -exp of it
            torch.testing.assert_close(parameter, expected[name], atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(parameter, expected[name]), name
    with torch.no_grad():
        torch.testing.assert_close(dense_logits(theirs, IDS), dense_logits(ours, IDS), atol=2e-4, rtol=1e-4)


def encoder(folder: Path, number: int, *, classifies: bool = False, **values: Any) -> Path:
    """A tiny BERT as a folder and as a file with a pooling of this number. classifies: the file has a head for
    labels."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=99, max_position_embeddings=80, **sizes))
    model.save_pretrained(folder / "folder")
    writer = gguf.GGUFWriter(folder / "model.gguf", "bert")
    writer.add_block_count(2)
    writer.add_context_length(80)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(112)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-12)
    writer.add_uint32("bert.pooling_type", number)
    for name, value in values.items():
        gguf_files.add(writer, f"bert.{name}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    for name, tensor in model.state_dict().items():
        if not name.startswith("pooler."):
            base, _, ends = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(base)}.{ends}", tensor.numpy())
    shapes = {"cls.weight": (64, 64), "cls.bias": (64,), "cls.output.weight": (1, 64), "cls.output.bias": (1,)}
    for name, shape in shapes.items() if classifies else ():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls")])
def test_an_encoder_is_the_model_it_was_written_from(number: int, kind: str, tmp_path: Path) -> None:
    path = encoder(tmp_path, number, **{"attention.causal": False})
    expected = dict(load(tmp_path / "folder").named_parameters())
    found = dict(load(path).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.items())
    pooling = read_model_config(path).spec.pooling
    assert pooling is not None
    assert (pooling.kind, pooling.normalize, pooling.token_types) == (kind, True, 2)


def test_a_reranker_is_no_embedder(tmp_path: Path) -> None:
    assert "sets bert.pooling_type to 4, a pooling of a reranker" in refusal(encoder(tmp_path, 4, classifies=True))
    assert "sets bert.pooling_type to 9" in refusal(encoder(tmp_path, 9))
    assert "cls.output.weight" in refusal(encoder(tmp_path, 2, classifies=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers_own_reading(family: str, tmp_path: Path) -> None:
    path = written(family, tmp_path, extra={"tokenizer.ggml.model": "gpt2"})
    empty = tiny_models.build(family)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)
    widths = {"head_dim": 32} if family == "qwen3" else {}  # which it does not read
    config = transformers.AutoConfig.for_model(**{**read["config"], **widths})
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    lacking = oracle.load_state_dict(read["tensors"], strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}  # tied
    assert not lacking.unexpected_keys
    with torch.no_grad():
        torch.testing.assert_close(dense_logits(load(path), IDS), oracle(IDS).logits, atol=2e-4, rtol=1e-4)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # such that rows are whole blocks of 256
REORDERED: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 64},
    "gpt_oss": {},
    "deepseek_v3": {"v_head_dim": 64, "kv_lora_rank": 256, "q_lora_rank": 256, "moe_intermediate_size": 256},
    "lfm2": {},
    "mamba2": {"num_heads": 8},
    "granite_moe": {},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", REORDERED)
def test_quantized_files_of_other_shapes_and_orders_are_the_models_of_their_numbers(
    family: str, kind: str, tmp_path: Path
) -> None:
    """As plain numbers and in the form of the file: what the gguf package makes of its blocks."""
    model = tiny_models.build(family, **{**gguf_files.CHANGES.get(family, {}), **WIDE, **REORDERED[family]})
    kinds = {"*": kind, "token_embd.weight": "F32"}
    coded = gguf_files.write(model, tmp_path / "coded.gguf", kinds=kinds)
    plain = load(gguf_files.write(model, tmp_path / "plain.gguf", kinds=kinds, widened=True))
    expected = dict(plain.named_parameters())
    for name, parameter in load(coded).named_parameters():
        torch.testing.assert_close(parameter.float(), expected[name].float(), atol=0, rtol=1e-6, msg=name)
    if kind == "F16":
        return
    decoder = kept(coded)
    assert assert_same_numbers(decoder, plain) > 3
    decoder.prepare()
    torch.testing.assert_close(dense_logits(decoder, IDS), dense_logits(plain, IDS), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("family", REORDERED)
def test_on_a_gpu_a_file_scores_as_the_model_of_its_numbers(family: str, kind: str, tmp_path: Path) -> None:
    """Of both files the model is the same, and so are the errors of bfloat16 up to their spread."""
    model = tiny_models.build(family, **{**gguf_files.CHANGES.get(family, {}), **WIDE, **REORDERED[family]})
    kinds = {"*": kind, "token_embd.weight": "F32"}
    coded = gguf_files.write(model, tmp_path / "coded.gguf", kinds=kinds)
    plain = gguf_files.write(model, tmp_path / "plain.gguf", kinds=kinds, widened=True)
    decoder = load(plain)

    def oracle(ids_BS: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=dense_logits(decoder, ids_BS))

    found, usual = (apart(scores(path), oracle) for path in (coded, plain))
    assert found < 2.5 * usual


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
def test_quantized_matrices_are_dequantized(kind: str, tmp_path: Path) -> None:
    model = tiny_models.build("qwen3", intermediate_size=128)
    path = gguf_files.write(model, tmp_path / "model.gguf", kinds={"*": kind, "token_embd.weight": "F32"})
    decoder = load(path)
    wanted = model.model.layers[1].mlp.down_proj.weight.detach()
    assert torch.equal(decoder.get_parameter("layers.1.feed_forward.down.weight"), gguf_files.dequantized(wanted, kind))
    assert read_model_config(path).dtype == {"F16": "float16"}.get(kind, "bfloat16")


@torch.no_grad()
def test_quantized_stacks_of_experts_are_dequantized_expert_by_expert(tmp_path: Path) -> None:
    model = tiny_models.build("qwen3_moe", moe_intermediate_size=64)
    path = gguf_files.write(model, tmp_path / "model.gguf", kinds={"*": "Q8_0", "token_embd.weight": "F32"})
    decoder, experts = load(path), model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    wanted = torch.cat([gguf_files.dequantized(part, "Q8_0") for part in (gate, up)], dim=1)
    assert torch.equal(decoder.get_parameter("layers.1.feed_forward.gate_up.weight"), wanted)
    down = gguf_files.dequantized(experts.down_proj, "Q8_0")
    assert torch.equal(decoder.get_parameter("layers.1.feed_forward.down.weight"), down)


@pytest.mark.parametrize(("says", "scale"), [(2.5, 2.5), (0.0, 1.0)])
def test_experts_weights_are_scaled_as_the_file_says(says: float, scale: float, tmp_path: Path) -> None:
    path = written("qwen3_moe", tmp_path, extra={"qwen3moe.expert_weights_scale": says})
    for layer in read_model_config(path).spec.layers:
        assert isinstance(layer.feed_forward, ExpertsSpec)
        assert layer.feed_forward.routing.scale == scale


def test_what_the_config_says(tmp_path: Path) -> None:
    path = written("llama", tmp_path, extra={"tokenizer.ggml.eot_token_id": 7})
    config = read_model_config(resolve_model(path))
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2, 7), "float32")
    assert not config.spec.tie_word_embeddings
    assert config.spec.max_position_embeddings == 256


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen2", "qwen2"), ("lfm2", "lfm2"), ("qwen3_5", "qwen35"), ("granite_hybrid", "granitehybrid")],
)
def test_a_count_of_layers_without_end_is_refused_at_once(family: str, architecture: str, tmp_path: Path) -> None:
    many, name = 2**40, f"{architecture}.block_count"
    for extra in ({name: many}, {name: many, f"{architecture}.nextn_predict_layers": many - 1}):
        said = refusal(written(family, tmp_path, extra=extra))
        assert f"sets {name} to {many}; at most 1000 layers run here" in said


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def test_yarn_is_read_with_its_betas(tmp_path: Path) -> None:
    values = {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
    extra = {f"qwen2.{name}": value for name, value in values.items()}
    attention = read_model_config(written("qwen2", tmp_path, extra=extra)).spec.layers[0].attention
    assert attention.rope is not None
    scaling = dict(attention.rope.scaling or ())
    assert [scaling[name] for name in ("factor", "beta_fast", "beta_slow")] == [4.0, 16.0, 2.0]


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp takes it."""
    path = written("qwen2", tmp_path, extra={"qwen2.rope.scaling.factor": 4.0})
    rope = read_model_config(path).spec.layers[0].attention.rope
    assert rope is not None
    assert dict(rope.scaling or ()) == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("qwen2", {**YARN, "rope.scaling.yarn_attn_factor": 1.5}),
        ("gpt_oss", {"rope.scaling.attn_factor": 0.5}),
        ("qwen2", {**YARN, "rope.scaling.yarn_ext_factor": 0.5}),
        ("qwen2", {"attention.causal": False}),
        ("qwen3", {"attention.scale": 0.5}),
        ("olmoe", {"attention.clamp_kqv": 8.0}),
        ("llama", {"rope.scale_linear": 4.0}),
        ("gemma3", {"attention.max_alibi_bias": 8.0}),
    ],
)
def test_what_changes_the_result_and_is_not_read_is_refused(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    architecture = gguf_files.ARCHITECTURES[family]
    extra = {f"{architecture}.{name}": value for name, value in values.items()}
    *_, (name, value) = extra.items()
    assert f" sets {name} to {value}; only " in refusal(written(family, tmp_path, extra=extra))


def test_usual_values_are_no_reason_to_refuse(tmp_path: Path) -> None:
    values = {
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.scale": 32**-0.5,
        "rope.scale_linear": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
    }
    load(written("qwen3", tmp_path, extra={f"qwen3.{name}": value for name, value in values.items()}))
    assert "sets bert.attention.causal to True" in refusal(encoder(tmp_path, 1, **{"attention.causal": True}))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        ([False] * 7, [0] * 7),
        ([True] * 7, [1] * 7),
        (2, [1, 0, 1, 0, 1, 0, 1]),
        (3, [1, 1, 0, 1, 1, 0, 1]),
        (1, [0] * 7),
    ],
)
def test_gemma_s_windows_are_where_the_file_says(pattern: Any, windows: list[int], tmp_path: Path) -> None:
    extra = {"gemma3.block_count": 7, "gemma3.attention.sliding_window_pattern": pattern}
    path = written("gemma3", tmp_path, extra=extra)
    layers = read_model_config(path).spec.layers
    assert [int(layer.attention.window is not None) for layer in layers] == windows


@pytest.mark.parametrize("pattern", [0, True, "2", [True] * 6, [2] * 7])
def test_other_patterns_of_windows_are_refused(pattern: Any, tmp_path: Path) -> None:
    extra = {"gemma3.block_count": 7, "gemma3.attention.sliding_window_pattern": pattern}
    path = written("gemma3", tmp_path, extra=extra)
    assert "sets gemma3.attention.sliding_window_pattern to" in refusal(path)


def test_files_that_are_cut_anywhere_are_refused(tmp_path: Path) -> None:
    path = written("qwen3", tmp_path)
    whole = path.read_bytes()
    header = min(info.start for info in read_gguf(path).tensors.values())
    for length in (0, 3, 4, 20, header // 2, header - 40, header, len(whole) - 8192):
        path.write_bytes(whole[:length])
        assert "cannot be read as a GGUF file" in refusal(path)


def test_damaged_headers_never_escape_as_something_else(tmp_path: Path) -> None:
    path = written("qwen3", tmp_path)
    whole = path.read_bytes()
    header = min(info.start for info in read_gguf(path).tensors.values())
    for at in range(4, header, 61):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ModelLoadError as error:
            assert "\n" not in str(error)  # noqa: PT017 (many damages hurt nothing but a name)


def rewritten(family: str, path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """With other tensors than the model has."""
    model = tiny_models.build(family)
    state = dict(model.state_dict())
    change(state)
    model.state_dict = lambda: state  # type: ignore[method-assign]
    return gguf_files.write(model, path)


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name = "model.layers.0.self_attn.q_norm.weight"
    assert "blk.0.attn_q_norm.weight" in refusal(rewritten("qwen3", path, lambda state: state.__delitem__(name)))
    assert "[16]" in refusal(rewritten("qwen3", path, lambda state: state.update({name: torch.ones(16)})))
    extra = {"model.layers.1.self_attn.q_proj.bias": torch.ones(128)}
    assert "blk.1.attn_q.bias" in refusal(rewritten("qwen3", path, lambda state: state.update(extra)))


def test_what_we_do_not_read_is_said(tmp_path: Path) -> None:
    assert "has 8 experts in a layer" in refusal(written("granite", tmp_path, extra={"granite.expert_count": 8}))
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "'rwkv6'" in refusal(path)
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model(tmp_path / "none.gguf")
