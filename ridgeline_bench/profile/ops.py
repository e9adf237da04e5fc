"""Times of every op of a step at its real shape, alone: the time of the step without launches and gaps.

A network with one layer of each kind (behind one whose ops do not count, because it has no residual to add yet) runs
one step through the worker's own runner while its ops are recorded with their arguments. Each is then timed by itself
over copies of those arguments, so that weights come from memory as they do in a step of many layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.perf.explain import JOINT
from ridgeline.worker.runner import Runner
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.profile.made_plan import layout_for, made_plan

# Bookkeeping of some hundred bytes. An embedding that is no parameter picks the hidden states to score.
UNPRICED = (
    "step_inputs",
    "step_metadata",
    "attention_schedule",
    "step_advance",
    "step_verify",
    "step_post",
    "embedding",
)
NAMED_ALIKE = (  # ops that the cost model calls by their own names, and not after their parameters
    *("route", "grouped_gate_up", "grouped_down"),
    *("causal_conv", "gated_delta", "gated_norm", "selective_scan", "ssd"),
    *("linear_attention", "delta_attention", "wkv"),
)
EFFORT = Effort(seconds=0.1, repeats=7)


@dataclass(frozen=True)
class Recorded:
    """One call of an op: its name in the cost model, and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple
    options: Mapping[str, Any]

    def again(self, *, fresh: bool) -> Callable[[], object]:
        """Return the same call, over copies of its tensors if `fresh`."""
        storages: dict[int, UntypedStorage] = {}
        arguments = _copied(self.arguments, storages) if fresh else self.arguments
        return lambda: self.function(*arguments, **self.options)

    @property
    def bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in _flat(self.arguments) if isinstance(x, Tensor))


def measure_step_ops(model: ModelSpec, shape: StepShape, device: torch.device, dtype: str) -> dict[str, float]:
    """Return op name, as in `perf.roofline.step_ops`, → seconds of one call at the step's shape (medians).

    Ops that occur several times under one name (a model with two kinds of layers) are averaged over the kinds. Weights,
    keys and values are random. Raise torch.OutOfMemoryError if one layer and its cache do not fit.
    """
    bench = Bench.of(device, EFFORT)
    times: dict[str, list[float]] = {}
    with on_device(device):
        calls = record_step(model, shape, device, dtype)
    for call in calls:
        rounds = [call.again(fresh=i > 0) for i in range(bench.copies(max(1, call.bytes)))]
        times.setdefault(call.name, []).append(bench.seconds(*rounds))
    return {name: sum(values) / len(values) for name, values in times.items()}


def _but_first(calls: list[Recorded]) -> list[Recorded]:
    """Return the calls without the first one under each name that occurs again."""
    left = Counter(call.name for call in calls)
    once = {name for name, count in left.items() if count == 1}
    seen: set[str] = set()
    kept = []
    for call in calls:
        if call.name in seen | once:
            kept.append(call)
        seen.add(call.name)
    return kept


def record_step(model: ModelSpec, shape: StepShape, device: torch.device, dtype: str) -> list[Recorded]:
    """Return the op calls of one step of a network with one layer of each kind of `model`, in order."""
    kinds = tuple(dict.fromkeys(model.layers))
    spec = replace(model, layers=(kinds[0], *kinds))
    lengths = [int(length) for length in shape.kv_len_R]
    ops, names, calls = Ops(Platform.of(device)), dict[int, str](), list[Recorded]()
    _listen(ops, names, calls)  # before layers take functions of it
    decoder = Decoder(spec, ops, dtype=getattr(torch, dtype), device=device, max_positions=max(lengths) + 1)
    for parameter in decoder.requires_grad_(False).parameters():
        parameter.normal_(std=0.02)
    layout = layout_for(spec, shape, dtype, DEFAULT_BLOCK_SIZE[device.type])
    runner = Runner(decoder, layout, num_slots=len(lengths) + 1, max_model_len=max(lengths) + layout.block_size)
    names.update(_weight_names(decoder))
    calls.clear()
    runner.sample(runner.forward(made_plan(spec, shape, layout)), {})
    for call in calls:
        for cache in _caches_of(call):
            cache.normal_()
    return _but_first(calls)


def _caches_of(call: Recorded) -> tuple[Tensor, ...]:
    """Return the keys and values that a call attends to."""
    if call.name == "attention":
        return call.arguments[1:3]
    if call.name.endswith(f"{JOINT}attention"):  # a fused op
        return call.arguments[0].k_cache_NGPD, call.arguments[0].v_cache_NGPD
    return ()


def _listen(ops: Ops, names: Mapping[int, str], calls: list[Recorded]) -> None:
    """Record every call of these ops from now on."""

    def listening(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            name = step_name(op, arguments, names)
            if name not in UNPRICED:
                calls.append(Recorded(name, function, arguments, options))
            return function(*arguments, **options)

        return call

    for op in OPS:
        setattr(ops, op, listening(op, getattr(ops, op)))


def step_name(op: str, arguments: tuple, names: Mapping[int, str]) -> str:
    """Return the cost model's name for a call of `op`; for a fused op the names of its parts, joined.

    `names` maps the id of a decoder's parameter to its name.
    """
    if op in NAMED_ALIKE:
        return op
    paths = dict.fromkeys(names[id(a)].rpartition(".")[0] for a in _flat(arguments) if id(a) in names)
    modules = list(map(module_name, paths))
    if op == "norm_linear":
        *norm, product = modules
        named = "unembed" if product == "embed" else product
        return JOINT.join([*norm, named, *(["gated_activation"] if arguments[2].gate else [])])
    if op in ("rope_kv", "decode_attention"):
        rotated = arguments[0].cos_sin_ZY is not None
        attends = op == "decode_attention"
        return JOINT.join([*modules, *["rope"] * rotated, "write_kv", *["attention"] * attends])
    if op == "linear" and modules == ["embed"]:
        return "unembed"
    return modules[0] if modules else {"paged_attention": "attention"}.get(op, op)


def module_name(path: str) -> str:
    """Return the cost model's name for the decoder's module at this path. Those of a shared expert, and of two mixers
    side by side, keep the word before it."""
    *_, above, name = f".{path}".split(".")
    return f"{above}.{name}" if above in ("shared", "attention", "mamba") else name


def _weight_names(decoder: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in decoder.named_parameters()}


def _flat(values: tuple) -> list[Any]:
    """Return the values of a tuple and of the tuples in it."""
    return [x for value in values for x in (_flat(value) if isinstance(value, tuple) else [value])]


def _copied(value: Any, storages: dict[int, UntypedStorage]) -> Any:
    """Return a tensor over a copy of its memory, with views of one memory over one copy, tuples of these, or any other
    value as it is."""
    if isinstance(value, tuple):
        copies = [_copied(each, storages) for each in value]
        return type(value)(*copies) if hasattr(value, "_fields") else tuple(copies)
    if not isinstance(value, Tensor):
        return value
    memory = value.untyped_storage()
    copy = storages.setdefault(memory.data_ptr(), memory.clone())
    return value.new_empty(0).set_(copy, value.storage_offset(), value.size(), value.stride())
