"""The tokens that a row brings which verifies drafts, behind held-out prompts: chains and trees of the shipped head.

    python -m ridgeline_bench.scripts.draft_lengths [--prompts 64] [--tokens 64]
        [--ways "chain 4" "tree 16" "tree 24"] [--output F]

The engine continues held-out modules of the standard library and held-out packages greedily, in float32, and every row
verifies drafts, whatever it costs. The prompts are those for which `ridgeline train eagle` counts right drafts. Rows
whose drafts are cut, since few tokens are left to their request, are not counted.

    chain N      N drafts, one behind the other
    tree N D     eagle_topk 4, num_draft_tokens N: the last token and N - 1 drafts, D deep (5)

httpx and seaborn must be installed: they are the held-out packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from ridgeline import LLM, SamplingParams
from ridgeline.training.corpus import build_corpus
from ridgeline.training.drafted import prompts
from ridgeline.training.embedded import EMBEDDED
from ridgeline.training.packages import STANDARD_LIBRARY, Package, installed_packages, standard_library
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.apart import as_prompts
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.told_drafts import always_verified

PROMPT = 256  # tokens
WAYS = ["chain 4", "chain 5", "tree 16 4", "tree 16", "tree 24 4", "tree 24"]


def held_out() -> dict[str, list[str]]:
    """Return the texts of each held-out set, without reading those of the training."""

    def kept() -> Iterator[Package]:
        for package in (standard_library(), *installed_packages()):
            if package.name == STANDARD_LIBRARY:
                modules = EMBEDDED.corpus.held_out_modules
                own = tuple(each for each in package.files if each[0].replace("\\", "/").split("/")[0] in modules)
                yield replace(package, files=own)
            elif package.name in EMBEDDED.corpus.held_out_packages:
                yield package

    found = build_corpus(kept(), EMBEDDED.corpus).held_out
    return {name: [document.text for document in part] for name, part in found.items()}


def config_of(way: str) -> dict[str, Any]:
    kind, drafts, *depth = way.split()
    if kind == "chain":
        return {"method": "eagle3", "num_speculative_tokens": int(drafts)}
    steps = int(depth[0]) if depth else 5
    tree = {"eagle_topk": 4, "num_draft_tokens": int(drafts)}
    return {"method": "eagle3", "num_speculative_tokens": steps, **tree}


def lengths(way: str, sets: dict[str, list[list[int]]], tokens: int) -> dict[str, tuple[float, int]]:
    """Return (tokens of a row that verifies all of its drafts, such rows) of each set."""
    limits: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "dtype": "float32",
        "enable_prefix_caching": False,
    }
    found = {}
    with LLM(speculative_config=config_of(way), skip_tokenizer_init=True, **limits) as llm:
        for name, each in sets.items():
            greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False)
            with always_verified(llm) as emitted:
                llm.generate(as_prompts(each), greedy, use_tqdm=False)
            found[name] = sum(emitted) / len(emitted), len(emitted)
            print(way, name, found[name], flush=True)
    return found


def main() -> None:
    a = asked(__doc__, prompts=(64, "of each held-out set"), tokens=64, ways=WAYS, output=Path)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    sets = {
        name: prompts(tokenizer, texts, count=a.prompts, length=PROMPT, seed=0).tolist()
        for name, texts in held_out().items()
    }
    table = Table("drafts", *(f"{name}: tokens a row" for name in sets), "rows")
    for way in a.ways:
        found = lengths(way, sets, a.tokens)
        table.add_row(way, *(f"{length:.2f}" for length, _ in found.values()), str(sum(n for _, n in found.values())))
        keep(a.output, {
            "workload": "draft lengths", "way": way, "config": config_of(way), "prompts": a.prompts,
            "tokens": a.tokens, "found": found,
        })  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
