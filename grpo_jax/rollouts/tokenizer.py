"""The tokenizer of a model, and the prompts made with it."""

import functools
import json
from pathlib import Path
from typing import Any

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.tasks import Problem, chat_tokens, messages

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
    if not tokenizer.chat_template:
        raise UsageError(f"model.source: the tokenizer in {model_dir} has no chat template")
    return tokenizer


class Prompts:
    """Prompt tokens of problems, computed once for as long as they are remembered."""

    def __init__(self, config: Config, tokenizer: Any):
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
