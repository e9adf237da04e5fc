"""docs/log/ has one page a month, newest section first, and docs/log.md lists every section.

The list is made from the headings. Who adds a section writes it anew:

    python -m tests.test_log
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ridgeline_bench.scripts.evidence.pages import anchor_of

LOG = Path(__file__).parents[1] / "docs" / "log.md"
MONTHS = sorted(LOG.with_suffix("").glob("*.md"), reverse=True)
LIST = "## Sections by date\n"

each_month = pytest.mark.parametrize("page", MONTHS, ids=lambda page: page.stem)


def sections(page: Path) -> list[tuple[str, str]]:
    """Return the date and the title of each section of a month's page, from top to bottom."""
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    return [(date, title) for date, _, title in (heading.partition(" · ") for heading in headings)]


def contents() -> str:
    """Return the list of all sections as docs/log.md shows it."""
    lines = [LIST, "| date | section |", "|---|---|"]
    for page in MONTHS:
        for date, title in sections(page):
            lines.append(f"| {date} | [{title}](log/{page.name}#{anchor_of(f'{date} · {title}')}) |")
    return "\n".join(lines) + "\n"


def test_the_list_of_sections_is_current() -> None:
    text = LOG.read_text()
    assert text[text.index(LIST) :] == contents(), "write it anew: python -m tests.test_log"


@each_month
def test_a_month_has_its_own_sections_newest_first(page: Path) -> None:
    dates = [date for date, _ in sections(page)]
    assert dates == sorted(dates, reverse=True)
    assert all(re.fullmatch(rf"{page.stem}-\d\d", date) for date in dates), "a heading is `## YYYY-MM-DD · title`"


@each_month
def test_no_two_sections_of_a_month_have_the_same_anchor(page: Path) -> None:
    found = [anchor_of(f"{date} · {title}") for date, title in sections(page)]
    assert len(found) == len(set(found)) > 0


if __name__ == "__main__":
    text = LOG.read_text()
    LOG.write_text(text[: text.index(LIST)] + contents())
