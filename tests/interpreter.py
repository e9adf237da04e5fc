"""Triton's interpreter at half its cost, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
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
