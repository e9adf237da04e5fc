"""What is held out of training, by a hash of what it is: it is the same on every machine and in every run."""

from __future__ import annotations

from hashlib import sha256

SHARE = 0.12  # of texts, numbers and words
TEXT = (
    "able acorn amber angle apple april arrow aunt autumn badge baker basin beach berry birch blaze bolt brave bread "
    "brick broom brush cabin cable camel candle canoe cargo castle chalk charm chest chili cider circus clay cliff "
    "clock cloud clover coal cobra comet coral crane crown cube curve daisy dance dawn delta desk diary dove draft "
    "dream drum dune eagle earth easel echo elbow ember empty engine fable falcon feast fern field flame flute foal "
    "forest fork fossil fox frost fruit galaxy garden gecko giant ginger glass globe goat grape gravel guitar habit "
    "hammer harbor hazel helmet hero honey horn hotel house humble igloo island ivory jacket jaguar jelly jewel joke "
    "jungle kayak kettle key kitten kiwi knot koala ladder lagoon lake lemon lily lion lizard lobby lunar magnet "
    "mango maple marble meadow melon metal mirror moon moss motor mouse music napkin navy needle nest noble north "
    "oasis ocean olive onion orbit otter oven owl oyster paddle palm panda paper parrot pearl pebble pencil pepper "
    "piano pillow pilot pine planet plum pocket polar pony prism puzzle quail quartz queen quick quilt rabbit radar "
    "raft rain raven reef ribbon river robot rocket rope rose ruby saddle salad salt sand scarf seal shell ship silk "
    "silver skate sky snow sofa spark spoon spring squid stable star steam stone storm sugar summer sun swan table "
    "tango taxi temple tiger toast tomato torch tower train tulip tunnel turtle unicorn valley vapor velvet violin "
    "vivid walnut water whale wheat willow window winter wizard wolf wool yacht yarn yeast young zebra zero zinc"
)
WORDS = TEXT.split()
MOST_LETTERS = 6


def fraction(*parts: object) -> float:
    """Return a number from 0 to 1 that depends on nothing but these."""
    return int.from_bytes(sha256(" ".join(map(str, parts)).encode()).digest()[:4], "big") / 2**32


def held_out(*parts: object) -> bool:
    return fraction(*parts) < SHARE


def unseen_words() -> list[str]:
    """Return the words that are never drawn in training: every second one."""
    return [word for word in WORDS if len(word) <= MOST_LETTERS and unseen_word(word)]


def seen_words() -> list[str]:
    return [word for word in WORDS if len(word) <= MOST_LETTERS and not unseen_word(word)]


def unseen_word(word: str) -> bool:
    """Return true if letters in this order are never drawn in training."""
    return fraction("word", word.lower()) < (0.5 if word.lower() in WORDS else SHARE)
