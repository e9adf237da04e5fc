"""The tiny models of all families that see, by their names."""

from tests.vision.families import gemma, llava, others, qwen

FAMILIES = llava.FAMILIES | qwen.FAMILIES | gemma.FAMILIES | others.FAMILIES
