"""A Q-Former beside the plain projector, as a run of `senses.see --beside` left them: stored, told and drawn.

    python -m ridgeline_bench.scripts.senses.beside out/beside/beside.json [--output FILE.jsonl] [--plot PICTURE.svg]

Both learned from the same batches at equal steps. A line is stored for each 50 steps, with the mean losses of these,
and one with what both say of pictures that training never drew: the share of right facts in captions, and of right
answers, by kind of picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts.asked import asked, keep, told
from ridgeline_bench.svg import Panel, picture

FORMS = {"projector": "projector", "qformer": "Q-Former"}  # names in reports, and in pictures
WORKLOAD = "projector beside Q-Former"


def lines_of(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a report: the losses of each 50 steps, and what was measured behind the last one."""
    machine = {"gpu": report["device"], **report["versions"], "commit": report["commit"]}
    run = {"machine": machine, "workload": WORKLOAD, "batch": report["batch"]}
    for each in report["log"]:
        yield run | {"step": each["step"], **{name: each[name] for name in FORMS}}
    ended = {
        name: {
            "parameters": report[name]["parameters"],
            "facts": {kind: each["facts"] for kind, each in report[name]["captions"].items()},
            "answers": {kind: each["right"] for kind, each in report[name]["answers"].items()},
        }
        for name in FORMS
    }
    yield run | {"steps": report["steps"], "seconds": report["seconds"], **ended}


def drawing(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses over steps, and the shares of right facts behind the last one, as SVG."""
    losses = [line for line in lines if "step" in line]
    [end] = [line for line in lines if "steps" in line]
    kinds = list(end["projector"]["facts"])
    curves = {shown: [(line["step"], line[name]) for line in losses] for name, shown in FORMS.items()}
    facts = {
        shown: [(number, 100 * end[name]["facts"][kind]) for number, kind in enumerate(kinds, 1)]
        for name, shown in FORMS.items()
    }
    panels = [
        Panel("loss of captions and answers, nats a token", "steps", curves, log_y=True),
        Panel("right facts in captions, %", ", ".join(f"{n} {kind}" for n, kind in enumerate(kinds, 1)), facts),
    ]
    return picture(panels, f"{end['steps']} equal steps of {end['batch']} pictures")


def main() -> None:
    given = asked(__doc__, "report", output="", plot="")
    report = json.loads(Path(given.report).read_text(encoding="utf-8"))
    ended = datetime.fromtimestamp(Path(given.report).stat().st_mtime, UTC).isoformat(timespec="seconds")
    lines = [{"date": ended, **line} for line in lines_of(report)]
    for line in lines:
        keep(Path(given.output) if given.output else None, line)
    *_, end = lines
    for name, shown in FORMS.items():
        facts = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in end[name]["facts"].items())
        print(f"{shown}: loss {report['log'][-1][name]:.3f}, facts of {facts}")
    if given.plot:
        Path(given.plot).write_text(drawing(lines), encoding="utf-8")


if __name__ == "__main__":
    with told():
        main()
