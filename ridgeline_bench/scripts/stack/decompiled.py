"""The functions that Dynamo writes in the place of a model's, decompiled by depyf: what runs before, between and behind
its graphs.

    pip install depyf                      # into an environment of its own: no extra brings it
    python -m ridgeline_bench.scripts.stack.decompiled longformer

MODEL is a class of `graph_breaks.py`. Dynamo's code runs as it is; depyf turns it into text beside that, for which a
name that Dynamo made up may stand in the place of a variable's.
"""

from __future__ import annotations

import logging
import warnings
from types import CodeType

import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.stack.graph_breaks import CALLS, arguments, built


@torch.no_grad()
def written(name: str) -> list[str]:
    """Return the text of each function that Dynamo writes for a call of a class. Raise InvalidConfig without depyf."""
    try:
        from depyf import decompile
    except ImportError as error:
        raise InvalidConfig(f"depyf is not installed ({error}); pip install depyf brings it.") from error
    if name not in CALLS:
        raise InvalidConfig(f"there is no class {name!r}; there are {', '.join(CALLS)}.")
    found: list[str] = []

    def seen(_: CodeType, code: CodeType) -> None:
        try:
            found.append(str(decompile(code)))
        except Exception as error:  # of the decompiler, which does not know all bytecode
            found.append(f"# {code.co_name}: depyf cannot read it ({error})")

    torch._dynamo.reset()
    call = CALLS[name][0]
    function, given = arguments(built(name, call), call)
    handle = torch._dynamo.convert_frame.register_bytecode_hook(seen)
    try:
        torch.compile(function, backend="eager")(**given)
    finally:
        handle.remove()
    return found


def main() -> None:
    a = asked(__doc__, "model")
    warnings.simplefilter("ignore")
    torch._logging.set_logs(dynamo=logging.CRITICAL)
    with told():
        print("\n".join(written(a.model)))


if __name__ == "__main__":
    main()
