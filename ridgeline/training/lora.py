"""LoRA that is trained (Hu et al., arXiv 2106.09685), on the engine's own decoder, and written as PEFT writes it.

The places of modules are those of adapters that are served (`weights.adapters.places`): what is trained here is what
`ridgeline serve --enable-lora` loads.

Legend:
    T  tokens
    I  inputs
    O  outputs
    R  the adapter's rank
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import CONFIG, MOST_RANK, TENSORS
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.gemm.plain.torch_ops import weight_gradient
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.frozen import FrozenWeight, add_input_gradient, add_product, adds
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.quantization.weight import Weight, WrappedWeight
from ridgeline.weights.adapters.config import ALL_LINEAR, AdapterConfig, read_adapter_config
from ridgeline.weights.adapters.matching import meant_modules
from ridgeline.weights.adapters.places import ModulePlace, adaptable
from ridgeline.weights.adapters.reader import read_adapter


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The sizes of an adapter.

    targets: the ends of modules' names, or "all-linear". rooted: the scale is alpha / sqrt(rank) (rsLoRA).
    start: a folder of PEFT's with an adapter of these sizes, whose numbers training goes on from; "": it begins anew.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | str = ALL_LINEAR
    rooted: bool = False
    start: str = ""

    @classmethod
    def of_folder(cls, folder: Path) -> LoraConfig:
        """Return the settings of an adapter in a folder, to go on from it. Raise ModelLoadError for a bad folder."""
        found = read_adapter_config(folder, MOST_RANK)
        if found.ranks or found.alphas or found.excluded or found.layers is not None:
            raise InvalidConfig(
                f"the adapter in {folder} is not alike in all modules (rank_pattern, alpha_pattern, exclude_modules or "
                "layers_to_transform), and only one that is can be trained further here."
            )
        return cls(
            rank=found.rank, alpha=found.alpha, targets=found.targets, rooted=found.rooted, start=str(folder)
        )  # fmt: skip

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise InvalidConfig(f"the rank of an adapter is 1 to {MOST_RANK}, got {self.rank}.")
        if not 0 < self.alpha < math.inf:
            raise InvalidConfig(f"alpha must be a number above 0, got {self.alpha:g}.")


class ThinMap(nn.Module):
    """The two matrices of one module. up_OR has rows in the order of our map; it begins as zeros."""

    def __init__(self, place: ModulePlace, rank: int, device: torch.device, generator: torch.Generator) -> None:
        super().__init__()
        self.place = place
        bound = 1 / math.sqrt(place.map.inputs)  # PEFT's initial numbers: Kaiming's, uniform, with a = sqrt(5)
        drawn_RI = (2 * torch.rand(rank, place.map.inputs, generator=generator) - 1) * bound
        self.down_RI = nn.Parameter(drawn_RI.to(device))
        self.up_OR = nn.Parameter(torch.zeros(place.outputs, rank, device=device))


class ThinPart(NamedTuple):
    """Some of an adapter's matrices as products take them.

    outputs, ranks: those that it has of the map's outputs, and of all ranks of the map.
    up_OR: [outputs, ranks], block by block where it stands for several matrices. blocks: the rows and columns of each.
    """

    outputs: slice
    ranks: slice
    up_OR: Tensor
    blocks: tuple[tuple[slice, slice], ...]


class ThinParts(NamedTuple):
    """An adapter's matrices of one map in the dtype of products. down_RI: of all parts, times the scale."""

    key: tuple[Any, ...]
    down_RI: Tensor
    parts: tuple[ThinPart, ...]


JOINED_RANK = 128  # ranks together up to which the parts of a map are one product, most of whose numbers are zeros


@dataclass(frozen=True)
class LearntWeight(WrappedWeight):
    """A frozen weight, and the matrices of an adapter that is trained. thin: by the first of the outputs that they
    change."""

    thin: Mapping[int, ThinMap]
    scale: float
    _kept: list[ThinParts] = field(default_factory=list, repr=False, compare=False)

    @property
    def adapts(self) -> bool:
        return True

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # there is no buffer
        kind = x_TI.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_TI.dtype
        matrices = [matrix for _, each in sorted(self.thin.items()) for matrix in (each.down_RI, each.up_OR)]
        found: Tensor = _Adapted.apply(x_TI, bias_O, self.inner, self.parts(dtype), self.scale, *matrices)
        return found

    @torch.no_grad()
    def parts(self, dtype: torch.dtype) -> ThinParts:
        """Return the matrices as products take them, made anew where they have changed: once a step."""
        thin = sorted(self.thin.items())
        key = (dtype, *((m._version, m.data_ptr()) for _, each in thin for m in (each.down_RI, each.up_OR)))
        if self._kept and self._kept[0].key == key:
            return self._kept[0]
        down_RI = torch.cat([each.down_RI for _, each in thin]).mul_(self.scale).to(dtype)
        parts, low = list[ThinPart](), 0
        for first, each in thin:
            count, rank = each.up_OR.shape
            whole = ((slice(0, count), slice(0, rank)),)
            parts.append(ThinPart(slice(first, first + count), slice(low, low + rank), each.up_OR.to(dtype), whole))
            low += rank
        if len(parts) > 1 and low <= JOINED_RANK:
            parts = [_joined(parts, down_RI)]
        self._kept[:] = [ThinParts(key, down_RI, tuple(parts))]
        return self._kept[0]


def _joined(parts: Sequence[ThinPart], down_RI: Tensor) -> ThinPart:
    first, end = parts[0].outputs.start, parts[-1].outputs.stop
    up_OR, blocks = down_RI.new_zeros(end - first, len(down_RI)), list[tuple[slice, slice]]()
    for part in parts:
        blocks.append((slice(part.outputs.start - first, part.outputs.stop - first), part.ranks))
        up_OR[blocks[-1]] = part.up_OR
    return ThinPart(slice(first, end), slice(0, len(down_RI)), up_OR, tuple(blocks))


class _Adapted(torch.autograd.Function):
    """The product of a frozen weight and of thin ones. The wide product is added to the thin ones where it can be,
    since a kernel that is bound by arithmetic reads them in passing; else they are added to it."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, bias_O: Tensor | None, inner: Weight, thin: ThinParts, scale: float, *matrices: Tensor
    ) -> Tensor:
        ctx.dtype, dtype = x_TI.dtype, thin.down_RI.dtype
        x_TI = x_TI.to(dtype)
        with torch.autocast(x_TI.device.type, enabled=False):
            thin_TR = x_TI @ thin.down_RI.T  # the parts of a map have one input, which is read once for all of them
            if bias_O is None and adds(inner, x_TI):
                y_TO, done = x_TI.new_empty(len(x_TI), inner.stored.shape[0]), 0
                for part in thin.parts:
                    y_TO[:, done : part.outputs.start].zero_()
                    torch.mm(thin_TR[:, part.ranks], part.up_OR.T, out=y_TO[:, part.outputs])
                    done = part.outputs.stop
                y_TO[:, done:].zero_()
                add_product(inner, x_TI, y_TO)
            else:
                y_TO = inner.linear(x_TI, None if bias_O is None else bias_O.to(dtype))
                for part in thin.parts:
                    y_TO[:, part.outputs].addmm_(thin_TR[:, part.ranks], part.up_OR.T)
        ctx.inner, ctx.thin, ctx.scale = inner, thin, scale
        ctx.ranks, ctx.wide = [len(each) for each in matrices[::2]], matrices[0].dtype
        ctx.save_for_backward(x_TI, thin_TR)
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Any, ...]:
        x_TI, thin_TR = ctx.saved_tensors
        thin, (wants_x, wants_bias) = ctx.thin, ctx.needs_input_grad[:2]
        grad_TO = grad_TO.to(x_TI.dtype)
        grad_TR, of_ups, grad_TI = torch.empty_like(thin_TR), list[Tensor](), None
        for part in thin.parts:
            part_TO = grad_TO[:, part.outputs]
            torch.mm(part_TO, part.up_OR, out=grad_TR[:, part.ranks])
            of_up_OR = weight_gradient(part_TO, thin_TR[:, part.ranks], ctx.wide)
            of_ups += [of_up_OR[block] for block in part.blocks]
        if wants_x:
            grad_TI = grad_TR @ thin.down_RI
            add_input_gradient(ctx.inner, grad_TO, grad_TI)
        of_downs = weight_gradient(grad_TR, x_TI, ctx.wide).mul_(ctx.scale).split(ctx.ranks)
        found = [each for both in zip(of_downs, of_ups, strict=True) for each in both]
        bias_grad_O = grad_TO.sum(0) if wants_bias else None
        return None if grad_TI is None else grad_TI.to(ctx.dtype), bias_grad_O, None, None, None, *found


class Lora(nn.Module):
    """The matrices of an adapter, by the names of the checkpoint's modules with "/" for "."; they are in the decoder's
    linear maps from now on. All else of the decoder is frozen. Raise InvalidConfig for targets that no module has."""

    def __init__(self, decoder: Decoder, model: ModelConfig, config: LoraConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.places = adaptable(model.spec, model.weights)
        modules = meant(config.targets, self.places)
        device, generator = next(decoder.parameters()).device, torch.Generator().manual_seed(seed)
        decoder.requires_grad_(False)
        self.maps = nn.ModuleDict()
        by_map: dict[str, dict[int, ThinMap]] = {}
        for module in modules:
            place = self.places[module]
            thin = ThinMap(place, config.rank, device, generator)
            self.maps[module.replace(".", "/")] = thin
            by_map.setdefault(place.map.name, {})[place.first] = thin
        scale = _peft(config).scale(config.rank, config.alpha)
        if config.start:
            self._begin(Path(config.start), scale)
        for name, parts in by_map.items():
            linear = decoder.get_submodule(name)
            assert isinstance(linear, Linear)
            inner = linear.matrix.inner if isinstance(linear.matrix, MultipliedWeight) else linear.matrix
            inner = inner.inner if isinstance(inner, FrozenWeight) else inner
            linear.multiply_with(LearntWeight(linear.ops, inner, parts, scale))

    @torch.no_grad()
    def _begin(self, folder: Path, scale: float) -> None:
        """Take the numbers of an adapter."""
        found = read_adapter(folder, self.places, most_rank=self.config.rank, dtype=torch.float32)
        pairs = {id(pair.place): pair for pair in found.pairs}
        for name, thin in self.maps.items():
            assert isinstance(thin, ThinMap)
            if (pair := pairs.pop(id(thin.place), None)) is None or len(pair.down_RI) != self.config.rank:
                raise InvalidConfig(
                    f"the adapter in {folder} has no matrices of rank {self.config.rank} for {name.replace('/', '.')}."
                )
            up_OR = pair.up_OR / scale
            thin.up_OR.copy_(up_OR if thin.place.factor_O is None else up_OR / thin.place.factor_O[:, None])
            thin.down_RI.copy_(pair.down_RI)

    @torch.no_grad()
    def add_to(self, plain: Decoder) -> None:
        """Add the products of the matrices to the weights of a decoder that has plain ones."""
        scale = _peft(self.config).scale(self.config.rank, self.config.alpha)
        for thin in self.maps.values():
            assert isinstance(thin, ThinMap)
            weight, first = plain.get_parameter(f"{thin.place.map.name}.weight"), thin.place.first
            delta_OI = scale * (thin.up_OR.float() @ thin.down_RI.float())
            weight[first : first + thin.place.outputs] += delta_OI.to(weight.device, weight.dtype)

    def export(self, folder: Path, base: str) -> None:
        """Write PEFT's two files, in float32, and read them as a server does. base: the model's name or folder."""
        tensors, modules = {}, []
        for name, thin in self.maps.items():
            assert isinstance(thin, ThinMap)
            module = name.replace("/", ".")
            up_OR = replace(thin.place, factor_O=None).in_their_order(thin.up_OR.detach().cpu())
            before = f"base_model.model.{module}"
            tensors[f"{before}.lora_A.weight"] = thin.down_RI.detach().cpu().contiguous()
            tensors[f"{before}.lora_B.weight"] = up_OR.contiguous()
            modules.append(module)
        targets = {module.rpartition(".")[2] for module in modules}
        if not isinstance(self.config.targets, str):
            targets = set(self.config.targets)
        entries = {
            "peft_type": "LORA",
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "use_rslora": self.config.rooted,
            "target_modules": sorted(targets),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        write_adapter(folder, tensors, entries, base, [self.places[module] for module in modules])
        read_adapter(folder, self.places, most_rank=self.config.rank, dtype=torch.float32)


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], entries: Mapping[str, Any], base: str, places: Sequence[ModulePlace]
) -> None:
    """Write PEFT's two files. entries: those of the kind of adapter. places: those of its modules."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / TENSORS, metadata={"format": "pt"})
    (folder / TENSORS).chmod(0o644)  # safetensors makes the file private
    whole = {
        **entries,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "fan_in_fan_out": any(place.source.transpose for place in places),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(whole, indent=2) + "\n")


def _peft(config: LoraConfig) -> AdapterConfig:
    return AdapterConfig(
        rank=config.rank, alpha=config.alpha, targets=config.targets, ranks={}, alphas={}, rooted=config.rooted
    )


def meant(targets: tuple[str, ...] | str, places: Mapping[str, ModulePlace]) -> Sequence[str]:
    """Return the modules that are to be adapted, in the order of the model. Raise InvalidConfig if there are none."""
    config = AdapterConfig(rank=1, alpha=1.0, targets=targets, ranks={}, alphas={})
    modules = list(meant_modules(config, list(places), Path()))
    wanted = (targets,) if isinstance(targets, str) else targets
    lost = [
        each
        for each in wanted
        if each != ALL_LINEAR and not any(f".{module}".endswith(f".{each}") for module in modules)
    ]
    if lost or not modules:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in places}))
        raise InvalidConfig(f"no linear layer of this model is called {lost[0] if lost else targets}; it has {known}.")
    return modules
