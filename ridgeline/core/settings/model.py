"""Settings of the model: its files, and the form in which it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import Named, Settings

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The model, and the form in which it is loaded.

    model: a folder or a hub id.
    model_impl: "ridgeline" runs the architectures that we have ("vllm" means the same), and "transformers" those of the
        installed transformers package, through its modules with our attention and cache. "auto": the first if it can.
    runner: "generate", "pooling" (the model embeds or classifies), or "auto": as the model's files say.
    convert: what a decoder becomes that pools: "embed", or "classify" by the scores of tokens; "auto": as its files
        say, or else "embed"; "none": nothing.
    download_dir: the folder that keeps models of the hub (default: the hub client's own).
    tokenizer, tokenizer_revision: a folder or a hub id whose tokenizer and chat template take the place of the model's.
    hf_overrides: entries of config.json that take the place of the model's, as in {"rope_theta": 1000000.0}. Objects
        are merged.
    generation_config: the source of sampling defaults: "auto" (the model's generation_config.json), "none", or a folder
        with such a file.
    override_generation_config: sampling defaults that win over these, as in {"temperature": 0.7}.
    dtype: one of DTYPES (half is float16 and float is float32), or "auto": the checkpoint's own, but float32 on a CPU
        without bfloat16 instructions, where float32 is far faster.
    device: "auto", "cpu", "cuda" or "cuda:1".
    encoder_device: the device of a tower of pictures or a listener, such as "cuda:1" (default: that of the model). Its
        vectors are copied to the model's device by the steps that need them.
    kernel_cache: a folder of kernels that `ridgeline compile --cache` has made for GPUs of this kind. What is not there
        is looked for in Triton's own cache, and compiled.
    load_format: "dummy" fills the weights with random numbers.
    language_model_only: of a model that sees pictures or hears sounds its text model alone is loaded.
    mm_encoder_only: of such a model what sees or hears is loaded alone, and makes vectors for others.
    quantization: how plain weights of linear maps are rounded when they are loaded. "w8a8": to int8, with a scale for
        each output, and activations too, with a scale for each token (a GPU, or a CPU with VNNI, or with AVX2 and a C++
        compiler). "fp8" and "fp8-block": likewise to E4M3, with scales for outputs and tokens, or for blocks of 128.
        "w4a16": to four bits, with a scale for each 128 inputs. "int8": to int8 beside plain activations (a CPU). A
        checkpoint that is quantized needs none of them; its own method may be named.
    """

    model: str | Path = ""
    model_impl: Literal["auto", "ridgeline", "transformers", "vllm"] = "auto"
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    revision: str | None = None
    download_dir: Annotated[str | Path | None, Named("a path or a hub id")] = None
    tokenizer: Annotated[str | Path | None, Named("a path or a hub id")] = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    hf_overrides: Mapping[str, object] | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, object] | None = None
    dtype: str = "auto"
    device: str = "auto"
    encoder_device: str | None = None
    kernel_cache: Annotated[str | Path | None, Named("a path")] = None
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    language_model_only: bool = False
    mm_encoder_only: bool = False
    quantization: str | None = None

    def check(self) -> None:
        if self.language_model_only and self.mm_encoder_only:
            raise InvalidConfig("language_model_only and mm_encoder_only leave nothing of a model; set one of them.")
        check_overrides(self.hf_overrides, self.override_generation_config)
        if self.dtype not in ("auto", *DTYPES):
            raise InvalidConfig(f"unknown dtype {self.dtype!r}; use auto, {', '.join(DTYPES)}.")


def check_overrides(config: object, generation: object) -> None:
    """Raise InvalidConfig unless both are objects, or None, that may override what they are for."""
    for name, value in (("hf_overrides", config), ("override_generation_config", generation)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidConfig(f'{name} must be an object, as {{"key": 1}}, got {value!r}.')
    for name in ("quantization_config", "compression_config"):
        if isinstance(config, Mapping) and name in config:
            raise InvalidConfig(f"hf_overrides cannot set {name}, which tells how the files are stored; leave it out.")
