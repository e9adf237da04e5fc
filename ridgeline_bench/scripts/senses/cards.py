"""Put a trained model's folder where it ships, with a card whose numbers are those of its report.

    python -m ridgeline_bench.scripts.senses.cards see FOLDER --to FOLDER [--after FILE] [--beside FILE]
    python -m ridgeline_bench.scripts.senses.cards hear FOLDER --to FOLDER [--after FILE]

The first folder is the --out of `senses.see` or `senses.hear`. Matrices of linear maps are stored as int8. --after is
the report of a run that this one went on from, and --beside that of `senses.see --beside`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

import matplotlib
import torch
from safetensors.torch import load_file, save_file

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.senses.drawn import COLORS, MOST_BARS, MOST_SHAPES, SHAPES, SIDE
from ridgeline_bench.scripts.senses.see import LAYERS, PATCH, TOWER_LAYERS, WIDTH
from ridgeline_bench.scripts.senses.split import MOST_LETTERS
from ridgeline_bench.scripts.senses.spoken import FAST, SLOW, SPEEDS

Report = Mapping[str, Any]
FRONT = """---
license: apache-2.0
language:
- en
library_name: ridgeline
pipeline_tag: {pipeline}
tags:
{tags}
---
"""


LEVELS = {  # int8 levels with a scale for each output, and activations as they are
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "proj_out"],
}
LINEAR = (".fc1", ".fc2", "proj", "linear_1", "linear_2")  # ends of the names of maps that are rounded


def rounded(folder: Path, to: Path) -> None:
    """Write a model's folder with the matrices of its linear maps in int8."""
    found = dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim != 2 or not name.removesuffix(".weight").endswith(LINEAR):
            found[name] = weight.bfloat16()
            continue
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-8).bfloat16()
        found[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        found[f"{name}_scale"] = scale
    for file in sorted(folder.iterdir()):
        copyfile(file, to / file.name)
    save_file(found, to / "model.safetensors", {"format": "pt"})
    (to / "model.safetensors").chmod(0o644)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": LEVELS}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def training(report: Report, earlier: Report | None, what: str) -> str:
    """Return a card's sentences on a training, and on one that it went on from."""
    runs = [each for each in (earlier, report) if each is not None]
    told_runs = [
        f"{each['steps']:,} steps of {each['batch']} {what} in {each['seconds']:.0f} s on "
        f"{'two cores of a CPU' if each['device'] == 'cpu' else 'one ' + each['device']}, from a learning rate of "
        f"{each['peak_rate']} to 0 by a cosine"
        for each in runs
    ]
    versions = report["versions"]
    return (
        f"![training loss](loss.png)\n\nAdamW; {', then '.join(told_runs)}. Other jobs shared the machine (torch "
        f"{versions['torch']}, transformers {versions['transformers']})."
    )


def goal(captions: Mapping[str, Report]) -> str:
    """Return a card's sentence on the goal of 90 % of facts."""
    missed = [f"{kind} ({percent(each['facts'])})" for kind, each in captions.items() if each["facts"] < 0.9]
    if not missed:
        return "The goal of 90 % of the facts is met for all."
    return f"The goal was 90 % of the facts. It is missed for {', '.join(missed)}."


def seeing_card(report: Report, earlier: Report | None, beside: Report | None) -> str:
    own = report["projector"]
    captions = [
        [kind, percent(each["facts"]), percent(each["whole"]), percent(each["constant"])]
        for kind, each in own["captions"].items()
    ]
    answers = [[kind, percent(each["right"]), percent(each["constant"])] for kind, each in own["answers"].items()]
    parts = [
        FRONT.format(pipeline="image-text-to-text", tags="- llava\n- synthetic"),
        "# embedded-vision",
        f"A small model that describes drawn pictures: {own['parameters']:,} parameters in LLaVA's shape, int8. "
        f"CLIP's tower with {TOWER_LAYERS} layers of width {WIDTH} reads {SIDE}x{SIDE} pixels in patches of "
        f"{PATCH}x{PATCH}, two linear maps project them, and a Llama with {LAYERS} layers of width {WIDTH} writes. It "
        f"knows four kinds of pictures and nothing else: up to {MOST_SHAPES} shapes in a grid, numbers of up to five "
        f"digits, words of up to {MOST_LETTERS} letters, and plots of up to {MOST_BARS} bars.",
        "```\nmake demo-vision\n```",
        "## How well it describes pictures it has not seen",
        f"{own['pictures_each']} pictures of each kind, drawn from what training leaves out: pictures with one of 8 of "
        f"the {len(COLORS) * len(SHAPES)} pairs of color and shape, numbers of at least three digits, English words, "
        "and rows of bars, none of which is drawn in training. Facts of shapes are how many there are, and each one's "
        "size, color, shape and place; those of a number or a word are the whole of it; those of bars are how many "
        "there are, and each one's color and height. Facts too many count as wrong. The constant caption is the best "
        "of 60 captions of training pictures.",
        table(["pictures", "facts right", "whole caption right", "constant caption"], captions),
        goal(own["captions"]),
        "One question for each picture, such as `what color is the ring`, beside the most frequent answer:",
        table(["pictures", "answers right", "constant answer"], answers),
    ]
    if beside is not None:
        rows = [
            [
                {"projector": "two linear maps, 144 vectors", "qformer": "Q-Former, 16 vectors"}[name],
                f"{beside[name]['parameters']:,}",
                f"{beside['log'][-1][name]:.3f}",
                *(percent(beside[name]["captions"][kind]["facts"]) for kind in ("shapes", "number", "word", "bars")),
            ]
            for name in ("projector", "qformer")
        ]
        parts += [
            "## Beside a Q-Former",
            "The same tower and decoder from the same start, with the projector above and with a Q-Former of 2 layers "
            f"(arXiv 2301.12597): {beside['steps']:,} steps each of the same {beside['batch']} pictures, in turns.",
            table(["projector", "parameters", "last loss", "shapes", "numbers", "words", "bars"], rows),
        ]
    parts += [
        "## Training",
        training(report, earlier, "pictures"),
        "A second loss tells the letter, shape or bar in each patch, and its place in the caption, from the "
        f"projector's vectors; its map is not part of the model. {report['drawn']:,} pictures were drawn by "
        "`ridgeline_bench.scripts.senses.drawn` while it learnt, with "
        f"Pillow and {len(report['fonts'])} fonts beside Pillow's own (subsets of free fonts: "
        f"{', '.join(report['fonts'])}). {' and '.join(report['held_out_fonts'])} are held out. Three in four of "
        "the words in training are letters in random order.",
        f"Made by `python -m ridgeline_bench.scripts.senses.see --batch {report['batch']}` at commit "
        f"{report['commit'][:12]}.",
        "## What it is not",
        "A demonstration and a subject for tests. Of a photograph it writes the caption of a drawing.",
    ]
    return "\n\n".join(parts) + "\n"


def hearing_card(report: Report, earlier: Report | None) -> str:
    rows = [
        [name, f"{each['sentences']}", percent(each["words_wrong"]), percent(each["whole"]), percent(each["constant"])]
        for name, each in report["sets"].items()
    ]
    parts = [
        FRONT.format(pipeline="automatic-speech-recognition", tags="- whisper\n- synthetic"),
        "# embedded-speech",
        f"A small recogniser of **synthetic speech only**: {report['parameters']:,} parameters in Whisper's shape, "
        f"int8, with 4 layers of width 192 that hear and 2 that write. It knows {report['words']} English words in "
        "sentences of 25 forms, said by the synthesiser eSpeak NG. A window has 6 s. Nobody's voice was learnt from, "
        "and no real voice was measured.",
        "```\nridgeline transcribe ridgeline/assets/embedded-speech/sample.ogg\n```",
        "## How well it hears what it has not heard",
        f"All sentences below are left out of training, and so are the voices ({', '.join(report['held_out_voices'])}, "
        f"also with the accents {', '.join(report['held_out_accents'])}), the speeds ({SLOW[0]} to {SLOW[1]} and "
        f"{FAST[0]} to {FAST[1]} words a minute; training has {SPEEDS[0]} to {SPEEDS[1]}, and "
        "plays sounds up to a sixth slower or a quarter faster, with their pitch), and the noises (brown, "
        "five steady tones, white clicks; training has noise of other colors, bands, bursts, hum, crackle behind "
        "filters, and whistles whose pitch changes). dB are those of speech "
        "over noise.",
        table(["left out of training", "sentences", "words wrong", "sentences right", "constant sentence"], rows),
        "Words wrong are those inserted, left out or replaced, by the words that were said. The constant sentence is "
        "the best of 200 sentences of training.",
        "## Training",
        training(report, earlier, "sentences")
        + " A second loss tells the word of each frame from the encoder's output; its map is not part of the model.",
        f"{report['spoken']:,} sentences were synthesised while it learnt, by eSpeak NG 1.52 (GPL-3.0-or-later, from "
        "the package espeakng-loader 0.2.4; no part of it is here) with English accents and voice variants. Pitch, "
        "volume, speed, place in the window and noise at 0 to 32 dB differ each time a sentence is used. Three in ten "
        "examples have times, three in ten windows have two sentences, and one in 25 has noise alone.",
        f"Made by `python -m ridgeline_bench.scripts.senses.hear --batch {report['batch']}` at commit "
        f"{report['commit'][:12]}.",
        "## What it is not",
        "It understands no person: of real speech it writes words that it knows. It is a demonstration and a subject "
        "for tests.",
    ]
    return "\n\n".join(parts) + "\n"


def plot(log: Sequence[Report], fields: Mapping[str, str], target: Path, title: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    for field, label in fields.items():
        axes.plot([row["step"] for row in log], [row[field] for row in log], linewidth=0.8, label=label)
    axes.set(xlabel="steps", ylabel="training loss (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def main() -> None:
    given = asked(__doc__, "kind=see|hear", "folder", to=Path, after=str, beside=str)
    folder, to = Path(given.folder), given.to
    report = json.loads((folder / "report.json").read_text())
    earlier = json.loads(Path(given.after).read_text()) if given.after else None
    to.mkdir(parents=True, exist_ok=True)
    rounded(folder / "model", to)
    if given.kind == "see":
        beside = json.loads(Path(given.beside).read_text()) if given.beside else None
        card, fields = (
            seeing_card(report, earlier, beside),
            {"projector": "captions and answers", "projector's parts": "parts"},
        )
    else:
        card, fields = hearing_card(report, earlier), {"loss": "words", "frames": "words by frame"}
    (to / "README.md").write_text(card)
    plot(report["log"], fields, to / "loss.png", to.name)


if __name__ == "__main__":
    with told():
        main()
