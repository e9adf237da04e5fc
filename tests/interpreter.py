"""Triton's interpreter at a third of its cost, and with E4M3 as GPUs have it, for the tests."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


def patch_once() -> None:
    _patch_languages()
    _patch_launches()
    _patch_conversions()
    _patch_builtins()
    _patch_types()
    _patch_shapes()
    _patch_operands()
    _patch_handles()
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
    """Let a launch give the language its interpreted meaning once, by what the first launch found out. Of itself each
    launch looks through the whole language, and so does every call of a function in a kernel, which finds nothing left
    to do."""
    patch_language = interpreter._patch_lang

    @cache
    def languages(function: Callable[..., Any]) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    @cache
    def changes(*seen: Any) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, str, Any]]]:
        """The attributes that a kernel which sees these languages changes: their new values, and the old ones."""
        scope = patch_language(SimpleNamespace(__globals__=dict(enumerate(seen))))
        old = {(obj, name): value for obj, name, value in reversed(scope._changes)}  # the first of several counts
        new = [(obj, name, getattr(obj, name)) for obj, name in old]
        scope.restore()
        return new, [(obj, name, value) for (obj, name), value in old.items()]

    def patch(function: Callable[..., Any]) -> Any:
        scope = interpreter._LangPatchScope()
        seen = languages(function)
        if any(tl.core.is_builtin(language.load) for language in seen):
            new, old = changes(*seen)
            for each in new:
                setattr(*each)
            scope._changes = list(old)
        return scope

    interpreter._patch_lang = patch


def _patch_launches() -> None:
    """Let a launch take the arguments as they are. Of itself it looks at the kernel's signature several times, and
    copies every tensor's memory onto itself, since it could lie on a GPU."""

    class Executor(interpreter.GridExecutor):
        def __init__(self, fn: Any, arg_names: list[str], grid: Any, pre_run_hooks: Sequence[Any] = ()) -> None:
            self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
            self.constexprs = constants(fn, tuple(arg_names))

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
            return args_dev, kwargs

        def _restore_args_dev(self, *args: Any) -> None:
            pass

    @cache
    def constants(fn: Any, arg_names: tuple[str, ...]) -> list[str]:
        return plain(fn, arg_names, ()).constexprs  # type: ignore[no-any-return]

    plain, interpreter.GridExecutor = interpreter.GridExecutor, Executor
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getfullargspec": cache(inspect.getfullargspec)})


def _patch_conversions() -> None:
    """Let numbers of 8 and 16 bits be converted by tables that the interpreter's own conversion fills, and float32 to
    bfloat16 by leaving out the low bits, as it does but for subnormal numbers."""
    convert = interpreter._convert_float

    @cache
    def table(source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        return convert(np.arange(1 << bits, dtype=f"uint{bits}"), source, target, rounding)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        width = source.primitive_bitwidth
        if width <= 16:
            return table(source, target, rounding)[data.view(f"uint{width}")]
        if source == tl.float32 and target == tl.bfloat16 and rounding is None:
            bits = data.view(np.uint32)
            if not ((bits & 0x7F800000 == 0) & (bits & 0x7FFFFF != 0)).any():
                return (bits >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


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
    def block(*lengths: int) -> tuple[Any, int, tuple[Any, Any]]:
        return core.tuple(list(lengths)), validate_block_shape(lengths), shape(*lengths)

    @cache
    def shape(*lengths: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(length) for length in lengths]), core.constexpr(math.prod(lengths))

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.shape, self.numel, self.of_tensor = block(*map(core._unwrap_if_constexpr, shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.name = f"<{self.shape.values}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.__class__ is core.block_type else no_shape

    blocks: dict[tuple[int, int], Any] = {}  # what its keys number lives as long as itself

    def with_element_ty(self: Any, element_ty: Any) -> Any:
        key = id(element_ty), id(self.shape)  # one shape is one object, see `block`
        return blocks.get(key) or blocks.setdefault(key, core.block_type(element_ty, self.shape))

    to_ir, builder = core.block_type.to_ir, interpreter.interpreter_builder
    core.block_type.to_ir = lambda self, its: self if its is builder else to_ir(self, its)
    number_types, no_shape = dict[str, Any](), shape()
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor
    core.block_type.with_element_ty = with_element_ty
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


def _patch_operands() -> None:
    """Bring two operands to one type and shape at once where they are numbers of one type, or one of them is a plain
    number or a pointer. Data are left for numpy to broadcast, which the operation does anyway."""
    core, semantic = tl.core, interpreter.TritonSemantic
    tensor, check = core.tensor, semantic.binary_op_type_checking_impl
    alike = {"int32", "int64", "fp32"}  # whose results have the same type, whatever the operation

    @lru_cache(1 << 12)
    def constant(value: Any, of: type, dtype: Any) -> Any:
        return interpreter.interpreter_semantic.scalar_constant(value, dtype)

    def plain(value: Any, dtype: Any) -> bool:
        """A number that does not take part in the choice of a type."""
        if value.__class__ is int:
            return -(2**31) <= value < 2**31
        return value.__class__ is float and dtype.name == "fp32"

    @cache
    def common(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Any:
        """The shape of blocks of both shapes, as of a block; None if the interpreter should say what is wrong."""
        if len(lhs) != len(rhs) or any(a != b and 1 not in (a, b) for a, b in zip(lhs, rhs, strict=True)):
            return None
        return core.block_type(tl.int32, [b if a == 1 else a for a, b in zip(lhs, rhs, strict=True)])

    def joined(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type, rhs.type
        if right.__class__ is not core.block_type:
            return lhs, tensor(rhs.handle, left.with_element_ty(rhs.dtype))
        if left.__class__ is not core.block_type:
            return tensor(lhs.handle, right.with_element_ty(lhs.dtype)), rhs
        block = common(tuple(left.shape), tuple(right.shape))
        if block is None:
            return semantic.broadcast_impl_value(self, lhs, rhs)  # type: ignore[no-any-return]
        return (
            tensor(lhs.handle, block.with_element_ty(lhs.dtype)),
            tensor(rhs.handle, block.with_element_ty(rhs.dtype)),
        )

    def checked(self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, *more: Any, **named: Any) -> Any:
        if lhs.__class__ is tensor:
            kind = lhs.dtype
            if rhs.__class__ is tensor:
                if kind.name in alike and kind.name == rhs.dtype.name:
                    return joined(self, lhs, rhs)
                if allow_lhs_ptr and kind.__class__ is core.pointer_type and rhs.dtype.name in ("int32", "int64"):
                    return joined(self, lhs, rhs)
            elif kind.name in alike and plain(rhs, kind):
                return joined(self, lhs, constant(rhs, rhs.__class__, kind))
        elif rhs.__class__ is tensor and rhs.dtype.name in alike and plain(lhs, rhs.dtype):
            return joined(self, constant(lhs, lhs.__class__, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, *more, **named)

    semantic.binary_op_type_checking_impl = checked


def _patch_handles() -> None:
    """Make the pieces of data that values consist of in one step."""
    valid, widths = interpreter._validate_np_data_size, dict[str, int]()

    def fits(data: Any, dtype: Any) -> bool:
        if dtype.__class__ is not tl.core.dtype:
            return valid(data, dtype)  # type: ignore[no-any-return]
        width = widths.get(dtype.name) or widths.setdefault(dtype.name, max(8, dtype.primitive_bitwidth) // 8)
        return data.itemsize <= width  # type: ignore[no-any-return]

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        self.__post_init__()

    interpreter._validate_np_data_size = fits
    interpreter.TensorHandle.__init__ = init


def _patch_overflow() -> None:
    """Leave out what would check integers for overflow: the interpreter computes it all and then asserts nothing."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # with which it would assert
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
