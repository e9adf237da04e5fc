"""Graph breaks of model classes of transformers: how many, where Dynamo says they come from, and what a cure leaves.

    python -m ridgeline_bench.scripts.stack.graph_breaks [--models llama longformer] [--output results.jsonl]

Each class is built small with random weights and called as its users call it; `torch._dynamo.explain` counts graphs and
breaks, and names the reason and the line of each. A class that breaks has a cure, of which the breaks are counted in
the same way: a setting of the model or of Dynamo, a function in the place of another, or a region of the model that is
compiled alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ridgeline_bench.scripts.asked import OneOf, asked, keep, told

Settings = Mapping[str, Any]

_DECODER: Settings = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER: Settings = {
    name: _DECODER[name] for name in _DECODER if name not in ("num_key_value_heads", "bos_token_id", "eos_token_id")
}
_TWO_SIDES: Settings = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT: Settings = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A class of model and a call of it.

    settings: of its configuration. inputs: what the call gets beside or in place of token ids with a padded row.
    causal: with a head for the next token. way: forward, cached (a token behind a prompt), train, or generate.
    region: a submodule that is compiled alone. within: a context in which it is compiled.
    """

    settings: Settings = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    causal: bool = False
    way: str = "forward"
    region: str = ""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepared: Callable[[Any], object] = lambda model: None


@dataclass(frozen=True, kw_only=True)
class Cured:
    """Why a class breaks, and what cures it."""

    cause: str
    cure: str
    call: ModelCall


def _of_decoder(**settings: Any) -> ModelCall:
    return ModelCall(settings={**_DECODER, **settings}, causal=True)


def _of_encoder(**settings: Any) -> ModelCall:
    return ModelCall(settings={**_ENCODER, **settings})


@contextmanager
def _scalars() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """What I-BERT makes with numpy and Python's decimals, as two ops of torch."""
    mantissa, exponent = torch.frexp(x.double())
    return (mantissa * 2**31 + 0.5).floor().float().view(x.size()), (31.0 - exponent.float()).view(x.size())


@contextmanager
def _frexp_of_torch() -> Iterator[None]:
    with patch("transformers.models.ibert.quant_modules.batch_frexp", lambda x, max_bit=31: _frexp(x)):
        yield


def _two_sides() -> dict[str, Tensor]:
    return {"decoder_input_ids": torch.tensor([[1, 5, 9], [1, 7, 8]])}


_EXPERTS: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGFORMER = _of_encoder(attention_window=4)
_LED = ModelCall(settings={**_TWO_SIDES, "attention_window": 4}, inputs=_two_sides())
_BIG_BIRD = _of_encoder(attention_type="block_sparse", block_size=4, num_random_blocks=1)
_IBERT = _of_encoder(quant_mode=True)
_FLAUBERT = ModelCall(settings={"n_layers": 2, "n_heads": 4, "emb_dim": 32, "n_words": 64})
_MIXTRAL = _of_decoder(**_EXPERTS)
_GPT_OSS = _of_decoder(**_EXPERTS, head_dim=8)
_LLAMA = _of_decoder()
_REFORMER = _of_encoder(
    attention_head_size=8, attn_layers=["lsh", "local"], axial_pos_shape=(4, 3), axial_pos_embds_dim=(16, 16),
    feed_forward_size=48, lsh_attn_chunk_length=4, local_attn_chunk_length=4, num_buckets=4, is_decoder=False,
)  # fmt: skip
_VITS = ModelCall(
    settings={
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32,
        "flow_size": 16, "upsample_initial_channel": 16, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8],
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]], "prior_encoder_num_flows": 1,
        "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1,
        "duration_predictor_num_flows": 1, "depth_separable_num_layers": 1,
    }
)  # fmt: skip
_WAV2VEC2 = ModelCall(
    settings={
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
        "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2,
    },
    inputs={"input_values": torch.linspace(-1, 1, 2000)[None]}, way="train",
)  # fmt: skip

ITEM = "asks the host for a tensor's number (`.item()`) to branch on it"
LOOP = "loops over the experts that tokens chose, of which the host must know the number"

CALLS: Mapping[str, tuple[ModelCall, Cured | None]] = {
    "llama": (_LLAMA, None),
    "llama, cached": (replace(_LLAMA, way="cached"), None),
    "mistral": (_of_decoder(sliding_window=4), None),
    "qwen2": (_of_decoder(), None),
    "qwen3": (_of_decoder(head_dim=8), None),
    "gemma3_text": (_of_decoder(head_dim=8), None),
    "gpt2": (ModelCall(settings=_GPT, causal=True), None),
    "gpt_neox": (_of_decoder(), None),
    "bloom": (ModelCall(settings={**_GPT, "hidden_size": 32}, causal=True), None),
    "qwen3_moe": (_of_decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8), None),
    "mamba2": (_of_decoder(state_size=4, num_heads=8, head_dim=8, n_groups=1), None),
    "bert": (_of_encoder(), None),
    "t5": (
        ModelCall(
            settings={"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
            inputs=_two_sides(),
        ),
        None,
    ),
    "vit": (
        ModelCall(
            settings={
                "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4,
            },
            inputs={"pixel_values": torch.linspace(-1, 1, 3072).view(1, 3, 32, 32)},
        ),
        None,
    ),
    "llama, generate": (
        replace(_LLAMA, way="generate"),
        Cured(
            cause="the loop over tokens is Python that asks tensors whether to stop",
            cure="compile the forward pass, with a cache of fixed size, and leave the loop outside",
            call=replace(_LLAMA, way="cached"),
        ),
    ),
    "mixtral, eager experts": (
        _of_decoder(**_EXPERTS, experts_implementation="eager"),
        Cured(cause=LOOP, cure="`experts_implementation=\"grouped_mm\"`: one grouped product", call=_MIXTRAL),
    ),
    "gpt_oss, eager experts": (
        _of_decoder(**_EXPERTS, head_dim=8, experts_implementation="eager"),
        Cured(cause=LOOP, cure="`experts_implementation=\"grouped_mm\"`", call=_GPT_OSS),
    ),
    "longformer": (
        _LONGFORMER,
        Cured(cause=ITEM, cure="compile each layer: it gets the answer as a bool of Python",
              call=replace(_LONGFORMER, region="encoder.layer.0")),
    ),
    "led": (
        _LED,
        Cured(cause=ITEM, cure="compile each layer", call=replace(_LED, region="encoder.layers.0")),
    ),
    "flaubert": (
        _FLAUBERT,
        Cured(cause="an assertion reads the longest length (`.item()`)", cure="`capture_scalar_outputs = True`",
              call=replace(_FLAUBERT, within=_scalars)),
    ),
    "tapas": (
        _of_encoder(),
        Cured(cause="makes a tensor of as many rows as a number in a tensor says",
              cure="`capture_scalar_outputs = True`: the size becomes a symbol",
              call=replace(_of_encoder(), within=_scalars)),
    ),
    "big_bird": (
        _BIG_BIRD,
        Cured(cause="warns through a logger that a short text needs no sparse attention",
              cure="`attention_type=\"original_full\"`, which it takes here anyway",
              call=_of_encoder(attention_type="original_full")),
    ),
    "ibert": (
        _IBERT,
        Cured(cause="calls numpy's frexp and Python's decimals for each quantized activation",
              cure="`torch.frexp` in their place", call=replace(_IBERT, within=_frexp_of_torch)),
    ),
    "reformer": (
        _REFORMER,
        Cured(cause="numpy for a least common multiple, `.item()` for positions, and a random generator that is seeded",
              cure="compile the feed-forward layers alone; attention by hashes stays outside",
              call=replace(_REFORMER, region="encoder.layers.0.feed_forward")),
    ),
    "vits": (
        _VITS,
        Cured(cause="the length of the sound is predicted, so sizes behind it depend on numbers",
              cure="compile the decoder of sound alone", call=replace(_VITS, region="decoder")),
    ),
    "wav2vec2, training": (
        _WAV2VEC2,
        Cured(cause="sets requires_grad of an activation, draws masks with numpy, and skips layers by a random number",
              cure="freeze the feature encoder, and give masks as an input (here: none); skipped layers stay",
              call=replace(_WAV2VEC2, settings={**_WAV2VEC2.settings, "apply_spec_augment": False},
                           prepared=lambda model: model.freeze_feature_encoder())),
    ),
}  # fmt: skip


def built(name: str, call: ModelCall) -> Any:
    """Return the model of a call, with random weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    kind, settings = name.partition(",")[0], dict(call.settings)
    how = {key: settings.pop(key) for key in ("experts_implementation",) if key in settings}
    torch.manual_seed(0)
    model = (AutoModelForCausalLM if call.causal else AutoModel).from_config(
        AutoConfig.for_model(kind, **settings), **how
    )
    call.prepared(model)
    return model.train() if call.way == "train" else model.eval()


def arguments(model: Any, call: ModelCall) -> tuple[Any, dict[str, Any]]:
    """Return what is compiled, and what it is called with."""
    ids = torch.arange(4, 28).view(2, 12)
    given: dict[str, Any] = dict(call.inputs)
    if not {"pixel_values", "input_values"} & given.keys():
        mask = torch.ones_like(ids)
        mask[0, :3] = 0  # a padded row
        given = {"input_ids": ids, "attention_mask": mask, **given}
    if call.way == "generate":
        return model.generate, {"inputs": ids, "max_new_tokens": 3, "do_sample": False}
    if call.way == "cached":
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        return model, {"input_ids": ids[:, :1], "past_key_values": cache}
    if not call.region:
        return model, given
    found: list[dict[str, Any]] = []
    part: nn.Module = model.get_submodule(call.region)

    def seen(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append({"args": args, **named})

    handle = part.register_forward_pre_hook(seen, with_kwargs=True)
    with torch.no_grad():
        model(**given)
    handle.remove()
    return part, found[0]


def explained(name: str, call: ModelCall) -> dict[str, Any]:
    """Return the number of graphs and breaks of a call, and the reason and line of each kind of break."""
    torch._dynamo.reset()
    function, given = arguments(built(name, call), call)
    given = dict(given)
    places = given.pop("args", ())
    with call.within(), torch.set_grad_enabled(call.way == "train"):
        said = torch._dynamo.explain(function)(*places, **given)
    reasons: dict[str, str] = {}
    for each in said.break_reasons:
        frame = each.user_stack[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        reasons.setdefault(where, each.reason.partition("\n")[0])
    return {"graphs": said.graph_count, "breaks": said.graph_break_count, "reasons": reasons}


def line_of(name: str) -> dict[str, Any]:
    """Return the line of a class, with what its cure leaves."""
    call, cured = CALLS[name]
    line = {"workload": "graph breaks", "model": name, **explained(name, call)}
    if cured is None:
        return line
    left = explained(name, cured.call)
    return {
        **line,
        "cause": cured.cause,
        "cure": cured.cure,
        "breaks_left": left["breaks"],
        "graphs_left": left["graphs"],
    }


def main() -> None:
    a = asked(__doc__, models=([OneOf(tuple(CALLS))], "and ways of calling them"), output=(Path, "the file of results"))
    warnings.simplefilter("ignore")
    torch._logging.set_logs(dynamo=logging.CRITICAL)
    with told():
        for name in a.models:
            line = line_of(name)
            keep(a.output, line)
            left = f" -> {line['breaks_left']} with {line['cure']}" if "cure" in line else ""
            print(f"{name:24} {line['graphs']:3} graphs {line['breaks']:3} breaks{left}", flush=True)
            for where, reason in line["reasons"].items():
                print(f"{'':26}{where}: {reason}")


if __name__ == "__main__":
    main()
