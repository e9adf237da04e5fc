"""Multi-head latent attention on a GPU: check every cut of the kernel, then time it.

    ridgeline bench sweep latent --json results.jsonl [--case 128-heads] [--op decode] [--form 8k]

"check" are the op's cases. "decode" is one layer of a step of one token for so many requests, all with the context that
the format column names, "prompt" a row of so many tokens, "expanded" such a row whose keys and values were made of the
latents, and "kv" the launch before all of these, which fills the cache and rotates queries. The layers have DeepSeek's
widths, latents of 512 and 64, keys of 128 and 64 and values of 128, and the 16 heads of a small model or of one of
eight GPUs, or all 128. Schedules are made before, since layers share them. What is timed is compared with the
reference, of a prompt its first and its last 64 tokens.

A limit is the larger of bytes / 4.42 TB/s and FLOPs / 750 TFLOP/s, by the ops' cost.py; of an H100 say
`--bandwidth 3.35`. Errors are relative to |result| + the root mean square of all results. runs.py says how it is done.

Legend: see kernels/attention/latent/op.py, and for "expanded" kernels/attention/expanded/op.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.attention.expanded import op as expanded
from ridgeline.kernels.attention.expanded import triton as expanded_kernel
from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost
from ridgeline.kernels.attention.latent.cases import CASES
from ridgeline.kernels.attention.latent.choose import MOST_QUERIES
from ridgeline.kernels.attention.latent.cost import latent_attention_cost, latent_kv_cost
from ridgeline.kernels.attention.latent.op import latent_attention_reference, latent_kv_reference
from ridgeline.kernels.attention.latent.triton import latent_attention
from ridgeline.kernels.attention.latent.triton_kv import latent_kv
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.attention.paged.triton_common import Cut
from ridgeline_bench.sweep.sweep import UNCACHED, Job, Limit, Sweep, moved

HEADS = {"16-heads": 16, "128-heads": 128}
CONTEXTS = {"8k": 8192, "1k": 1024, "32k": 32_768}
BATCHES, PROMPTS, KEPT = (64, 8, 1, 256), (8192, 1024), (64, 8192, 1)
RANK, ROPE, KEY, VALUE, BLOCK, SCALE = 512, 64, 128, 128, 64, 192**-0.5
SAMPLED = 64  # tokens at both ends of a prompt that are compared

FEW_QUERIES = (
    Cut(16, 32, warps=4, stages=3),
    Cut(16, 64, warps=8, stages=3),
    Cut(16, 64, warps=8, stages=2),
)
MANY_QUERIES = (
    Cut(64, 32, warps=8, stages=2),
    Cut(64, 64, warps=8, stages=2),
    Cut(32, 64, warps=8, stages=3),
    Cut(32, 32, warps=8, stages=3),
)
EXPANDED = (
    Cut(128, 64, warps=8, stages=3),
    Cut(128, 64, warps=8, stages=2),
    Cut(128, 128, warps=8, stages=2),
    Cut(64, 64, warps=4, stages=3),
    Cut(128, 32, warps=8, stages=4),
    Cut(128, 64, warps=4, stages=2),
)


class LatentSweep(Sweep):
    workload = "latent attention"
    seconds, tolerance = 150.0, 0.03
    silence = 60.0

    def jobs(self) -> list[Job]:
        found = []
        for cut in (None, *FEW_QUERIES, *MANY_QUERIES):
            found += [Job(f"case {i}", "check", sum(n for n, _ in c.rows), "", cut, timed=False)
                      for i, c in enumerate(CASES)]  # fmt: skip
        for case, heads in HEADS.items():
            cuts = FEW_QUERIES if heads == 16 else MANY_QUERIES
            for context in CONTEXTS:
                found += [
                    Job(case, "decode", rows, context, cut, cut is None) for rows in BATCHES for cut in (None, *cuts)
                ]
            found += [
                Job(case, "prompt", tokens, "", cut, cut is None) for tokens in PROMPTS for cut in (None, *MANY_QUERIES)
            ]
            found += [
                Job(case, "expanded", tokens, "", cut, cut is None) for tokens in PROMPTS for cut in (None, *EXPANDED)
            ]
            found += [Job(case, "kv", tokens, "", None, chosen=True) for tokens in KEPT]
        return sorted(found, key=lambda job: (job.timed, job.op == "kv"))

    def arguments(self, job: Job) -> list[Any]:
        """Return the arguments of the op, of several layers whose blocks are scattered over one cache."""
        if job.op == "check":
            case = CASES[int(job.case.split()[1])]
            *tensors, batch = case.inputs(self.dtype, torch.device("cpu"))
            return [moved((*tensors, batch, (case.key_dim + case.rope_dim) ** -0.5), self.device)]
        if job.op == "kv":
            return self._kept_tokens(job)
        if job.op == "expanded":
            return self._long_row(job)
        rows, new, length = self._shape(job)
        heads, rank, rope = self._widths(job)
        columns = -(-length // BLOCK)
        nbytes = rows * length * (rank + rope) * 2
        layers = 1 if nbytes > UNCACHED else self.turns(nbytes)
        cache_NPW = self.normal(1 + layers * rows * columns, BLOCK, rank + rope)
        order = 1 + torch.randperm(layers * rows * columns, device=self.device).int()
        q_THL, q_THY = self.normal(rows * new, heads, rank), self.normal(rows * new, heads, rope)
        batch = RaggedBatch(
            slots_R=self._ints(range(rows)),
            block_table_SC=order.view(layers, rows, columns)[0],
            start_R1=self._ints(range(0, rows * new + 1, new)),
            kv_len_R=self._ints([length] * rows),
            tokens_each=1 if job.op == "decode" else 0,
            num_tokens_R=np.full(rows, new, np.int32),
            kv_bound_R=np.full(rows, length, np.int32),
        )
        shape = AttentionShape(
            num_tokens=rows * new,
            tokens_each=batch.tokens_each,
            num_heads=heads,
            num_kv_heads=1,
            head_bytes=2 * (rank + rope),
            item_queries=MOST_QUERIES,
        )
        schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
        batch = replace(batch, schedule=schedule)
        tables = order.view(layers, rows, columns)
        return [(q_THL, q_THY, cache_NPW, replace(batch, block_table_SC=table), SCALE) for table in tables]

    def _shape(self, job: Job) -> tuple[int, int, int]:
        """Return (rows, new tokens of each, tokens that it has then)."""
        if job.op == "decode":
            return self.small(job.tokens, 3), 1, self.small(CONTEXTS[job.form], 300)
        tokens = self.small(job.tokens, 70)
        return 1, tokens, tokens

    def _widths(self, job: Job) -> tuple[int, int, int]:
        return self.small(HEADS[job.case], 16), self.small(RANK, 32), self.small(ROPE, 16)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def _kept_tokens(self, job: Job) -> list[Any]:
        heads, rank, rope = self._widths(job)
        tokens = self.small(job.tokens, 5)
        layers = self.turns(tokens * (heads * (KEY + rope) + rank + rope) * 2)
        angles = torch.rand(4096, rope // 2, device=self.device) * 6.3
        table_ZY, weight_L = torch.cat((angles.cos(), angles.sin()), -1), 1 + 0.1 * self.normal(rank)
        blocks, found = -(-tokens // BLOCK) + 1, []
        for _ in range(layers):
            q_THX, latent_TW = self.normal(tokens, heads, KEY + rope), self.normal(tokens, rank + rope)
            positions_T = torch.randint(4096, (tokens,), device=self.device)
            place_T = torch.randperm(blocks * BLOCK, device=self.device)[:tokens]
            cache_NPW = self.normal(blocks, BLOCK, rank + rope)
            found.append((q_THX, latent_TW, weight_L, 1e-6, table_ZY, positions_T, True, cache_NPW, place_T))
        return found

    def _long_row(self, job: Job) -> list[Any]:
        _, tokens, _ = self._shape(job)
        heads, _, rope = self._widths(job)
        key, value = self.small(KEY, 32), self.small(VALUE, 32)
        rows = self._long(0, tokens)  # which layers share
        found = []
        for _ in range(self.turns(tokens * heads * (2 * key + rope + value) * 2)):
            kv_JHX, q_THX = self.normal(tokens, heads, key + value), self.normal(tokens, heads, key + rope)
            r_JY, q_THY = self.normal(tokens, RANK + rope)[:, RANK:], self.normal(tokens, heads, rope)
            k_JHK, v_JHV = kv_JHX.split((key, value), dim=-1)
            found.append((q_THX[..., :key], q_THY, k_JHK, v_JHV, r_JY, rows))
        return found

    def _long(self, first: int, last: int) -> expanded.LongRows:
        """Return the tokens from `first` on of a prompt that begins the step, as one row."""
        ends = np.array([last])
        return expanded.LongRows(
            first_R=np.array([first]), tokens_R=ends - first, begin_R=np.array([0]), bound_R=ends,
            kv_len_R=self._ints([last]),
        )  # fmt: skip

    def launch(self, job: Job, arguments: Any) -> Any:
        if job.op == "kv":
            return latent_kv(*arguments)
        if job.op == "expanded":
            out_THV = self._out(arguments)
            expanded_kernel.expanded_attention(out_THV, *arguments, scale=SCALE, cut=job.cut)
            return out_THV
        *tensors, scale = arguments
        return latent_attention(*tensors, scale=scale, cut=job.cut)

    def _out(self, arguments: Any) -> Tensor:
        q_THK, _, _, v_JHV, *_ = arguments
        return torch.empty(*q_THK.shape[:2], v_JHV.shape[2], dtype=self.dtype, device=self.device)

    def reference(self, job: Job, arguments: Any) -> Any:
        if job.op == "kv":
            *others, cache_NPW, place_T = arguments
            given: Any = (*others, cache_NPW.clone(), place_T)
            return latent_kv_reference(*given), given[-2].flatten(0, 1)[place_T]
        if job.op == "expanded":
            out_THV = self._out(arguments)
            for first, last in self._ends(job):
                part: Any = (*arguments[:-1], self._long(first, last))
                expanded.expanded_attention(out_THV, *part, scale=SCALE)
            return tuple(out_THV[first:last] for first, last in self._ends(job))
        q_THL, q_THY, cache_NPW, batch, scale = arguments
        if job.op != "prompt":
            return (latent_attention_reference(q_THL, q_THY, cache_NPW, batch, scale=scale),)
        found = []
        for first, last in self._ends(job):
            part = replace(batch, start_R1=self._ints([0, last - first]), kv_len_R=self._ints([last]))
            q = q_THL[first:last], q_THY[first:last]
            found.append(latent_attention_reference(*q, cache_NPW, part, scale=scale))
        return tuple(found)

    def _ends(self, job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
        _, tokens, _ = self._shape(job)
        return (0, min(SAMPLED, tokens)), (max(0, tokens - SAMPLED), tokens)

    def defined(self, job: Job, arguments: Any, result: Any) -> Any:
        """Return what is compared: of a prompt its ends, and of the cache what was written."""
        if isinstance(result, tuple):
            return result  # of the reference
        if job.op == "kv":
            cache_NPW, place_T = arguments[-2:]
            return result, cache_NPW.flatten(0, 1)[place_T]
        sampled = job.op in ("prompt", "expanded")
        return tuple(result[first:last] for first, last in self._ends(job)) if sampled else (result,)

    def error(self, job: Job, got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
        return self.error_of_sums(got, want)

    def interpreted(self, job: Job) -> Any:
        return (job.op, job.case) if job.cut is None else (job.op, job.cut) if job.case in ("case 4", *HEADS) else None

    def limit(self, job: Job, calls: list[Any]) -> Limit:
        heads, widths = HEADS[job.case], {"rank": RANK, "rope_dim": ROPE, "itemsize": 2}
        if job.op == "expanded":
            sizes = {"key_dim": KEY, "rope_dim": ROPE, "value_dim": VALUE, "itemsize": 2}
            cost = expanded_attention_cost([job.tokens], [job.tokens], num_heads=heads, **sizes)
        elif job.op == "kv":
            cost = latent_kv_cost(job.tokens, num_heads=heads, **widths)
        elif job.op == "decode":
            each = [1] * job.tokens, [CONTEXTS[job.form]] * job.tokens
            cost = latent_attention_cost(*each, num_heads=heads, **widths)
        else:
            cost = latent_attention_cost([job.tokens], [job.tokens], num_heads=heads, **widths)
        seconds = max(cost.bytes / self.bandwidth, cost.flops / self.peak)
        return Limit(seconds, cost.flops, f"{cost.bytes / 1e6:.0f} MB")
