"""The labels of classifiers, and what makes probabilities of their scores."""

from __future__ import annotations

from typing import Any, Literal

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.pooling import HeadSpec, Kind, PoolingSpec
from ridgeline.models.config import Config, wrong

MOST_LABELS = 1 << 16

Probabilities = Literal["softmax", "sigmoid", "none"]

# What makes probabilities, by the last part of the name of a function of torch, which cross-encoders' configs give
FUNCTIONS: dict[str, Probabilities] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
# … and by `problem_type`
PROBLEMS: dict[str, Probabilities] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def classification(
    config: Config,
    kind: Kind,
    *,
    before: tuple[HeadSpec, ...] = (),
    biasless: bool = False,
    whole: bool = True,
    token_types: int = 0,
) -> PoolingSpec:
    """Return the pooling of a classifier.

    before: the maps before the one to the labels. biasless: that one has no bias.
    """
    names = labels(config)
    return PoolingSpec(
        kind=kind,
        task="classify",
        width=len(names),
        head=(*before, HeadSpec(outputs=len(names), biasless=biasless)),
        whole=whole,
        normalize=False,
        activation=probabilities(config, len(names)),
        labels=names,
        token_types=token_types,
    )


def labels(config: Config) -> tuple[str, ...]:
    """Return the labels' names in order: those of `id2label`, or as many as `num_labels` says, or two."""
    found: Any = config.raw("id2label")
    if found is None:
        count = config.integer("num_labels") if "num_labels" in config else 2
        if count > MOST_LABELS:
            raise wrong("num_labels", count, f"at most {MOST_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(found, dict) or not 0 < len(found) <= MOST_LABELS:
        raise wrong("id2label", found, "an object with a name for each label")
    names = {str(index): str(name) for index, name in found.items()}
    if set(names) != {str(index) for index in range(len(names))}:
        raise wrong("id2label", found, f"an object whose keys are 0 to {len(names) - 1}")
    return tuple(names[str(index)] for index in range(len(names)))


def probabilities(config: Config, count: int) -> Probabilities:
    """Return the function that makes probabilities of `count` scores: as a cross-encoder's config says, or by the kind
    of problem, or else the sigmoid of one and the softmax of several."""
    theirs = config.section("sentence_transformers").raw("activation_fn")
    function = theirs or config.raw("sbert_ce_default_activation_function")
    if function is not None:
        name = str(function).rpartition(".")[2]
        if name not in FUNCTIONS:
            raise ModelLoadError(
                f"config.json makes probabilities by {str(function)[:80]!r}; known: {', '.join(FUNCTIONS)}."
            )
        return FUNCTIONS[name]
    if (problem := config.raw("problem_type")) is not None:
        if problem not in PROBLEMS:
            raise wrong("problem_type", problem, f"one of {', '.join(PROBLEMS)}")
        return PROBLEMS[problem]
    return "sigmoid" if count == 1 else "softmax"
