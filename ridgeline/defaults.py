"""Values of settings that a user leaves open, by model and device, and refusals of settings that cannot be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.steps import DEFAULT_LIMITS, LARGE_GPU, LARGE_STEP
from ridgeline.core.specs.latent import LatentAttentionSpec, LatentSpec
from ridgeline.core.specs.model import AttentionSpec, MLPSpec, ModelSpec
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.core.specs.state import ChunkedKVSpec, KVSpec, RecurrentSpec
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import deterministic_ops


class DtypeChoice(NamedTuple):
    """The type that weights and activations are held in, and the reason for it."""

    name: str
    why: str


def choose_kernels(config: LLMConfig, device: torch.device) -> dict[str, str]:
    """Return the implementation of each op where it is not the platform's first. Raise InvalidConfig for an unknown
    one."""
    chosen = deterministic_ops(Platform.of(device)) if config.deterministic else {}
    if config.enable_lora_experts and device.type == "cpu":  # panels have no products without an activation
        chosen = {**chosen, **dict.fromkeys(("grouped_gate_up", "grouped_down"), "torch")}
    return {**chosen, **config.kernels}


def check_deterministic(config: LLMConfig, model: ModelSpec, device: torch.device, *, coded: bool) -> None:
    """Raise InvalidConfig if results of a CPU would depend on what runs beside a request though they must not.

    coded: weights are no plain numbers.
    """
    if not config.deterministic or device.type == "cuda":
        return
    plain = all(
        isinstance(layer.mixer, AttentionSpec)
        and isinstance(layer.feed_forward, MLPSpec)
        and all(type(state) is KVSpec for state in layer.mixer.states)
        for layer in model.layers
    )
    if not plain or coded or config.enable_lora or model.pooling is not None or config.ranks > 1:
        raise InvalidConfig(
            f"deterministic on {device} is for one device, plain weights, and layers of attention with feed-forwards "
            "of one expert; leave it out, or use a GPU."
        )


def choose_device(wanted: str, setting: str = "device") -> torch.device:
    """Return the device. "auto" takes a GPU if there is one. setting: where it was asked for. Raise InvalidConfig for a
    device that is not here."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, index = str(wanted).partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not _is_number(index))):
        raise InvalidConfig(f"{setting} is the unknown device {wanted!r:.80}; use auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"{setting} {wanted!r} was asked for, but torch {torch.__version__} sees no GPU; use cpu.")
    if kind == "cuda" and int(index or 0) >= (gpus := torch.cuda.device_count()):
        raise InvalidConfig(f"{setting} {wanted!r} was asked for, but the last GPU here is cuda:{gpus - 1}; use that.")
    return torch.device(wanted)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 4


def device_of_rank(config: LLMConfig, rank: int) -> torch.device:
    """Return the device of one of the ranks that divide a model. Raise InvalidConfig if there are too few."""
    kinds, ranks = config.stage_kinds, config.ranks
    if kinds and kinds[rank] == "cuda":
        return choose_device(f"cuda:{kinds[:rank].count('cuda')}")
    device = choose_device("cpu" if kinds else config.device)
    named = f"{' times '.join(config.divided_by)} is {ranks}"
    if device.type == "cpu":
        return device
    if ":" in str(device):
        raise InvalidConfig(f"device {config.device} is one GPU, and {named}; use device cuda.")
    if ranks > (gpus := torch.cuda.device_count()):
        raise InvalidConfig(f"{named}, and torch sees {gpus} GPUs; lower it to {gpus}.")
    return torch.device(device.type, rank)


def shared_device(config: LLMConfig, device: torch.device) -> torch.device:
    """Return the device by which a rank chooses what all ranks must choose alike: the CPU, if a stage is there."""
    return torch.device("cpu") if "cpu" in config.stage_kinds else device


def choose_block_size(config: LLMConfig, device: torch.device) -> int:
    """Return the tokens of a block of the cache, which are the same on all ranks."""
    return config.block_size or DEFAULT_BLOCK_SIZE["cuda" if config.unlike_stages else device.type]


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> DtypeChoice:
    """Return the dtype. "auto" is the checkpoint's own, but float32 on a CPU without bfloat16 instructions, where that
    is far faster."""
    if wanted != "auto":
        return DtypeChoice(wanted, "it was asked for")
    if device.type == "cpu" and checkpoint != "float32" and not torch.cpu._is_avx512_bf16_supported():
        return DtypeChoice(
            "float32",
            f"this CPU has no instructions for bfloat16, without which the checkpoint's {checkpoint} is far slower",
        )
    return DtypeChoice(checkpoint, "the checkpoint's own")


def check_max_model_len(wanted: int | None, model: ModelSpec) -> int:
    """Return the context to build for. Raise InvalidConfig if it goes beyond the model's positions."""
    longest = model.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise InvalidConfig(f"max_model_len {wanted} is more than the model's own maximum of {longest} positions.")
    return wanted or longest


def check_chunks(model: ModelSpec, block_size: int, longest: int) -> None:
    """Raise InvalidConfig if contexts of this length have chunks of attention that blocks of this size do not fill."""
    for group in model.cache_groups:
        spec = group.spec
        if isinstance(spec, ChunkedKVSpec) and longest > spec.chunk and spec.chunk % block_size:
            raise InvalidConfig(
                f"block_size {block_size} must divide the model's chunks of {spec.chunk} (attention_chunk_size)."
            )


def check_divided(model: ModelSpec, device: torch.device, ranks: int) -> None:
    """Raise InvalidConfig if so many ranks cannot divide the cached tokens of the model between them."""
    asked = f"prefill_context_parallel_size {ranks}"
    for group in model.cache_groups:
        spec = group.spec
        if isinstance(spec, RecurrentSpec):
            continue  # whose tokens ranks divide by stretches, and of which all have the whole state
        if isinstance(spec, LatentSpec):
            _check_latents(model, asked)
        elif not isinstance(spec, KVSpec) or isinstance(spec, ChunkedKVSpec):
            raise InvalidConfig(f"{asked} divides no {spec.kind} states; leave it out.")
        if spec.format.quantized:
            raise InvalidConfig(
                f"{asked} and a cache of 8 bits do not go together yet; set kv_cache_dtype to bfloat16."
            )
        if isinstance(spec, LatentSpec):
            continue
        if spec.window is not None and device.type == "cuda":
            raise InvalidConfig(f"{asked} does not divide windows of attention on a GPU yet; use tensor_parallel_size.")


def _check_latents(model: ModelSpec, asked: str) -> None:
    for layer in model.layers:
        if isinstance(layer.mixer, LatentAttentionSpec) and layer.mixer.indexer is not None:
            raise InvalidConfig(f"{asked} does not divide what an indexer chooses from; use tensor_parallel_size.")


def choose_limits(
    config: LLMConfig, device: torch.device, pooling: PoolingSpec | None = None, longest: int = 0
) -> tuple[int, int]:
    """Return the requests at once and the tokens per step. Where prompts run whole, the longest fits into a step."""
    seqs, tokens = DEFAULT_LIMITS[device.type]
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU:
        tokens = LARGE_STEP
    each = 1 + config.num_drafts
    given = config.max_num_batched_tokens
    max_seqs = config.max_num_seqs or (seqs if given is None else min(seqs, max(1, given // each)))
    whole = longest if pooling is not None and pooling.runs_whole(pooling.task) else 0
    if not config.enable_chunked_prefill:
        whole = longest
        if given is not None and given < longest:
            raise InvalidConfig(
                f"max_num_batched_tokens is {given}, and a prompt of up to {longest} tokens runs in one step; raise "
                "it, lower max_model_len, or leave enable_chunked_prefill on."
            )
    return max_seqs, given or max(tokens, max_seqs * each, whole)
