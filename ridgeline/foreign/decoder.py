"""A network whose layers are transformers' modules, with the interface of `layers.decoder.Decoder`.

A step's tokens go through the modules as one sequence, whatever requests they belong to: everything but attention looks
at one token and its position alone, which the start-up check proves. Attention is ours: the modules call
`ForeignLayer`, which asks the states of the step.

Legend:
    T  tokens of all requests of a step in a row; in `logits`, the tokens to score
    M  model width
    H  query heads
    G  key/value heads
    D  head width in the cache: that of keys or that of values, whichever is wider
    E  width of a value
    V  vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.specs.model import ModelSpec
from ridgeline.foreign.classes import offline, quiet, said
from ridgeline.foreign.fused import SwappedModules
from ridgeline.foreign.interface import CARRIED, RUN, register
from ridgeline.foreign.recipe import FusionRecipe, RecipeFinder, apply
from ridgeline.foreign.spec import ForeignAttention, traced_class
from ridgeline.foreign.trace import TOKENS, Call, empty_model
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder, Hidden, LayerStates, Taps
from ridgeline.layers.expert_cache import ExpertCache
from ridgeline.layers.given import GivenVectors
from ridgeline.layers.heads import Heads
from ridgeline.parallel.mesh import Mesh
from ridgeline.quantization.weight import Weight


class ForeignLayer:
    """The attention of one module, an `interface.Attends`. decoder: knows the states of the step."""

    def __init__(self, decoder: ForeignDecoder, index: int, call: Call, sinks_H: Tensor | None) -> None:
        spec = decoder.spec.layers[index].mixer
        assert isinstance(spec, ForeignAttention)
        softmax = Softmax(call.scale, call.softcap, sinks_H, None, call.window)
        self.heads = self.plain_heads = Heads(spec, decoder.ops, None, None, 0.0, None, softmax)
        self.alike = call.width == call.value_width
        self._decoder, self._index, self._call = decoder, index, call

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        call, decoder = self._call, self._decoder
        if mask is not None or options.get("scaling", call.scale) not in (call.scale, None):
            raise RuntimeError(f"{call.module} attends in another way than at start; report this model.")
        width = self.heads.spec.head_dim
        qkv_TX = _beside(*(x[0].transpose(0, 1) for x in (query, key, value)))
        if qkv_TX is None:
            qkv_TX = torch.cat(tuple(_rows(x[0], width) for x in (query, key, value)), dim=1)
        attended_TX = decoder.states[self._index].attend(qkv_TX, decoder.positions_T, self.heads)
        return attended_TX.view(1, -1, call.heads, width)[..., : call.value_width]


def _beside(q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> Tensor | None:
    """Return heads as rows of the memory in which they lie beside each other, as parts of one product do; None if they
    do not."""
    tokens, end = len(q_THD), q_THD.storage_offset()
    row = q_THD.stride(0)
    for each in (q_THD, k_TGD, v_TGE):
        heads, width = each.shape[1:]
        dense = each.stride(2) == 1 and (each.stride(1) == width or heads == 1) and width == q_THD.shape[2]
        same = each.untyped_storage().data_ptr() == q_THD.untyped_storage().data_ptr() and each.storage_offset() == end
        if not dense or not same or (each.stride(0) != row and tokens > 1):
            return None
        end += heads * width
    columns = end - q_THD.storage_offset()
    if tokens > 1 and row < columns:
        return None
    return q_THD.as_strided((tokens, columns), (max(row, columns), 1))


def _multiplied(weight: Weight, bias_O: Tensor | None, x: Tensor) -> Tensor:
    return weight.linear(x.reshape(-1, x.shape[-1]), bias_O).view(*x.shape[:-1], -1)


def _rows(x_HTD: Tensor, width: int) -> Tensor:
    """Return heads of so many numbers, token by token, with zeros behind those that are narrower."""
    if x_HTD.shape[-1] < width:
        x_HTD = F.pad(x_HTD, (0, width - x_HTD.shape[-1]))
    return x_HTD.transpose(0, 1).flatten(1)


class ForeignDecoder(Decoder):
    """The network of a class of transformers. It has no weights until `fill`.

    config: the text of the config.json that names the class.

    swaps, recipe: the modules that run otherwise than by themselves, as `prepare` finds them.
    linears: the layers' linear modules that multiply all tokens once, by their names, which `prepare` finds too.
    """

    linears: Mapping[str, nn.Linear] = MappingProxyType({})

    states: LayerStates
    positions_T: Tensor
    _output: Any

    def __init__(self, config: str, spec: ModelSpec, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)  # none of the modules of our own decoder
        self.found, self.seen = traced_class(config)
        self.whole = self.spec = spec
        self.dtype, self.ops, self.mesh = dtype, ops, Mesh()
        self.tp = self.mesh.tp
        self.layers, self.final_norm, self.encoder = nn.ModuleList(), None, None
        self.tower = self.listener = None
        self._device = device
        self._below, self.streamed = (), None
        self._given: Tensor | None = None
        self.attends: list[ForeignLayer] = []
        self.swaps, self.recipe = SwappedModules(), FusionRecipe()

    def fill(self, tensors: Mapping[str, Tensor] | None, seed: int = 0) -> None:
        """Build the modules with the weights of a checkpoint, by its names, or with random numbers. Raise
        ModelLoadError unless the tensors are exactly those that the class wants."""
        register()
        config = copy.deepcopy(self.found.config)
        with offline(), quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if tensors is None:
                model = self.found.model._from_config(config, dtype=self.dtype, attn_implementation=RUN)
            else:
                model = self._loaded(config, tensors)
        self._settle(model.eval().requires_grad_(False).to(self._device))

    def _loaded(self, config: Any, tensors: Mapping[str, Tensor]) -> Any:
        try:
            model, info = self.found.model.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                dtype=self.dtype,
                attn_implementation=RUN,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers finds wrong with a stranger's tensors
            raise ModelLoadError(
                f"transformers cannot load the tensors of {self.found.name} ({said(error)})."
            ) from error
        for kind, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for"), ("mismatched_keys", "")):
            if names := sorted(map(str, info[kind])):
                raise ModelLoadError(
                    f"{self.found.name} finds the tensors {what or 'misshaped'}: {', '.join(names[:4])}"
                    f"{f' and {len(names) - 4} more' if len(names) > 4 else ''}."
                )
        return model

    def _settle(self, model: Any) -> None:
        """Take the modules, and let those that attend call ours."""
        self.model = model
        body = model.get_submodule(self.seen.body)
        self._body, body.forward = body.forward, self._handed
        for index, call in enumerate(self.seen.calls):
            sinks = None if call.sinks is None else model.get_parameter(call.sinks)
            self.attends.append(ForeignLayer(self, index, call, sinks))
            setattr(model.get_submodule(call.module), CARRIED, self.attends[index])

    def _handed(self, *args: Any, **given: Any) -> Any:
        """Be the body of the model: run it, or return the hidden states that are to be scored."""
        if self._given is not None:
            return self._output(last_hidden_state=self._given)
        output = self._body(*args, **given)
        self._output = type(output)
        return output

    @torch.no_grad()
    def prepare(self) -> None:
        """Let ops of ours compute what modules do in more launches, where both give the same."""
        ids_T = torch.arange(TOKENS, device=self._device)
        finder = RecipeFinder(self.model, [call.module for call in self.seen.calls], ids_T)
        try:
            with offline():
                self.plain_logits(ids_T, 0)
        finally:
            finder.end()
        inside = f"{self.seen.body}." if self.seen.body else ""
        self.linears = {name: each for name, each in finder.products.items() if name.startswith(inside)}
        plain = Ops(Platform(device_type="cpu"))  # what is computed is compared, and needs no compiled kernels
        heads = [each.heads._replace(ops=plain) if each.alike else None for each in self.attends]
        self._fuse(finder.recipe(plain, heads, self.spec.max_position_embeddings), finder.tables_ZY)

    def prepare_empty(self, recipe: FusionRecipe) -> None:
        """Build the modules without numbers, and fuse them as those of another decoder of the class are."""
        register()
        with offline():
            self._settle(empty_model(self.found, RUN, self.dtype).requires_grad_(False))
        sizes = {each.table: (each.rows, each.columns) for each in recipe.attentions}
        tables_ZY = [torch.empty(sizes[number], device=self._device) for number in sorted(sizes)]
        self._fuse(recipe, tables_ZY)

    def _fuse(self, recipe: FusionRecipe, tables_ZY: Sequence[Tensor]) -> None:
        names = [call.module for call in self.seen.calls]
        heads = {name: each.heads for name, each in zip(names, self.attends, strict=True)}
        self.recipe, self.swaps = recipe, apply(recipe, self.model, heads, tables_ZY, self.ops)
        for name, each in zip(names, self.attends, strict=True):
            each.heads = heads[name]

    def multiply_with(self, weights: Mapping[str, Weight]) -> None:
        """Let these weights multiply in place of the linear modules of these names. Products that were computed
        together run one by one from now on."""
        found = self.recipe.feed_forwards
        names = (*(each.name for each in found), *(name for group in self.recipe.products for name in group))
        self.swaps.give_back(self.model.get_submodule(name) for name in names)
        self.swaps.joined = []
        for name, weight in weights.items():
            module = self.linears[name]
            self.swaps.add(module, partial(_multiplied, weight, module.bias))

    def run_as_written(self) -> None:
        """Let all modules compute what they do by themselves, apart from attention."""
        self.swaps.drop()
        self.recipe = FusionRecipe()
        for layer in self.attends:
            layer.heads = layer.plain_heads

    @property
    def expert_caches(self) -> list[ExpertCache]:
        return []

    @property
    def weight_bytes(self) -> int:
        tables = {id(table): table for each in self.attends if (table := each.heads.cos_sin_ZY) is not None}
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers(), *tables.values()))

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        states: LayerStates,
        before_TM: Tensor | None = None,
        given: GivenVectors | None = None,
        taps: Taps | None = None,
        only: Sequence[int] | None = None,
    ) -> Hidden:
        if before_TM is not None or (taps is not None and taps.layers) or only is not None:
            raise InvalidConfig("a model that runs through transformers' modules runs whole; leave this setting out.")
        self.states, self.positions_T = states, positions_T
        tokens: dict[str, Tensor] = {"input_ids": token_ids_T.long()[None]}
        if given is not None:
            tokens = {"inputs_embeds": self.embedded(token_ids_T, positions_T, given)[None]}
        output = self._handed(**tokens, position_ids=positions_T.long()[None], use_cache=False)
        for products in self.swaps.joined:
            products.forget()
        return Hidden(output[0][0], None)

    def table_rows(self, token_ids_T: Tensor) -> Tensor:
        rows_TM: Tensor = self.model.get_input_embeddings()(token_ids_T.long())
        return rows_TM

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor, given: GivenVectors | None = None) -> Tensor:
        x_TM = self.table_rows(token_ids_T)
        return x_TM if given is None else given.placed(x_TM)

    def normed(self, hidden: Hidden) -> Tensor:
        """Return the hidden states, which are behind the final norm already."""
        return hidden.x_TM

    def own_logits(self, hidden: Hidden) -> Tensor:
        """Return the scores, as the class makes them of hidden states: [T, V]."""
        return self.scored(hidden.x_TM)

    def scored(self, x_TM: Tensor) -> Tensor:
        ids = torch.zeros(1, len(x_TM), dtype=torch.int64, device=x_TM.device)
        self._given = x_TM[None]
        try:
            logits_TV: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given = None
        return logits_TV

    @torch.inference_mode()
    def plain_logits(self, ids_T: Tensor, first: int | None = None) -> Tensor:
        """Return the scores of one sequence as the class computes them by itself: [T, V]. first: the position of its
        first token (default: that of the class)."""
        ids_1T = ids_T.long()[None]
        self.model.set_attn_implementation("eager")
        try:
            with self.swaps.left_out():
                if first is None:
                    logits_TV: Tensor = self.model(input_ids=ids_1T, use_cache=False).logits[0]
                    return logits_TV
                positions_1T = torch.arange(first, first + len(ids_T), device=ids_T.device)[None]
                x_TM = self._handed(input_ids=ids_1T, position_ids=positions_1T, use_cache=False)[0][0]
                return self.scored(x_TM)
        finally:
            self.model.set_attn_implementation(RUN)
