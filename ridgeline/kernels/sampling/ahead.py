"""The entries by which the sampling kernels are compiled ahead of time, for a vocabulary that is a multiple of 16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.sampling.bracket import bracket_kernel, stats_kernel
from ridgeline.kernels.sampling.draw import draw_kernel
from ridgeline.kernels.sampling.finish import finish_kernel
from ridgeline.kernels.sampling.triton_logprobs import combine_kernel, score_kernel, top_kernel
from ridgeline.kernels.sampling.triton_mask import mask_kernel
from ridgeline.kernels.sampling.triton_noised import noised_kernel
from ridgeline.kernels.sampling.triton_parts import best_kernel
from ridgeline.kernels.sampling.typical import typical_kernel

_INT64 = {
    "slots_ptr", "position_ptr", "seed_ptr", "top_k_ptr", "min_len_ptr", "bias_ids_ptr", "stop_ids_ptr", "token_ptr",
    "rank_ptr", "candidate_ptr", "top_id_ptr",
}  # fmt: skip
_INT32 = {"pair_ptr", "count_ptr", "num_candidates_ptr", "best_id_ptr", "tile_count_ptr", "bits_ptr", "row_ptr"}
_BOOL = {"seen_ptr"}
_DIVISIBLE = {
    "V", "logits_stride", "source_stride", "adjusted_stride", "bias_ids_stride", "bias_stride",
    "stop_stride", "count_stride", "seen_stride",
}  # fmt: skip


NVIDIA = tuple(arch for arch in ONE_OF_EACH if arch.startswith("sm_"))
AMD = tuple(arch for arch in ONE_OF_EACH if not arch.startswith("sm_"))


def _kernel(fn: Any, constexprs: dict[str, Any], logits: str = "bf16", **options: Any) -> AotKernel:
    types = {}
    for name in fn.arg_names:
        if name in ("logits_ptr", "source_ptr"):
            types[name] = f"*{logits}"
        elif name.endswith("_ptr"):
            types[name] = (
                "*i64" if name in _INT64 else "*i32" if name in _INT32 else "*i1" if name in _BOOL else "*fp32"
            )
        elif name not in constexprs and name != "PDL":
            types[name] = "i32:16" if name in _DIVISIBLE else "i32"
    if constexprs.get("PART"):
        types["token_ptr"] = "*i32"
    return AotKernel(fn, types, constexprs, **{"archs": ONE_OF_EACH} | options)


def _draws(archs: tuple[str, ...], approximate: bool) -> Iterator[AotKernel]:
    """Yield the kernels with noise. `approximate`: they use NVIDIA's instruction for a logarithm, which no other GPU
    has."""
    base = {"TILE": 2048, "CAPACITY": 2048, "RANDOM": True, "APPROX": approximate}
    options: dict[str, Any] = {"num_warps": 4, "hot": True, "archs": archs}
    for filtered in (False, True):
        yield _kernel(draw_kernel, base | PLAIN | {"FILTER": filtered}, **options)
    yield _kernel(draw_kernel, base | EVERYTHING | {"FILTER": False}, "fp32", num_warps=4, archs=archs)
    finish = _REDUCE | {"TILES": 64, "RANDOM": True, "APPROX": approximate}
    yield _kernel(finish_kernel, finish, num_warps=8, hot=True, archs=archs)
    yield _kernel(finish_kernel, finish | {"FILTER": True}, num_warps=16, archs=archs)
    yield _kernel(finish_kernel, finish | {"PART": True}, num_warps=8, hot=True, archs=archs)
    yield _kernel(
        best_kernel, {"RANKS": 2, "TILE": 64, "RANDOM": True, "APPROX": approximate}, num_warps=1, archs=archs
    )
    yield _kernel(noised_kernel, {"TILE": 1024, "RANDOM": True, "APPROX": approximate}, num_warps=4, archs=archs)


PLAIN = {"BIAS_WIDTH": 0, "STOP_WIDTH": 0, "PENALTY": 0}
EVERYTHING = {"BIAS_WIDTH": 1024, "STOP_WIDTH": 64, "PENALTY": 1}
_GREEDY = {"TILE": 1024, "CAPACITY": 2048, "RANDOM": False, "FILTER": False, "APPROX": False}
_REDUCE = {
    "TILES": 128, "TILE": 2048, "CAPACITY": 2048, "MANY": 8192, "SHIFT": 16, "RANDOM": False,
    "APPROX": False, "FILTER": False, "PART": False,
}  # fmt: skip

AOT = (
    _kernel(draw_kernel, _GREEDY | PLAIN, num_warps=4, hot=True),
    *_draws(NVIDIA, True),
    *_draws(AMD, False),
    _kernel(stats_kernel, {"TILE": 4096} | PLAIN, num_warps=8, hot=True),
    _kernel(stats_kernel, {"TILE": 4096} | EVERYTHING, num_warps=8),
    _kernel(bracket_kernel, {"TILES": 32, "SAMPLE": 4096, "RESERVE": 16, "CAPACITY": 2048}, num_warps=8, hot=True),
    _kernel(finish_kernel, _REDUCE, num_warps=1, hot=True),
    _kernel(typical_kernel, {"TILES": 128, "SHIFT": 16, "MANY": 8192}, num_warps=16),
    _kernel(mask_kernel, {"TILE": 4096}, num_warps=8, hot=True),
    _kernel(score_kernel, {"TILE": 4096}, num_warps=8, hot=True),
    _kernel(combine_kernel, {"TILES": 32}, num_warps=1, hot=True),
    _kernel(top_kernel, {"TILE": 4096, "TILES": 32}, num_warps=8),
)
