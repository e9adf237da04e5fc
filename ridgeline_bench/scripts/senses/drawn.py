"""Pictures that are drawn here, with the facts that are in them: shapes, numbers, words and bars.

Every picture has a caption, and questions with answers. `facts_of` reads the facts of a caption, whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from ridgeline_bench.scripts.senses.split import MOST_LETTERS, held_out, seen_words, unseen_word, unseen_words

SIDE = 96
KINDS = ("shapes", "number", "word", "bars")
COLORS = {
    "red": (214, 40, 40), "green": (40, 150, 60), "blue": (40, 80, 210), "yellow": (240, 205, 30),
    "orange": (245, 130, 20), "purple": (130, 50, 160), "pink": (245, 140, 190), "black": (25, 25, 25),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
SIZES = {"small": (5.5, 7.5), "large": (10.5, 13.0)}  # half of the width, in pixels
PLACES = (
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
)  # fmt: skip
MOST_SHAPES, MOST_BARS, HIGHEST = 4, 5, 9
PARTS = (
    *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *(f"{size} {shape}" for size in SIZES for shape in SHAPES),
    *(f"bar {height}" for height in range(1, HIGHEST + 1)),
)  # fmt: skip
Corners = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
DESCRIBE = "describe the picture"


@dataclass(frozen=True)
class DrawnPicture:
    """asked: questions with their answers. parts: what is seen in the order of the caption, of `PARTS`, and where."""

    kind: str
    image: Image.Image
    caption: str
    asked: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, Corners], ...]


@dataclass(frozen=True)
class DrawnThing:
    size: str
    color: str
    shape: str
    place: str

    def __str__(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


def unseen_pair(color: str, shape: str) -> bool:
    """Return true if shapes of that kind and color are drawn only to measure: 8 of 64, each color and each shape
    once."""
    return (list(COLORS).index(color) * 3 + 1) % len(SHAPES) == SHAPES.index(shape)


class Artist:
    """Draws pictures.

    fonts: files; Pillow's own font is used too.
    measuring: pictures of what is never drawn in training.
    """

    def __init__(self, fonts: Sequence[Path] = (), *, measuring: bool = False) -> None:
        self._fonts = [str(each) for each in fonts]
        self._measuring = measuring
        self._words = unseen_words() if measuring else seen_words()
        self._loaded: dict[tuple[str, int], ImageFont.FreeTypeFont] = {}

    def draw(self, random: Random, kind: str = "") -> DrawnPicture:
        kind = kind or random.choices(KINDS, (4, 4, 9, 2))[0]
        return {"shapes": self._shapes, "number": self._number, "word": self._word, "bars": self._bars}[kind](random)

    def _shapes(self, random: Random) -> DrawnPicture:
        count = random.randint(1, MOST_SHAPES)
        places = sorted(random.sample(range(9), count))
        pairs = [(color, shape) for color in COLORS for shape in SHAPES]
        usual = [pair for pair in pairs if not unseen_pair(*pair)]
        chosen = random.choices(usual, k=count)
        if self._measuring:
            chosen[random.randrange(count)] = random.choice([pair for pair in pairs if unseen_pair(*pair)])
        things = [
            DrawnThing(random.choice(list(SIZES)), color, shape, PLACES[place])
            for (color, shape), place in zip(chosen, places, strict=True)
        ]
        image = Image.new("RGB", (2 * SIDE, 2 * SIDE), _pale(random))
        pen = ImageDraw.Draw(image)
        parts = []
        for thing, place in zip(things, places, strict=True):
            radius = random.uniform(*SIZES[thing.size])
            room = SIDE / 6 - radius
            x = (place % 3 + 0.5) * SIDE / 3 + random.uniform(-room, room)
            y = (place // 3 + 0.5) * SIDE / 3 + random.uniform(-room, room)
            _shape(pen, thing.shape, 2 * x, 2 * y, 2 * radius, _near(random, COLORS[thing.color]), image)
            parts.append((f"{thing.size} {thing.shape}", (x - radius, y - radius, x + radius, y + radius)))
        caption = f"{count} shape{'s'[: count > 1]}: " + ", ".join(f"{each} at the {each.place}" for each in things)
        asked = tuple(_about_shapes(random, things))
        return DrawnPicture("shapes", image.reduce(2), caption + ".", asked, tuple(parts))

    def _number(self, random: Random) -> DrawnPicture:
        while True:
            text = str(random.randrange(10 ** random.randint(0, 4), 10**5))[: random.randint(1, 5)]
            if (len(text) >= 3 and held_out("number", text)) == self._measuring:
                break
        asked = (("what number is it", text), ("how many digits are there", str(len(text))), _kind("a number"))
        image, parts = self._text(random, text)
        return DrawnPicture("number", image, f"the number {text}.", asked, parts)

    def _word(self, random: Random) -> DrawnPicture:
        if self._measuring or random.random() < 0.25:
            word = random.choice(self._words)
        else:
            while True:
                word = _letters(random)
                if not unseen_word(word):
                    break
        shown = random.choice((word.upper(), word.lower(), word.capitalize()))
        asked = (
            ("what does it say", word.upper()), ("how many letters are there", str(len(word))), _kind("a word"),
        )  # fmt: skip
        image, parts = self._text(random, shown)
        return DrawnPicture("word", image, f"the word {word.upper()}.", asked, parts)

    def _bars(self, random: Random) -> DrawnPicture:
        while True:
            colors = random.sample(list(COLORS), random.randint(2, MOST_BARS))
            heights = [random.randint(1, HIGHEST) for _ in colors]
            if held_out("bars", *zip(colors, heights, strict=True)) == self._measuring:
                break
        image = Image.new("RGB", (SIDE, SIDE), _pale(random))
        pen = ImageDraw.Draw(image)
        left, floor, unit = random.randint(6, 12), random.randint(86, 90), 8.5
        ink = random.choice([(60, 60, 60), (120, 120, 120), (170, 170, 170)])
        for line in range(1, HIGHEST + 1):
            y = floor - line * unit
            pen.line((left - 3, y, SIDE - 5, y), fill=(205, 205, 205), width=1)
        step = (SIDE - 6 - left) / len(colors)
        parts = []
        for number, (color, height) in enumerate(zip(colors, heights, strict=True)):
            x = left + (number + 0.5) * step
            half = step * random.uniform(0.28, 0.4)
            corners = (x - half, floor - height * unit, x + half, floor)
            pen.rectangle(corners, fill=_near(random, COLORS[color]))
            parts.append((f"bar {height}", corners))
        pen.line((left, 6, left, floor, SIDE - 5, floor), fill=ink, width=1)
        told = list(zip(colors, heights, strict=True))
        caption = "a bar plot: " + ", ".join(f"{color} {height}" for color, height in told) + "."
        color, height = random.choice(told)
        asked = [("how many bars are there", str(len(told))), (f"how tall is the {color} bar", str(height))]
        asked.append(_kind("a bar plot"))
        for name, most in (("tallest", max(heights)), ("shortest", min(heights))):
            if heights.count(most) == 1:
                asked.append((f"which bar is the {name}", colors[heights.index(most)]))
        return DrawnPicture("bars", image, caption, tuple(asked), tuple(parts))

    def _text(self, random: Random, text: str) -> tuple[Image.Image, tuple[tuple[str, Corners], ...]]:
        dark = random.random() < 0.25
        ground, ink = _pale(random), tuple(random.randint(0, 90) for _ in range(3))
        if dark:
            ground, ink = ink, ground
        image = Image.new("RGB", (SIDE, SIDE), ground)  # type: ignore[arg-type]
        pen = ImageDraw.Draw(image)
        name = random.choice([*self._fonts, ""])
        size = random.randint(20, 34)
        while True:
            box = pen.textbbox((0, 0), text, font=self._font(name, size))
            if box[2] - box[0] <= SIDE - 4 or size <= 10:
                break
            size -= 1
        room_x, room_y = SIDE - 2 - (box[2] - box[0]), SIDE - 2 - (box[3] - box[1])
        x, y = random.uniform(2, max(room_x, 2)) - box[0], random.uniform(2, max(room_y, 2)) - box[1]
        font = self._font(name, size)
        pen.text((x, y), text, font=font, fill=ink)  # type: ignore[arg-type]
        parts, left = [], x
        for letter in text:
            own = font.getbbox(letter)
            parts.append((letter.upper(), (left + own[0], y + own[1], left + own[2], y + own[3])))
            left += font.getlength(letter)
        return image, tuple(parts)

    def _font(self, name: str, size: int) -> ImageFont.FreeTypeFont:
        if (name, size) not in self._loaded:
            made = ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
            self._loaded[name, size] = made  # type: ignore[assignment]
        return self._loaded[name, size]


def facts_of(caption: str) -> set[str]:
    """Return the facts of a caption: of shapes how many there are, and the size, color and shape of what is at each
    place; a number or a word whole; of bars how many there are, and each one's color and height by its place in the
    row."""
    if found := re.fullmatch(r"the (number|word) (\w+)\.", caption):
        return {f"{found[1]} {found[2]}"}
    if found := re.fullmatch(r"a bar plot: (.+)\.", caption):
        bars = [each.split() for each in found[1].split(", ")]
        facts = {f"{len(bars)} bars"}
        for place, bar in enumerate(bars, 1):
            if len(bar) == 2:
                facts |= {f"bar {place} is {bar[0]}", f"bar {place} has {bar[1]}"}
        return facts
    if not (found := re.fullmatch(r"(\d) shapes?: (.+)\.", caption)):
        return set()
    facts = {f"{found[1]} shapes"}
    for each in found[2].split(", "):
        if thing := re.fullmatch(r"a (\w+) (\w+) (\w+) at the (\w+(?: \w+)?)", each):
            facts |= {f"{thing[4]} is {part}" for part in thing.groups()[:3]}
    return facts


def right_facts(said: str, caption: str) -> float:
    """Return the share of the caption's facts that were said. Facts too many count as wrong ones."""
    true, told = facts_of(caption), facts_of(said)
    return len(true & told) / max(len(true), len(told))


def _about_shapes(random: Random, things: Sequence[DrawnThing]) -> list[tuple[str, str]]:
    thing = random.choice(things)
    asked = [("how many shapes are there", str(len(things))), _kind("shapes")]
    asked.append((f"what is at the {thing.place}", str(thing)))
    if sum(each.shape == thing.shape for each in things) == 1:
        asked.append((f"what color is the {thing.shape}", thing.color))
        asked.append((f"where is the {thing.shape}", thing.place))
    if sum(each.color == thing.color for each in things) == 1:
        asked.append((f"which shape is {thing.color}", thing.shape))
    color = random.choice([thing.color, random.choice(list(COLORS))])
    asked.append((f"how many {color} shapes are there", str(sum(each.color == color for each in things))))
    shape = random.choice([thing.shape, random.choice(SHAPES)])
    asked.append((f"is there a {shape}", "yes" if any(each.shape == shape for each in things) else "no"))
    return asked


def _kind(name: str) -> tuple[str, str]:
    return "what kind of picture is it", name


def _letters(random: Random) -> str:
    """Return letters: half of the time vowels and consonants in turn, as in words."""
    count = random.randint(1, MOST_LETTERS)
    if random.random() < 0.5:
        return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=count))
    first = random.randrange(2)
    return "".join(random.choice(("aeiouy", "bcdfghjklmnpqrstvwxz")[(n + first) % 2]) for n in range(count))


def _pale(random: Random) -> tuple[int, int, int]:
    level = random.randint(215, 255)
    red, green, blue = (min(255, level + random.randint(-10, 10)) for _ in range(3))
    return red, green, blue


def _near(random: Random, color: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, each + random.randint(-12, 12))) for each in color)
    return red, green, blue


def _shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, int, int], image: Image.Image
) -> None:
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle((x - 0.9 * r, y - 0.9 * r, x + 0.9 * r, y + 0.9 * r), fill=fill)
    elif shape == "ring":
        pen.ellipse(box, outline=fill, width=round(0.36 * r))
    elif shape == "cross":
        w = 0.33 * r
        pen.rectangle((x - r, y - w, x + r, y + w), fill=fill)
        pen.rectangle((x - w, y - r, x + w, y + r), fill=fill)
    elif shape == "heart":
        pen.ellipse((x - r, y - 0.9 * r, x + 0.06 * r, y + 0.2 * r), fill=fill)
        pen.ellipse((x - 0.06 * r, y - 0.9 * r, x + r, y + 0.2 * r), fill=fill)
        pen.polygon([(x - 0.95 * r, y - 0.1 * r), (x + 0.95 * r, y - 0.1 * r), (x, y + r)], fill=fill)
    else:
        around = {"triangle": (3, 1.0), "diamond": (4, 1.0), "star": (5, 0.42)}
        points, inner = around[shape]
        steps = 2 * points if shape == "star" else points
        turn = [-pi / 2 + 2 * pi * n / steps for n in range(steps)]
        far = [r * (inner if shape == "star" and n % 2 else 1.08) for n in range(steps)]
        wide = 0.72 if shape == "diamond" else 1.0
        pen.polygon([(x + wide * d * cos(t), y + d * sin(t)) for t, d in zip(turn, far, strict=True)], fill=fill)
