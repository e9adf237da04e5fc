"""The collectives that XLA's partitioner inserts (GSPMD or Shardy, as jax chooses), for partitioned_collectives.py.

An interpreter that has jax runs this file, which needs nothing of this project:

    python ridgeline_bench/scripts/xla_collectives.py CASES.json

It prints jax's version and, for each case, the collectives of the compiled program of four CPU devices: of each kind
the number, and the bytes that a device sends. The parts of a combined collective count one by one.
"""

import json
import math
import os
import re
import sys
from collections import Counter

SIZES = {
    "B": 4,
    "S": 16,
    "M": 64,
    "F": 256,
    "H": 8,
    "D": 8,
}  # sequences, tokens, width, inner width, heads, their width
WEIGHTS = {"up": "FM", "down": "MF", "q": "MM", "k": "MM", "v": "MM", "o": "MM"}
USED = {"mlp": ("up", "down"), "attention": ("q", "k", "v", "o"), "block": tuple(WEIGHTS)}
LINE = re.compile(
    r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)
BYTES = {"f32": 4, "pred": 1, "s32": 4}


def functions():
    """Return the graphs by name, as functions of weights and an input [B, S, M]."""
    import jax
    import jax.numpy as jnp

    heads, depth = SIZES["H"], SIZES["D"]

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def mlp(w, x):
        return jax.nn.gelu(x @ w["up"].T, approximate=False) @ w["down"].T

    def attention(w, x):
        b, s, m = x.shape
        q, k, v = (jnp.transpose((x @ w[name].T).reshape(b, s, heads, depth), (0, 2, 1, 3)) for name in "qkv")
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(depth)
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
        attended = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, -1), v)
        return jnp.transpose(attended, (0, 2, 1, 3)).reshape(b, s, m) @ w["o"].T

    def block(w, x):
        x = x + attention(w, norm(x))
        return x + mlp(w, norm(x))

    return {"mlp": mlp, "attention": attention, "block": block}


def collectives(case):
    """Return {kind: [number, bytes sent]} of a case."""
    import jax
    import jax.numpy as jnp
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names, sizes = zip(
        *((part.split("=")[0], int(part.split("=")[1])) for part in case["mesh"].split(",")), strict=True
    )
    mesh = Mesh(numpy.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)

    def sharding(text):
        return NamedSharding(
            mesh, PartitionSpec(*(None if part == "-" else tuple(part.split("+")) for part in text.split(",")))
        )

    told, f = case["annotations"], functions()[case["graph"]]
    weights = {}
    for name in USED[case["graph"]]:
        shape = tuple(SIZES[letter] for letter in WEIGHTS[name])
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(told.get(name, "-,-")))
    shape = tuple(SIZES[letter] for letter in "BSM")
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(told.get("x", "-,-,-")))
    out = sharding(case["output"])
    if case["gradients"]:
        out = {name: sharding(told.get(name, "-,-")) for name in weights}
        of = f

        def f(w, x):
            return jax.grad(lambda each: jnp.mean(jnp.square(of(each, x))))(w)

    text = jax.jit(f, out_shardings=out).lower(weights, x).compile().as_text()
    found, sent = Counter(), Counter()
    for line in text.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        kind, ranks = match[2].replace("-", "_"), group(line)
        shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", match[1])
        held = [BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size) for dtype, dims in shapes]
        found[kind] += 1 if kind == "all_to_all" else len(held)
        factor = {"all_reduce": 2, "reduce_scatter": ranks}.get(kind, 1)
        sent[kind] += sum(factor * (ranks - 1) * each // ranks for each in held)
    return {kind: [found[kind], sent[kind]] for kind in found}


def group(line):
    """Return the number of devices of a group."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = dict(part.split("=") for part in named[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in named[2].split(","))
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]", line)[1])


def main():
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax

    with open(sys.argv[1]) as file:
        cases = json.load(file)
    print(json.dumps({"jax": jax.__version__, "found": [collectives(case) for case in cases]}))


if __name__ == "__main__":
    main()
