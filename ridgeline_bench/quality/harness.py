"""lm-evaluation-harness through the offline API. Importing this module gives the harness a model named `ridgeline`.

Tokens are cut as the harness' own `hf` model cuts them, so that both score the same: special tokens as the tokenizer
adds them, the end of a text that is too long, and a text's first token behind BOS (else EOS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.request import SamplingParams
from ridgeline.llm import LLM, TokensPrompt
from ridgeline.progress import TokenBar
from ridgeline.text.chat_template import ChatTemplate
from ridgeline_bench.quality.likelihood import EvaluationFailed, prefix_token, prompt_logprobs

DEFAULT_MAX_TOKENS = 256  # the harness' own
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING_NAMES = ("top_p", "top_k", "min_p", "repetition_penalty")

LoglikelihoodRequest = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("ridgeline")
class RidgelineLM(TemplateLM):
    """Our engine as a model of the harness. `model` is an LLM, or what LLM takes (a folder, a hub id, "" for the
    embedded model) with its options.

    `batch_size` and `max_batch_size` are accepted, because the harness passes them, but have no effect: the engine
    batches.
    """

    def __init__(
        self, model: LLM | str | Path = "", *, batch_size: object = None, max_batch_size: object = None, **options: Any
    ) -> None:
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._text = self.llm.get_tokenizer()
        self._prefix = prefix_token(self.llm.assembly.model, self._text)

    # ---- what the harness' base class asks for ----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return min(self._text.eos_ids, default=self._prefix)

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def max_length(self) -> int:
        """Tokens that a loglikelihood is computed from. One more is scored, and the engine keeps one for output."""
        return self.llm.engine.config.max_model_len - 2

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: object) -> list[int]:
        """Return the token ids. By default special tokens are added, but no second BOS before one that a chat template
        wrote."""
        if add_special_tokens is None:
            bos = self._text.special_tokens.get("bos_token")
            add_special_tokens = not (bos and string.startswith(bos))
        return self._text.encode(string, add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.config.model).replace("/", "__") or "embedded"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = ChatTemplate.from_folder(self.llm.assembly.folder, self._text.special_tokens)
        return template.render(chat_history, add_generation_prompt=add_generation_prompt)

    # ---- scoring ----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[LoglikelihoodRequest], **ignored: object
    ) -> list[tuple[float, bool]]:
        """Return the logprob of each request's continuation, and whether it is greedy.

        A request is (text, context ids, continuation ids).
        """
        answers = []
        prompts = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        scored = prompt_logprobs(self.llm, prompts)
        with TokenBar("scoring", sum(map(len, prompts))) as bar:
            for (text, _, continuation), prompt, entries in zip(requests, prompts, scored, strict=True):
                kept = list(zip(prompt[1:], entries, strict=True))[max(0, len(entries) - len(continuation)) :]
                chosen = [entry[token] for token, entry in kept]
                answer = sum(each.logprob for each in chosen), all(each.rank == 1 for each in chosen)
                answers.append(answer)
                bar(len(prompt))
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the loglikelihood of whole texts, in windows that do not overlap (the harness' convention)."""
        cut = [self._rolling_windows(request.args[0]) for request in requests]
        found = iter(self._loglikelihood_tokens([window for windows in cut for window in windows]))
        totals = [sum(next(found)[0] for _ in windows) for windows in cut]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _rolling_windows(self, text: str) -> list[LoglikelihoodRequest]:
        pairs = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(pair)) for pair in pairs]

    # ---- generating -------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return texts up to (and without) a stop string or the end of sequence. A prompt that is too long loses its
        beginning."""
        params = [sampling_params(request.args[1]) for request in requests]
        prompts = [
            self._prompt(request.args[0], each.max_tokens or 0) for request, each in zip(requests, params, strict=True)
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            if output.outputs[0].error:
                raise EvaluationFailed(f"a request failed: {output.outputs[0].error}")
            self.cache_hook.add_partial("generate_until", request.args, output.outputs[0].text)
        return [output.outputs[0].text for output in outputs]

    def _prompt(self, context: str, max_tokens: int) -> TokensPrompt:
        room = self.llm.engine.config.max_model_len - max_tokens
        if room < 1:
            raise InvalidConfig(
                f"a task generates up to {max_tokens} tokens, and the context holds {room + max_tokens} with the "
                "prompt; give it a smaller max_gen_toks."
            )
        return {"prompt_token_ids": self.tok_encode(context)[-room:]}


def sampling_params(generation: Mapping[str, Any]) -> SamplingParams:
    """Return a task's `generation_kwargs` as ours. It is greedy unless it samples. Raise InvalidConfig for what we
    cannot do."""
    given = {name: value for name, value in generation.items() if value is not None}
    until = given.pop("until", [])
    limits = [given.pop(name) for name in MAX_TOKENS_NAMES if name in given]
    temperature = float(given.pop("temperature", 0.0))
    samples = given.pop("do_sample", temperature > 0)
    chosen = {name: given.pop(name) for name in SAMPLING_NAMES if name in given}
    if given.pop("num_beams", 1) != 1 or given:
        raise InvalidConfig(
            f"the task asks for generation_kwargs {dict(generation)}; supported are until, do_sample, temperature, "
            f"{', '.join((*SAMPLING_NAMES, *MAX_TOKENS_NAMES))}."
        )
    return SamplingParams(
        temperature=temperature if samples else 0.0,
        max_tokens=int(limits[0]) if limits else DEFAULT_MAX_TOKENS,
        stop=[text for text in _listed(until) if text],
        **(chosen if samples else {}),
    )


def _listed(until: str | Iterable[str]) -> list[str]:
    return [until] if isinstance(until, str) else list(until)


def run_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    limit: float | None,
    num_fewshot: int | None,
    include_path: Path | None,
    chat: bool,
) -> dict[str, Any]:
    """Return the harness' results. Raise InvalidConfig for tasks it does not know."""
    manager = _manager(tasks, include_path)
    found = simple_evaluate(
        RidgelineLM(llm),
        tasks=list(tasks),
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
        apply_chat_template=chat,
    )
    assert found is not None, "only other ranks of a distributed run get nothing"
    return found


def _manager(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return a manager that knows the tasks of include_path. It knows the harness' thousands of tasks only if needed,
    because reading them takes half a minute."""
    missing: list[str] = list(tasks)
    for defaults in (False, True):
        manager = TaskManager(include_path=str(include_path) if include_path else None, include_defaults=defaults)
        missing = [task for task in tasks if not manager.match_tasks([task])]
        if not missing:
            return manager
    raise InvalidConfig(
        f"lm-evaluation-harness has no task {', '.join(map(repr, missing))}; `lm_eval ls tasks` lists them, and "
        "--include-path names a folder of further ones."
    )
