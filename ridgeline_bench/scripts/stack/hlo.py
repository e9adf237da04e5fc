"""What XLA makes of a function: HLO before and after optimization, and what its passes did, from jax on a CPU.

    pip install jax                        # into an environment of its own: no extra brings it
    python -m ridgeline_bench.scripts.stack.hlo [--print] [--output results.jsonl]

The function is an RMS norm, a gated feed-forward and a residual. A child process compiles it with XLA's dump on, so the
name of every pass that changed the module is known, and the memory that buffer assignment gave it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.asked import asked, keep, told

PROGRAM = """
import json, jax, jax.numpy as jnp
def block(x, w, gate_up, down):
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w
    a, b = jnp.split(y @ gate_up, 2, axis=-1)
    return x + (jax.nn.silu(a) * b) @ down
shapes = [(64, 512), (512,), (512, 2048), (1024, 512)]
lowered = jax.jit(block).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
compiled = lowered.compile()
memory = compiled.memory_analysis()
print(json.dumps({
    "version": jax.__version__, "before": lowered.as_text(dialect="hlo"), "after": compiled.as_text(),
    "memory": {"arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
               "temporary": memory.temp_size_in_bytes},
}))
"""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \(?[\w\[\],{}: /*=]+?\)? ([a-z][\w\-]*)\(", re.MULTILINE)
_DUMPED = re.compile(r"\.(\d+)\.([\w\-]+)\.after_([\w\-]+)\.before_[\w\-]+\.txt$")


def opcodes(text: str) -> dict[str, int]:
    """Return the number of instructions of each opcode of a module, those inside fusions included."""
    return dict(Counter(_INSTRUCTION.findall(text)).most_common())


def fusions(text: str) -> list[list[str]]:
    """Return what each fused computation does, in order."""
    bodies = re.findall(r"^%?(\S*fused\S*) \([^\n]*\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    return [[op for op in _INSTRUCTION.findall(body) if op != "parameter"] for _, body in bodies]


def layouts(text: str) -> list[str]:
    """Return the layouts of arrays that a module names, as orders of dimensions, the fastest first."""
    return sorted(set(re.findall(r"\](\{[\d,]+\})", text)))


def changes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the pipeline and pass behind which the module's text is another one than before, in order."""
    found = []
    for file in folder.iterdir():
        if said := _DUMPED.search(file.name):
            found.append((int(said[1]), said[2], said[3], file))
    before = ""
    for _, pipeline, name, file in sorted(found):
        text = file.read_text()
        if text != before and before and name != "pipeline-start":
            yield pipeline, name
        before = text


def measured() -> dict[str, Any]:
    """Return XLA's texts of the function, and what its passes did. Raise InvalidConfig without jax."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=.*"
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise InvalidConfig(f"jax did not compile: {(ran.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
        said = json.loads(ran.stdout.splitlines()[-1])
        done = [f"{pipeline}: {name}" for pipeline, name in changes(Path(folder))]
    return {**said, "passes": done}


def line_of(said: dict[str, Any]) -> dict[str, Any]:
    """Return the line of what `measured` found."""
    before, after = said["before"], said["after"]
    return {
        "workload": "hlo", "version": said["version"], "before": opcodes(before), "after": opcodes(after),
        "fusions": fusions(after), "layouts": layouts(after), "passes": said["passes"], "memory": said["memory"],
    }  # fmt: skip


def main() -> None:
    a = asked(__doc__, print=(False, "the texts of the module"), output=(Path, "the file of results"))
    with told():
        said = measured()
        if a.print:
            print(f"before:\n{said['before']}\nafter:\n{said['after']}")
        line = line_of(said)
        keep(a.output, line)
        for name in ("before", "after", "fusions", "layouts", "passes", "memory"):
            print(f"{name}: {line[name]}")


if __name__ == "__main__":
    main()
