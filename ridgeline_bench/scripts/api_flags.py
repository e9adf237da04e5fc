"""Writes docs/api-flags.md from the tables that the command line uses.

    python -m ridgeline_bench.scripts.api_flags

A test compares the page with what this would write.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.options import ENGINE_HELP
from ridgeline.cli.serve import SERVE_HELP, own_flags
from ridgeline.core.settings.vllm_flags import ALIASES, FLAGS, Flag, State, Takes

ROOT = Path(__file__).parents[2]
PAGE, VLLM = ROOT / "docs" / "api-flags.md", ROOT / "tests" / "vllm_flags.txt"

HEAD = """# Flags of vLLM's server

`python -m ridgeline_bench.scripts.api_flags` writes this page from the tables that the
command line reads (`core/settings/vllm_flags.py`, `cli/serve.py`), and a test compares them. The
flags are those of vLLM 0.33, and those of older versions that scripts still have.

`ridgeline serve` takes them as `vllm serve` does: with underscores or dashes, several values after
one flag (`--api-key a b`), JSON lists, objects by their keys (`--hf-overrides.rope_theta 1e6`) and
short forms. A list keeps every word up to the next flag, so the model stands before the flags or
behind `--`. `ridgeline migrate 'vllm serve …'` prints our command and what differs. `LLM()` and
the YAML file of `--config` read the same tables. Other arguments of vLLM's Python API, fields of
its parameters and methods of its `LLM` that are not here are refused by name
(`core/settings/vllm_arguments.py`).

* **the same**: it is a setting of ours.
* **renamed**: ours has another name. The server says so and goes on.
* **no effect**: it changes no answer here. The server says why and goes on.
* **refused**: it would change answers, and we have no such thing. The server ends with code 2 and
  says what to do, unless the value asks for what happens anyway.

`--middleware` names code of the operator's (a class or an async function, `module.name`) that is
imported into each API server and runs there with all its rights: it sees every request that passed
the keys, and every answer. Nothing else makes the server run code from outside.
"""


def page() -> str:
    """Return the page's text."""
    theirs = VLLM.read_text().split()
    own = own_flags() | {"model": Takes.VALUE}
    help_of = ENGINE_HELP | SERVE_HELP | {"config": "YAML file with the same settings."}
    short = {name: alias for alias, name in ALIASES.items()}
    rows = []
    for name in sorted({*theirs, *FLAGS}):
        flag = f"`--{name}`" + (f", `{short[name]}`" if name in short else "")
        if name in own:
            rows.append((flag, "the same", help_of[name.replace("-", "_")]))
        else:
            rows.append((flag, *_row(FLAGS[name])))
    count = sum(state == "the same" for _, state, _ in rows)
    lines = [HEAD, f"{len(rows)} flags, {count} of them the same.", "", "| flag | here | |", "|---|---|---|"]
    lines += [f"| {flag} | {state} | {text.replace('|', '¦')} |" for flag, state, text in rows]
    ours = sorted(set(own) - set(theirs))
    lines += ["", "## Flags that vLLM has not", "", "| flag | |", "|---|---|"]
    lines += [f"| `--{name}` | {help_of[name.replace('-', '_')]} |" for name in ours]
    return "\n".join(lines) + "\n"


def _row(flag: Flag) -> tuple[str, str]:
    if flag.state is State.RENAMED:
        return f"renamed `{flag.ours}`", f"{flag.text}."
    if flag.state is State.ACCEPTED:
        return "no effect", f"{flag.text}."
    values = [value if value[:1] != "{" else f"an object with {value}" for value in flag.harmless if value != "{}"]
    unless = f" Taken with the value {' or '.join(f'`{value}`' for value in values)}." if values else ""
    return "refused", f"{flag.text}.{unless}"


if __name__ == "__main__":
    PAGE.write_text(page())
