"""From a module to a graph that can be divided: forward, or the gradients of a loss.

Parameters and other tensors of the module become inputs with their names. `torch.export` should trace what Python code
decides by values, as models of transformers do; `exported` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ridgeline.compiler.backend import decompositions
from ridgeline.compiler.capture import capture
from ridgeline.compiler.graph import GraphValue, OpGraph, verify
from ridgeline.compiler.sharding.prepare import prepare
from ridgeline.compiler.sharding.products import ATTENTION, plain_attention

aten = torch.ops.aten


@dataclass(frozen=True)
class TracedModule:
    """names: of the graph's inputs in order: those of the module's tensors, and `input 0` and so on. constants: the
    tensors themselves."""

    graph: OpGraph
    names: tuple[str, ...]
    constants: Mapping[str, Tensor]

    def named(self) -> dict[str, GraphValue]:
        return dict(zip(self.names, self.graph.inputs, strict=True))


def traced(function: Callable[..., Any], inputs: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> TracedModule:
    """Return the graph of a function of tensors on a CPU, real or fake.

    inputs: examples of what it is called with. tensors: those that it uses beside, such as a module's parameters.
    """
    with ExitStack() as stack:
        stack.enter_context(_KnownOps())
        module = _trace(function, inputs)
    with torch.no_grad():  # gradients are in the graph by now, and writes can go
        module = _trace(torch.func.functionalize(module, remove="mutations"), inputs)
    return _lifted(module, tensors)


def _trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    table = {**decompositions(), **_products()}
    return make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def traced_module(module: nn.Module, inputs: Sequence[Tensor]) -> TracedModule:
    """Return the graph of a module's forward, without gradients."""
    with torch.no_grad():
        return traced(module, inputs, tensors_of(module))


def traced_gradients(module: nn.Module, inputs: Sequence[Tensor]) -> TracedModule:
    """Return the graph of (the loss that a module returns, its gradients by the parameters in their order)."""
    parameters = [each for each in module.parameters() if each.requires_grad]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        loss = module(*given)
        return (loss, *torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))

    return traced(function, inputs, tensors_of(module))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def exported(module: nn.Module, inputs: Sequence[Tensor], **options: Any) -> nn.Module:
    """Return a module as torch.export sees it, for these shapes, with attention as one op."""
    made = torch.export.export(module, tuple(inputs), options).module()
    assert isinstance(made, fx.GraphModule)
    for node in made.graph.nodes:
        if node.target is aten.linear.default:
            node.target = F.linear
        elif node.target is aten.scaled_dot_product_attention.default:
            node.target = F.scaled_dot_product_attention
        elif node.target is aten._assert_tensor_metadata.default:
            made.graph.erase_node(node)
    made.recompile()
    return made


class _KnownOps(TorchFunctionMode):
    """Lets the graph have attention as one op, or where gradients are asked for as products and a softmax, and a bias
    apart from its product, so that the product keeps all dimensions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v, mask = (given.get(name) for name in names[:4])
        causal, scale = given.get("is_causal", False), given.get("scale")
        if given.get("dropout_p") or q is None or k is None or v is None or q.dim() != 4 or len(q) != len(k):
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
            return plain_attention(q, k, v, mask, bool(causal), scale)
        return ATTENTION(q, k, v, mask, bool(causal), q.shape[-1] ** -0.5 if scale is None else scale)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.matmul(x, weight.t())
    return y if bias is None else y + bias


def _products() -> dict[Any, Callable[..., Any]]:
    """Decompositions into ops that rules know."""

    def addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        y = torch.mm(x, w) if alpha == 1 else torch.mm(x, w) * alpha
        return y + (bias if beta == 1 else bias * beta)

    def baddbmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        y = torch.bmm(x, w) if alpha == 1 else torch.bmm(x, w) * alpha
        return y + (bias if beta == 1 else bias * beta)

    def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        dims = [at % x.dim() for at in dim] if dim else list(range(x.dim()))
        trailing = keepdim and sorted(dims) == list(range(x.dim() - len(dims), x.dim()))
        if trailing or not x.is_floating_point():
            return NotImplemented
        count = torch.Size([x.shape[at] for at in dims]).numel()
        return torch.sum(x, dims, keepdim, dtype=dtype) / count

    def mean_of_all(x: Tensor, *, dtype: Any = None) -> Tensor:
        return torch.sum(x, dtype=dtype) / x.numel()

    from torch._decomp import get_decompositions

    return {
        **get_decompositions([aten.logsumexp]),
        aten.addmm.default: addmm,
        aten.baddbmm.default: baddbmm,
        aten.mean.dim: mean,
        aten.mean.default: mean_of_all,
    }


def _lifted(module: fx.GraphModule, tensors: Mapping[str, Tensor]) -> TracedModule:
    """Return the graph with the tensors that the module holds as inputs in front of its own."""
    names_of = {id(tensor): name for name, tensor in tensors.items()}
    graph, constants = module.graph, dict[str, Tensor]()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs: dict[str, fx.Node] = {}
    for node in [each for each in graph.nodes if each.op == "get_attr"]:
        tensor = getattr(module, str(node.target))
        if not isinstance(tensor, Tensor):
            continue
        name = names_of.get(id(tensor), f"constant {node.target}")
        if name not in inputs:
            with graph.inserting_before(next(iter(graph.nodes))):
                inputs[name] = graph.placeholder(f"lifted_{len(inputs)}")
            inputs[name].meta["val"] = node.meta.get("val", tensor)
            constants[name] = tensor.detach()
        node.replace_all_uses_with(inputs[name])
        graph.erase_node(node)
    order = {node: name for name, node in inputs.items()}
    order |= {node: f"input {at}" for at, node in enumerate(placeholders)}
    names = tuple(order[node] for node in graph.nodes if node.op == "placeholder")
    return TracedModule(verify(prepare(capture(module))), names, constants)
