"""The weights that keep the form of a quantized checkpoint's files."""

from __future__ import annotations

from pathlib import Path

from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.op import on_gpu
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.experts import keeps_stacks
from ridgeline.quantization.held import runs_well
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.quantized.plan import Forms


def kept_forms(forms: Forms, config: LLMConfig, folder: Path, ops: Ops) -> Forms:
    """Return the modules whose weights keep the form of the files: on a GPU all, on a CPU those that it multiplies fast
    (or all, if the user names implementations). Others become plain numbers when they are loaded, as do a GGUF file's
    if they are to be rounded otherwise."""
    if config.quantization is not None and is_gguf(folder):
        return {}
    wanted = on_gpu(ops.platform) or bool(config.kernels)
    return {
        name: form
        for name, form in forms.items()
        if (wanted or runs_well(form, ops)) and (form.copies == 1 or keeps_stacks(ops, form.helds))
    }
