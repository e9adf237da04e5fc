"""Forms of one model's weights, each loaded without files of real weights.

Weights are random. What an engine needs beside the model's config.json is written into a folder: the
`quantization_config` of a checkpoint, as published folders have it, or a GGUF file of random blocks. Names end with
`@N` for N devices of tensor parallelism: `bf16@2`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.random_gguf import write as write_gguf


def _compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an entry of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = _compressed(
    "float-quantized",
    {**_FP8, "strategy": "channel", "dynamic": False},
    {**_FP8, "strategy": "token", "dynamic": True},
)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
NVFP4 = _compressed(
    "nvfp4-pack-quantized",
    {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False},
    None,
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form. quality: the line of `ridgeline eval quantization` that has its perplexity.

    options: arguments of LLM. entry: the quantization_config. gguf: the kind of a GGUF file. lacking: why no engine
    here holds this form.
    """

    what: str
    quality: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    entry: Mapping[str, Any] | None = None
    gguf: str = ""
    lacking: str = ""


FORMS: Mapping[str, Form] = {
    "bf16": Form(what="16 bits", quality="plain:"),
    "w8a8": Form(
        what="int8 weights and activations (SmoothQuant's factors lie in the weights, and cost no time)",
        quality="w8a8:smoothquant",
        options={"quantization": "w8a8"},
    ),
    "gptq": Form(what="GPTQ, 4 bits, groups of 128", quality="w4a16:gptq", entry=GPTQ),
    "fp8": Form(what="E4M3 weights and activations", quality="fp8:rtn", options={"quantization": "fp8"}),
    "fp8-file": Form(what="E4M3 as in a checkpoint, which needs no room for 16 bits", quality="fp8:rtn", entry=FP8),
    "nvfp4": Form(what="NVFP4 weights, activations in 16 bits", quality="nvfp4:rtn", entry=NVFP4),
    "mxfp8": Form(
        what="MXFP8",
        lacking="no layer holds MXFP8: its products are those of sm_100, and here FP8 has a scale for each output or "
        "for each 128 by 128 weights",
    ),
    "q4_k_m": Form(what="GGUF, Q4_K_M", quality="gguf:q4_k_m", gguf="Q4_K_M"),
    "w4a16": Form(
        what="4-bit whole numbers, rounded when loaded", quality="w4a16:rtn", options={"quantization": "w4a16"}
    ),
}


def split(name: str) -> tuple[Form, int]:
    """Return the form and the devices of a name. Raise InvalidConfig for an unknown one."""
    form, _, devices = name.partition("@")
    if form not in FORMS or not (devices or "1").isdigit() or devices == "0":
        raise InvalidConfig(f"unknown form {name!r}; known: {', '.join(FORMS)}, with @DEVICES behind.")
    return FORMS[form], int(devices or 1)


def arguments(name: str, source: Path, spare: Path) -> dict[str, Any]:
    """Return the arguments of LLM that load a form of the model whose config.json `source` has. spare: an empty folder
    for what must be written. Raise InvalidConfig with the reason if no engine here holds the form."""
    form, devices = split(name)
    if form.lacking:
        raise InvalidConfig(f"{name} is left out: {form.lacking}.")
    options: dict[str, Any] = {"model": str(source), "load_format": "dummy", **form.options}
    if devices > 1:
        options["tensor_parallel_size"] = devices
    if form.entry is not None:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**config, "quantization_config": form.entry})
        (spare / "config.json").write_text(text, encoding="utf-8")
        options["model"] = str(spare)
    if form.gguf:
        file = write_gguf(source, spare / "model.gguf", form.gguf)
        options |= {"model": str(file), "load_format": "auto"}
    return options
