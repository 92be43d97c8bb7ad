"""The tokenizer of a model, and the prompts made with it."""

import functools
import json
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config, Task
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem, Splits, chat_tokens, messages, prompt_tokens

_CACHED_PROMPTS = 4096


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer in a Hugging Face directory; UsageError if there is none that can be used.

    A `tokenizer.json` is the whole tokenizer, so it is loaded as it lies there. AutoTokenizer comes to the same, but
    imports torch where torch is installed, which takes seven seconds and serves no rollout.
    """
    if not (model_dir / "tokenizer.json").is_file():
        raise UsageError(f"model.source: there is no tokenizer.json in {model_dir}")
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    except Exception as error:  # the parser of tokenizer.json raises plain exceptions
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"model.source: no tokenizer can be loaded from {model_dir}: {reason}") from None
    return tokenizer


def require_chat_template(tokenizer: Any, task: Task) -> None:
    """UsageError if neither the model nor the config says how messages become a prompt."""
    if not tokenizer.chat_template and not task.chat_template_kwargs.get("chat_template"):
        raise UsageError(
            "model.source: its tokenizer has no chat template, as those of base models; give one as "
            "task.chat_template_kwargs.chat_template"
        )


def prompt_length(problem: Problem, config: Config, tokenizer: Any) -> int:
    """Tokens of a problem's prompt; UsageError if the chat template refuses it."""
    try:
        return len(prompt_tokens(problem, config.task, tokenizer))
    except Exception as error:  # a chat template raises what it likes
        raise UsageError(
            f"task.source: problem {problem.id!r} of {config.task.source} is refused by the model's chat template: "
            f"{error}"
        ) from None


def fitting(splits: Splits, config: Config, tokenizer: Any) -> Splits:
    """The task's problems without those that `task.drop_overlong` leaves out; UsageError if none is left to train on.

    The others keep their order, so every life of a run has the same ones.
    """
    if not config.task.drop_overlong:
        return splits
    room = config.batch.row_tokens - config.sampling.max_tokens
    kept = {
        name: [problem for problem in problems if prompt_length(problem, config, tokenizer) <= room]
        for name, problems in splits.items()
    }
    if not kept["train"]:
        raise UsageError(
            f"task.drop_overlong: no problem of {config.task.source} fits into batch.row_tokens = "
            f"{config.batch.row_tokens} with sampling.max_tokens = {config.sampling.max_tokens}"
        )
    return kept


class Prompts:
    """Prompt tokens of problems, computed once for as long as they are remembered."""

    def __init__(self, config: Config, tokenizer: Any):
        require_chat_template(tokenizer, config.task)
        self._config, self._tokenizer = config, tokenizer
        self._tokens = functools.lru_cache(_CACHED_PROMPTS)(self._tokenise)

    def tokens(self, problem: Problem) -> tuple[int, ...]:
        """UsageError if the prompt and a longest completion do not fit in a row."""
        tokens = self._tokens(json.dumps(messages(problem, self._config.task), default=dict))
        rows, longest = self._config.batch.row_tokens, self._config.sampling.max_tokens
        if not tokens or len(tokens) + longest > rows:
            raise UsageError(
                f"batch.row_tokens: problem {problem.id!r} of task {self._config.task.source} has a prompt of "
                f"{len(tokens)} tokens; with sampling.max_tokens = {longest} it does not fit in a row of {rows}"
            )
        return tokens

    def _tokenise(self, chat: str) -> tuple[int, ...]:
        return tuple(chat_tokens(json.loads(chat), self._config.task, self._tokenizer))
