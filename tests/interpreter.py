"""Triton's interpreter at a third of its cost, and with E4M3 as GPUs have it, for the tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


def patch_once() -> None:
    _patch_languages()
    _patch_builtins()
    _patch_types()
    _patch_shapes()
    _patch_overflow()
    _patch_e4m3()
    _patch_dot()


def _patch_dot() -> None:
    """Let products be summed in float64: BLAS sums a row in another order at another place of a tile, on some CPUs, and
    no GPU does."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.data.dtype not in (np.float16, np.float32) or d.data.dtype != np.float32:
            return multiply(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


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


def _patch_builtins() -> None:
    """Let a builtin be called directly: of itself each call copies its keywords and goes through two functions."""
    checks = tl.core.builtin(patch_once).__code__  # of the function that `builtin` puts around another

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is checks else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _patch_types() -> None:
    """Remember what types are like, which the interpreter otherwise works out for every value anew."""
    core, number_type = tl.core, interpreter._get_np_dtype

    @cache
    def block(*lengths: int) -> tuple[Any, int]:
        return core.tuple(list(lengths)), validate_block_shape(lengths)

    @cache
    def shape(*lengths: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(math.prod(lengths))

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.shape, self.numel = block(*map(core._unwrap_if_constexpr, shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.name = f"<{self.shape.values}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape(*type.shape) if type.is_block() else shape()

    number_types: dict[str, Any] = {}
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor
    interpreter._get_np_dtype = lambda dtype: (
        number_types.get(dtype.scalar.name) or number_types.setdefault(dtype.scalar.name, number_type(dtype))
    )


def _patch_shapes() -> None:
    """Do nothing at once to what is plain or of one shape already, which is how nearly all values come."""
    core, semantic = tl.core, interpreter.TritonSemantic
    unwrap, equal, broadcast = core._unwrap_if_constexpr, core.tuple.__eq__, semantic.broadcast_impl_value
    same = core.constexpr(True)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)  # one shape is one object, see above

    core._unwrap_if_constexpr = lambda x: x if x.__class__ in (int, core.dtype, core.block_type) else unwrap(x)
    core.tuple.__eq__ = lambda self, other: same if self is other else equal(self, other)
    semantic.broadcast_impl_value = broadcast_impl_value


def _patch_overflow() -> None:
    """Leave out what would check integers for overflow: the interpreter computes it all and then asserts nothing."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # with which it would assert
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
