"""The work of every rank when ranks divide a long prompt, counted on a CPU: no rank may have more than its part.

    python -m ridgeline_bench.scripts.context_parallel [--tokens 131072] [--chunk 16384] [--ranks 1 2 4 8]
        [--output FILE.jsonl]

The engine's own code runs: the shares of a step, its blocks, and the rounds in which ranks attend together, with rows
and tables as in a real step. Two things are stand-ins. Attention counts pairs of queries and keys in place of computing
them, from the same arguments, and the ring counts bytes in place of sending them. Heads are narrow, since only their
number of bytes matters, and bytes are compared with the formula that plans by them.

From the counts follows a prediction for H200s: the roofline's time of a step's products, divided by the ranks; the
attention of the rank that has the most; and its bytes. Those of the ring travel while ranks attend ("hidden"); a second
figure counts them as if nothing overlapped, as it is with the other forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.paged.cost import attention_cost, visible
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.models import model_config
from ridgeline.parallel.ring import Solo
from ridgeline.perf.context import FORMS, LINKS, Attended, cheapest, chunks, imbalance, moved, pairs_of, pays_from
from ridgeline.perf.hardware import find
from ridgeline.perf.roofline import Roofline
from ridgeline.worker.share import Stripes
from ridgeline.worker.state.divided_rounds import Blocks, Heads, Keys, Queries
from ridgeline.worker.state.rounds import Around, Cached, Round
from ridgeline.worker.state.states import DeviceRows
from ridgeline_bench.results import append_lines
from ridgeline_bench.scripts.asked import asked

HEADS, KV_HEADS, WIDTH, NARROW, HELD = 32, 8, 128, 8, 64
LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "intermediate_size": 14336,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "itemsize": 2, "kv_itemsize": 2}
CPU = torch.device("cpu")


class Arrived:
    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class Counting(Solo):
    """One rank's ring, which receives zeros and counts their bytes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.received = rank, size, 0  # type: ignore[misc]

    def passed_on(self, x: Tensor) -> Arrived:
        self.received += x.nbytes
        return Arrived(x)

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        got = [parts[0].new_zeros(shape) if rank != self.rank else parts[rank] for rank, shape in enumerate(shapes)]
        self.received += sum(x.nbytes for rank, x in enumerate(got) if rank != self.rank)
        return got


class Pairs(Ops):
    """Ops of which attention counts what it would compute, for `heads` heads each."""

    def __init__(self) -> None:
        super().__init__(Platform(device_type="cpu"))
        self.pairs = 0.0
        self.partial_attention, self.paged_attention = self._partial, self._whole  # type: ignore[method-assign]

    def _partial(self, q_THD: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, *_: object) -> tuple[Tensor, Tensor]:
        return self._whole(q_THD, k, v, batch), q_THD.new_zeros(q_THD.shape[:2], dtype=torch.float32)

    def _whole(self, q_THD: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, *_: object) -> Tensor:
        tokens_R, kv_len_R = batch.start_R1.diff().numpy(), batch.kv_len_R.numpy()
        blind_R = np.minimum(tokens_R, np.maximum(tokens_R - kv_len_R, 0))  # queries that see nothing
        self.pairs += visible(tokens_R - blind_R, kv_len_R, None)[0] * q_THD.shape[1]
        return torch.zeros_like(q_THD)


def made(form: str, around: Around, share: Stripes, rows: DeviceRows, table_SC: Tensor) -> Round:
    blocks = Blocks(share, rows.slots_R, table_SC, HELD, None)
    if form == "heads":
        return Heads(around, share, blocks)
    return Keys(around, share, blocks) if form == "keys" else Queries(around, share, rows, table_SC)


def one_step(form: str, rank: int, ranks: int, start: int, end: int) -> tuple[float, int]:
    """Return (pairs times heads, bytes received) of one rank in one layer of one chunk."""
    ring, ops = Counting(rank, ranks), Pairs()
    columns = -(-end // (HELD * ranks))
    table_SC = 1 + torch.arange(columns, dtype=torch.int32)[None]
    cached = Cached(*(torch.zeros(1 + columns, KV_HEADS, HELD, NARROW, dtype=torch.bfloat16) for _ in "kv"))
    share = Stripes(ring, np.array([end - start]), np.array([end]), CPU)
    rows = DeviceRows(
        slots_R=torch.zeros(1, dtype=torch.int32),
        start_R1=torch.tensor([0, end - start]),
        kv_len_R=torch.tensor([end]),
        last_R=torch.tensor([end - start - 1]),
        num_tokens=end - start,
        tokens_each=0,
    )
    around = Around(ring, ops, HEADS, None, cached.k_NGPD)
    q_THD = torch.zeros(share.num_tokens, HEADS, NARROW, dtype=torch.bfloat16)
    position_T = torch.arange(start, end)[share.mine_t]
    made(form, around, share, rows, table_SC).attend(q_THD, position_T, cached, Softmax(1.0))
    return ops.pairs, ring.received


def simulate(spec: ModelSpec, ranks: int, tokens: int, chunk: int) -> list[dict[str, object]]:
    """Return a row for each form."""
    found: list[dict[str, object]] = []
    for form in FORMS if ranks > 1 else ("keys",):
        work_CN, layer_bytes = [], []
        for start, end in chunks(tokens, chunk):
            counted = [one_step(form, rank, ranks, start, end) for rank in range(ranks)]
            work_CN.append([pairs for pairs, _ in counted])
            narrow = Attended(end - start, end, 0, HEADS, KV_HEADS, NARROW, 2)
            assert abs(moved(form, ranks, narrow) / max(1, counted[0][1]) - 1) < 0.02 or ranks == 1
            layer_bytes.append(moved(form, ranks, narrow._replace(head_dim=WIDTH)))
        predicted = _predicted(spec, np.array(work_CN), tokens, chunk, np.array(layer_bytes), form == "keys")
        found.append({"form": form, "ranks": ranks, **predicted})
    return found


def _predicted(
    spec: ModelSpec, work_CN: np.ndarray, tokens: int, chunk: int, bytes_C: np.ndarray, hidden: bool
) -> dict[str, object]:
    h200, ranks, layers = find("H200").attained(), work_CN.shape[1], len(spec.layers)
    limit, rate = Roofline(spec, h200, "bfloat16"), h200.rate("bfloat16")
    link, attention_C = LINKS["cuda"], layers * 4 * WIDTH * work_CN.max(1) / rate
    products = 0.0
    for row, (start, end) in zip(work_CN, chunks(tokens, chunk), strict=True):
        shape, share = ([end - start], [end]), [-(-(end - start) // ranks)]
        whole, own = attention_cost(*shape, **LAYER), attention_cost(share, [end], **LAYER)
        assert np.isclose(row.sum() * 4 * WIDTH, whole.flops), "all ranks together compute what one device does"
        products += limit.step_limit(StepShape(share, [end], 1)) - layers * own.flops / rate
    messages = layers * 2 * link.latency * len(work_CN) if ranks > 1 else 0.0
    travel_C = layers * bytes_C / link.bandwidth
    in_turn = products + messages + float((attention_C + travel_C).sum())
    seconds = products + messages + float(np.maximum(attention_C, travel_C).sum()) if hidden else in_turn
    return {
        "attention_max_over_mean": imbalance(work_CN.sum(0)),
        "attention_worst_step": max(imbalance(row) for row in work_CN),
        "tflop_of_attention_per_rank": layers * 4 * WIDTH * work_CN.sum(0).max() / 1e12,
        "gigabytes_received_per_rank": layers * float(bytes_C.sum()) / 1e9,
        "predicted_seconds": seconds,
        "predicted_seconds_in_turn": in_turn,
        "predicted_tokens_per_second_and_rank": tokens / seconds / ranks,
    }


def balance(ranks: int, tokens: int, chunk: int) -> dict[str, float]:
    """Return by deal the work of the rank that has the most, divided by the mean, summed over a prompt's chunks."""
    waited = {}
    for deal in ("striped", "zigzag", "contiguous"):
        steps = [pairs_of(deal, ranks, start, end) for start, end in chunks(tokens, chunk)]
        waited[deal] = sum(step.max() for step in steps) / sum(step.mean() for step in steps)
    return waited


def main() -> None:
    given = asked(__doc__, tokens=131_072, chunk=16_384, ranks=[1, 2, 4, 8], output=Path)
    spec = model_config(LLAMA_8B).spec
    lines: list[dict[str, object]] = []
    print(f"work of the busiest rank over the mean, a prompt of {given.tokens:,} tokens")
    print(f"{'ranks':>5} {'chunk':>8} {'striped':>9} {'zigzag':>9} {'contiguous':>11}")
    for ranks in given.ranks:
        for chunk in (given.tokens, given.chunk):
            found = balance(ranks, given.tokens, chunk)
            lines.append({"kind": "balance", "ranks": ranks, "chunk": chunk, **found})
            numbers = (f"{found[deal]:>{9 + 2 * (deal == 'contiguous')}.4f}" for deal in found)
            print(f"{ranks:>5} {chunk:>8}", *numbers)
    print(f"\nLlama-3.1-8B's shape, chunks of {given.chunk:,}; H200s predicted")
    names = (
        f"{'max/mean':>9} {'TFLOP attn':>11} {'GB in':>8} {'seconds':>8} {'in turn':>8} {'tok/s/rank':>11} {'flat':>6}"
    )
    print(f"{'ranks':>5} {'form':>8} {names}")
    alone = 0.0
    for ranks in given.ranks:
        for row in simulate(spec, ranks, given.tokens, given.chunk):
            rate = float(str(row["predicted_tokens_per_second_and_rank"]))
            alone = alone or rate
            row["part_of_one_rank"] = rate / alone
            lines.append({"kind": "work", "tokens": given.tokens, "chunk": given.chunk, **row})
            print(
                f"{ranks:>5} {row['form']:>8} {row['attention_worst_step']:>9.4f} "
                f"{row['tflop_of_attention_per_rank']:>11.1f} {row['gigabytes_received_per_rank']:>8.1f} "
                f"{row['predicted_seconds']:>8.2f} {row['predicted_seconds_in_turn']:>8.2f} "
                f"{rate:>11.0f} {rate / alone:>6.3f}"
            )
    limit = Roofline(spec, find("H200").attained(), "bfloat16").step_limit
    for ranks in (count for count in given.ranks if count > 1):
        least = pays_from(spec, ranks, limit, "cuda", 2, LINKS["cuda"])
        form = cheapest(ranks, Attended(least, least, least * least // 2, HEADS, KV_HEADS, WIDTH, 2), "cuda")
        lines.append({"kind": "crossover", "ranks": ranks, "tokens": least, "form": form})
        print(f"{ranks} ranks are sooner from {least:,} tokens on ({form})")
    if given.output is not None:
        append_lines(given.output, lines)


if __name__ == "__main__":
    main()
