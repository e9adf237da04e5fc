"""Whole tables of the vocabulary, and rows of single tokens, that an adapter has in place of the model's own, as
products: what differs times a unit matrix.

Legend:
    V  rows of a table, on this rank
    M  width of the rows
    N  rows that differ, or all
    R  the adapter's rank
    I  inputs of a module: of the tokens' table its rows
    O  outputs of a module
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.embedding import Embedding
from ridgeline.layers.linear import Linear
from ridgeline.weights.adapters.places import EMBED, UNEMBED, ModulePlace, placed
from ridgeline.weights.adapters.reader import ReadAdapter
from ridgeline.weights.adapters.stacks import ThinPair
from ridgeline.worker.adapters.magnitudes import numbers_of


class VocabularyTensors:
    """The tables of a rank's part of a model.

    whole: the places of the whole model's, by the checkpoint's names. own: the rank's, without what other stages have.
    most: the largest rank of a module's product. tables: there is memory for whole ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        whole: Mapping[str, ModulePlace],
        own: Mapping[str, ModulePlace],
        most: int,
        *,
        tables: bool,
    ) -> None:
        self._decoder, self._whole, self._own, self._most, self._tables = decoder, whole, own, most, tables

    def most_rank(self, name: str) -> int:
        """Return the largest rank that a map of this name must have room for."""
        return self._most + (self._decoder.spec.hidden_size if self._tables and name in (EMBED, UNEMBED) else 0)

    def settled(self, adapter: ReadAdapter) -> ReadAdapter:
        """Return an adapter whose tables, and rows of tokens, have become products. Raise ModelLoadError for such as
        there is no memory for, or of another vocabulary."""
        added, left = list[ThinPair](), dict(adapter.replaced)
        for name, table_VM in adapter.replaced.items():
            place = placed(name.removesuffix(".weight"), self._whole) if name.endswith(".weight") else None
            if place is None:
                continue
            del left[name]
            added += self._of_table(name, table_VM, place)
        tied = self._decoder.whole.tie_word_embeddings
        rows = adapter.own_rows(tied=tied)
        named = {place.map.name for module in rows if (place := placed(module, self._whole)) is not None}
        for module, (tokens, rows_NM) in rows.items():
            place = placed(module, self._whole)
            assert place is not None  # the reader has found it
            added += self._of_rows(tokens, rows_NM, place)
            heads = [each for each in self._whole.values() if each.map.name == UNEMBED][:1]
            if tied and place.map.name == EMBED and UNEMBED not in named:
                added += [pair for head in heads for pair in self._of_rows(tokens, rows_NM, head)]
        if not added:
            return replace(adapter, replaced=left)
        if odd := [pair for pair in added if not (pair.down_RI.isfinite().all() and pair.up_OR.isfinite().all())]:
            raise ModelLoadError(
                f"the adapter holds numbers of {odd[0].place.source.name[:200]} that are not finite in "
                f"{str(self._decoder.dtype).removeprefix('torch.')}; train it again, or choose a wider dtype."
            )
        return replace(adapter, pairs=tuple(self._joined((*adapter.pairs, *added))), replaced=left, rows={})

    def _of_table(self, name: str, table_VM: Tensor, place: ModulePlace) -> list[ThinPair]:
        """Return the product for a whole table; none if it is the model's own, which PEFT saves beside others."""
        size = (place.map.inputs, place.outputs) if place.map.name == EMBED else (place.outputs, place.map.inputs)
        if tuple(table_VM.shape) != size:
            raise ModelLoadError(
                f"the adapter holds {name[:200]} of shape {list(table_VM.shape)}, and this model's is {list(size)}: it "
                "was trained with another vocabulary; merge it by PEFT, and serve the merged model."
            )
        own = self._of(place)
        if own is None:
            return []
        before_VM = self._numbers(own)
        more_VM = self._share(table_VM, len(before_VM)).to(self._decoder.dtype) - before_VM
        if not more_VM.any():
            return []
        if not self._tables:
            raise ModelLoadError(
                f"the adapter holds all of {name[:200]} (modules_to_save); set enable_lora_tables, which makes room "
                "for whole tables, or merge it by `ridgeline convert --merge`."
            )
        return [_product(own, torch.eye(more_VM.shape[1], dtype=more_VM.dtype), more_VM)]

    def _of_rows(self, tokens: Iterable[int], rows_NM: Tensor, place: ModulePlace) -> list[ThinPair]:
        own = self._of(place)
        if own is None:
            return []
        rows = own.map.inputs if place.map.name == EMBED else own.outputs
        first, dtype = self._first(rows), self._decoder.dtype
        mine = [(at, token - first) for at, token in enumerate(tokens) if 0 <= token - first < rows]
        before_NM = self._numbers(own, [row for _, row in mine])
        more_NM = torch.zeros(len(rows_NM), rows_NM.shape[1], dtype=dtype)
        chosen_VN = torch.zeros(rows, len(rows_NM), dtype=dtype)
        for (at, row), before_M in zip(mine, before_NM, strict=True):
            more_NM[at] = rows_NM[at].to(dtype) - before_M
            chosen_VN[row, at] = 1
        return [_product(own, more_NM.T.contiguous(), chosen_VN)]

    def _joined(self, pairs: Iterable[ThinPair]) -> Iterable[ThinPair]:
        """Yield pairs, those of one table as one of all their ranks."""
        by_name: dict[str, list[ThinPair]] = {}
        for pair in pairs:
            if pair.place.map.name in (EMBED, UNEMBED):
                by_name.setdefault(pair.place.map.name, []).append(pair)
            else:
                yield pair
        for name, own in by_name.items():
            if (rank := sum(pair.rank for pair in own)) > self.most_rank(name):
                raise ModelLoadError(
                    f"the adapter changes {own[0].place.source.name[:200]} by {rank} ranks and rows of tokens, "
                    f"above max_lora_rank {self.most_rank(name)}; raise that."
                )
            down_RI, up_OR = (
                torch.cat(each, dim) for dim, each in ((0, [p.down_RI for p in own]), (1, [p.up_OR for p in own]))
            )
            yield ThinPair(own[0].place, down_RI, up_OR.contiguous(), own[0].magnitude_O)

    def _of(self, place: ModulePlace) -> ModulePlace | None:
        """Return the rank's place; None: another stage has it."""
        return next((own for own in self._own.values() if own.map.name == place.map.name), None)

    def _numbers(self, own: ModulePlace, rows: list[int] | None = None) -> Tensor:
        """Return a rank's rows of the model's table, on the CPU in the model's dtype. rows: some (None: all)."""
        module, device = self._decoder.get_submodule(own.map.name), next(self._decoder.parameters()).device
        assert isinstance(module, Linear | Embedding)
        weight_VM = numbers_of(module, device) if isinstance(module, Linear) else module.weight.detach()
        some_NM = weight_VM if rows is None else weight_VM[rows]
        return some_NM.to(self._decoder.dtype).cpu()

    def _first(self, rows: int) -> int:
        return self._decoder.tp.rank * rows

    def _share(self, table_VM: Tensor, rows: int) -> Tensor:
        """Return the rank's rows of a table; those behind the last one are zeros."""
        first = self._first(rows)
        mine_VM = table_VM[first : first + rows]
        return torch.cat((mine_VM, mine_VM.new_zeros(rows - len(mine_VM), table_VM.shape[1])))


def _product(own: ModulePlace, thin_MN: Tensor, of_rows_VN: Tensor) -> ThinPair:
    """Return a product as one of the table's, of_rows · thinᵀ: of a table that is looked up, rows are inputs."""
    if own.map.name == EMBED:
        return ThinPair(own, of_rows_VN.T.contiguous(), thin_MN)
    return ThinPair(own, thin_MN.T.contiguous(), of_rows_VN)
