"""Check what pages and stored results say about the code: the command ends with 1 and names whatever is not so.

    python -m ridgeline_bench.scripts.evidence [--only pages results pictures]
    python -m ridgeline_bench.scripts.evidence --draw        # all pictures anew, from what is stored

pages      Links, files, modules, flags and targets of make exist, and each command's own parser takes its arguments. So
           it is with the commands that scripts show in their texts, and with queues of jobs.
results    Each line of benchmarks/results/ names machine, commit and date, a command of today makes it, and a page
           names its file. benchmarks/results/commands.toml has the commands, and the exceptions with their reasons.
pictures   Each picture is made again from its data, and is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ridgeline_bench.scripts.asked import OneOf, asked
from ridgeline_bench.scripts.evidence import pages, pictures, stored


def of_pages() -> Iterator[str]:
    for page in pages.PAGES:
        yield from (f"{page.relative_to(pages.ROOT)}: {told}" for told in pages.problems(page))
    yield from pages.wrong_commands_of_scripts()


CHECKS: Mapping[str, Callable[[], Iterator[str]]] = {
    "pages": of_pages,
    "results": stored.problems,
    "pictures": pictures.problems,
}


def main() -> None:
    a = asked(__doc__, only=[OneOf(CHECKS)], draw=(False, "draw all pictures anew"))
    if a.draw:
        pictures.draw_all()
        return
    found = [told for name in a.only for told in CHECKS[name]()]
    for told in found:
        print(told)
    if found:
        raise SystemExit(f"{len(found)} of these {'is' if len(found) == 1 else 'are'} not so.")
    print(f"{', '.join(a.only)}: all is so.")


if __name__ == "__main__":
    main()
