"""Draw pictures, and let a model describe them: the embedded one, or a folder of `senses.see`.

    python -m ridgeline_bench.scripts.senses.demo [--model FOLDER] [--pictures FILE...] [--ask QUESTION] [--each 2]
        [--save FOLDER] [--device auto] [--seed 0]

Without --pictures, --each pictures of each kind are drawn of what training leaves out; --save keeps them as PNG files.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from PIL import Image
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.senses.drawn import DESCRIBE, KINDS, Artist, right_facts


def described(llm: LLM, pictures: list[Image.Image], question: str = DESCRIBE) -> list[str]:
    """Return the likeliest answer for each picture."""
    chats = [
        [
            {
                "role": "user",
                "content": [{"type": "image_pil", "image_pil": each}, {"type": "text", "text": question}],
            }
        ]
        for each in pictures
    ]
    found = llm.chat(chats, SamplingParams(temperature=0, max_tokens=72), use_tqdm=False)
    return [each.outputs[0].text for each in found]


def main() -> None:
    given = asked(
        __doc__, pictures=[str], ask=DESCRIBE, each=2, save=str, model="embedded-vision", device="auto", seed=0
    )
    if given.pictures:
        images, true = [Image.open(file).convert("RGB") for file in given.pictures], list(given.pictures)
    else:
        random, artist = Random(given.seed), Artist(measuring=True)
        drawn = [artist.draw(random, kind) for kind in KINDS for _ in range(given.each)]
        images, true = [each.image for each in drawn], [each.caption for each in drawn]
    if given.save:
        Path(given.save).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images):
            image.save(Path(given.save) / f"{number}.png")
    with LLM(given.model, device=given.device) as llm:
        said = described(llm, images, given.ask)
    measured = not given.pictures and given.ask == DESCRIBE
    rows = Table("file" if given.pictures else "drawn", "said", *(["facts right"] if measured else []))
    for ours, theirs in zip(said, true, strict=True):
        rows.add_row(theirs, ours, *([f"{right_facts(ours, theirs):.0%}"] if measured else []))
    Console().print(rows)


if __name__ == "__main__":
    with told():
        main()
