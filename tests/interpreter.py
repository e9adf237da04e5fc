"""Triton's interpreter at half its cost, and with E4M3 as GPUs have it, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    _patch_languages()
    _patch_e4m3()


def _patch_e4m3() -> None:
    """Let numbers become E4M3 by torch's rounding: the interpreter truncates subnormals, and loses NaN."""
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar != tl.float8e4nv or src.dtype.scalar not in (tl.float16, tl.float32):
            return convert(self, src, dst_type, rounding_mode)
        rounded = torch.from_numpy(src.data.copy()).float().to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), dst_type.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _patch_languages() -> None:
    """Let a launch give the language its interpreted meaning once; of itself it does so again at every call of a
    function in the kernel, which finds nothing left to do and takes as long as the kernel."""
    patch_language = interpreter._patch_lang

    @cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch(function: Callable[..., Any]) -> Any:
        due = any(tl.core.is_builtin(language.load) for language in languages(function))
        return patch_language(function) if due else interpreter._LangPatchScope()

    interpreter._patch_lang = patch
