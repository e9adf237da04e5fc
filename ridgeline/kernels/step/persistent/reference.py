"""The slow twin of the persistent kernel: it runs a schedule task by task in plain torch, in a random order of blocks.

A task reads when it begins and writes when it ends, and between the two any other block may go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.norm.op import rms_norm
from ridgeline.kernels.small.rotary.op import rotate
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import StepSchedule, StepTask
from ridgeline.kernels.step.persistent.tensors import LayerWeights, RowInputs, StepBuffers, StepWeights

Write = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """A step in plain torch. splits: as in the schedule."""

    shape: DenseShape
    weights: StepWeights
    inputs: RowInputs
    buffers: StepBuffers
    splits: int = 1

    def run(self, schedule: StepSchedule, seed: int = 0) -> Tensor:
        """Run a schedule, and return the logits: [R, V]. Raises RuntimeError if blocks wait for ever."""
        schedule, chosen = schedule.with_counters if schedule.marked else schedule, random.Random(seed)
        counters, at = [0] * schedule.counters, [0] * len(schedule.blocks)
        running: dict[int, Write] = {}
        left = {block for block, tasks in enumerate(schedule.blocks) if tasks}
        while left:
            ready = []
            for block in sorted(left):
                task = schedule.tasks[schedule.blocks[block][at[block]]]
                if block in running or all(counters[each] >= least for each, least in task.waits):
                    ready.append(block)
            if not ready:
                raise RuntimeError("all blocks wait for ever; validate the schedule first.")
            block = chosen.choice(ready)
            task = schedule.tasks[schedule.blocks[block][at[block]]]
            if block not in running:
                running[block] = self.begun(task)
                continue
            running.pop(block)()
            for counter in task.signals:
                counters[counter] += 1
            at[block] += 1
            if at[block] == len(schedule.blocks[block]):
                left.remove(block)
        return self.buffers.logits_RV

    def begun(self, task: StepTask) -> Write:
        """Read and compute for a task, and return the function that writes the result."""
        if task.kind == "embed":
            [row] = task.part
            return _to(self.buffers.residual_RM[row], self.weights.embedding_VM[self.inputs.tokens_R[row]])
        if task.kind == "attend":
            return self._attended(task)
        if task.kind == "combine":
            return self._combined(task)
        return self._multiplied(task)

    def _multiplied(self, task: StepTask) -> Write:
        buffers, shape, (start, stop) = self.buffers, self.shape, task.part
        part = slice(start, stop)
        if task.kind == "head":
            x_RM = rms_norm(buffers.residual_RM, None, self.weights.norm_M, shape.eps)[0]
            return _to(buffers.logits_RV[:, part], x_RM @ self.weights.head_VM[part].T)
        layer = self.weights.layers[task.layer]
        if task.kind == "qkv":
            x_RM = rms_norm(buffers.residual_RM, None, layer.mixer_norm_M, shape.eps)[0]
            bias = None if layer.qkv_bias_X is None else layer.qkv_bias_X[part]
            return _to(buffers.qkv_RX[:, part], torch.nn.functional.linear(x_RM, layer.qkv_XM[part], bias))
        if task.kind == "gate_up":
            x_RM = rms_norm(buffers.residual_RM, None, layer.feed_forward_norm_M, shape.eps)[0]
            pair = layer.gate_up_2FM.unflatten(0, (2, -1))[:, part].flatten(0, 1)
            return _to(buffers.gated_RF[:, part], gated_activation(x_RM @ pair.T, "silu"))
        x, weight = (buffers.attended_RI, layer.out_MI) if task.kind == "out" else (buffers.gated_RF, layer.down_MF)
        if task.reads[0].buffer.startswith("partial"):
            x = _joined(buffers.partial_RHSD).flatten(1).to(x.dtype)
        return _to(buffers.residual_RM[:, part], buffers.residual_RM[:, part] + x @ weight[part].T)

    def _attended(self, task: StepTask) -> Write:
        shape, (row, head, split) = self.shape, task.part
        position = int(self.inputs.positions_R[row]) if self.inputs.live_R[row] else -1
        k_cache, v_cache = self.inputs.caches[task.layer]
        size, heads = k_cache.shape[2], slice(head * shape.group, (head + 1) * shape.group)
        pages = -(-(position + 1) // size)
        own = -(-pages // self.splits)
        start, stop = split * own * size, min(position + 1, (split + 1) * own * size)
        partial_hD = self.buffers.partial_RHSD[row, heads, split]
        if start >= stop:
            nothing = torch.zeros_like(partial_hD)
            nothing[:, -4] = -1e30
            return self._written(task, nothing)
        q_HD, k_GD, v_GD = self._heads(self.weights.layers[task.layer], row, position)
        place = torch.arange(start, stop, device=k_cache.device)
        block, offset = self.inputs.table_SC[self.inputs.slots_R[row]][place // size].long(), place % size
        k_LD, v_LD = k_cache[block, head, offset], v_cache[block, head, offset]
        last = stop == position + 1
        if last:
            k_LD, v_LD = k_LD.clone(), v_LD.clone()
            k_LD[-1], v_LD[-1] = k_GD[head], v_GD[head]
        score_hL = q_HD[heads].float() @ k_LD.float().T * shape.scale
        top_h1 = score_hL.amax(-1, keepdim=True)
        weight_hL = (score_hL - top_h1).exp()
        none_h2 = torch.zeros_like(top_h1).expand(-1, 2)
        found = torch.cat((weight_hL @ v_LD.float(), top_h1, weight_hL.sum(-1, keepdim=True), none_h2), dim=-1)
        write = self._written(task, found)

        def both() -> None:
            write()
            if last:
                k_cache[block[-1], head, offset[-1]], v_cache[block[-1], head, offset[-1]] = k_GD[head], v_GD[head]

        return both

    def _heads(self, layer: LayerWeights, row: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's queries, keys and values, normalised and rotated."""
        shape = self.shape
        heads_1UD = self.buffers.qkv_RX[row].unflatten(-1, (-1, shape.head_dim)).unsqueeze(0)
        q, k, v = heads_1UD.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            assert shape.head_eps is not None
            q = rms_norm(q, None, layer.q_norm_D, shape.head_eps)[0]
            k = rms_norm(k, None, layer.k_norm_D, shape.head_eps)[0]
        if shape.rotated:
            at = torch.tensor([position], device=q.device)
            q, k = rotate(q, self.weights.cos_sin_ZY, at), rotate(k, self.weights.cos_sin_ZY, at)
        return q[0], k[0], v[0]

    def _written(self, task: StepTask, found_hD: Tensor) -> Write:
        row, head, split = task.part
        heads = slice(head * self.shape.group, (head + 1) * self.shape.group)
        if self.splits > 1:
            return _to(self.buffers.partial_RHSD[row, heads, split], found_hD)
        return self._normalised(row, head, found_hD[:, None])

    def _combined(self, task: StepTask) -> Write:
        row, head = task.part
        heads = slice(head * self.shape.group, (head + 1) * self.shape.group)
        return self._normalised(row, head, self.buffers.partial_RHSD[row, heads].clone())

    def _normalised(self, row: int, head: int, parts_hSD: Tensor) -> Write:
        wide = self.shape.group * self.shape.head_dim
        return _to(self.buffers.attended_RI[row, head * wide : (head + 1) * wide], _joined(parts_hSD).flatten())


def _joined(parts_SD: Tensor) -> Tensor:
    """Return attention's result from the parts of splits, the dimension before the last: without that, and with D
    numbers in place of D + 4."""
    sums_SD, top_S1, weight_S1, _ = parts_SD.split((parts_SD.shape[-1] - 4, 1, 1, 2), dim=-1)
    share_S1 = (top_S1 - top_S1.amax(-2, keepdim=True)).exp()
    total_1 = (weight_S1 * share_S1).sum(-2)
    return torch.where(total_1 > 0, (sums_SD * share_S1).sum(-2) / total_1, 0.0)


def _to(place: Tensor, numbers: Tensor) -> Write:
    found = numbers.clone()  # what it was when the task began

    def write() -> None:
        place.copy_(found)

    return write
