"""The door: what a group has to be before a run trains on it, whoever wrote it and however sound its file is."""

import numpy as np

from grpo_jax.adapters.names import parse_policy
from grpo_jax.config.schema import Config
from grpo_jax.rollouts.sample import Group, Sample, prompt_digest

# A sampler's softmax rounds; a log-probability above this is none.
_ROUNDING = 1e-3
# What a file may hold beside tokens: texts, the answer, parts of rewards.
_OTHER_BYTES, _BYTES_PER_TOKEN = 64 << 20, 64


class Door:
    """Checks groups against the config of the run. Which policies may be trained when is the ledger's business."""

    def __init__(self, config: Config, vocab_size: int):
        self._run, self._vocab_size = config.run, vocab_size
        self._samples, self._max_tokens = config.batch.group_size, config.sampling.max_tokens
        self._row_tokens = config.batch.row_tokens

    @property
    def max_bytes(self) -> int:
        """No group of this run needs a larger file."""
        tokens = self._row_tokens + self._samples * self._max_tokens
        return _OTHER_BYTES + _BYTES_PER_TOKEN * tokens

    def problem(self, group: Group) -> str | None:
        """What is wrong with a group, in one clause; None if it is welcome."""
        run, prompt = parse_policy(group.provenance.policy).run, group.prompt_tokens
        if run != self._run:
            return f"its policy {group.provenance.policy} is of another run"
        digest = group.provenance.prompt_digest
        if digest and digest != prompt_digest(prompt):
            return "its prompt is not the one that its provenance has the digest of"
        if len(group.samples) != self._samples:
            return f"it has {len(group.samples)} samples, not {self._samples}"
        longest = max(len(sample.tokens) for sample in group.samples)
        if longest > self._max_tokens:
            return f"a completion has {longest} tokens, more than sampling.max_tokens = {self._max_tokens}"
        if len(prompt) - 1 + longest > self._row_tokens:
            return f"prompt and completion do not fit into a row of {self._row_tokens} tokens"
        ids = np.concatenate([prompt, *(sample.tokens for sample in group.samples)])
        if int(ids.max()) >= self._vocab_size:
            return f"a token id is not below the vocabulary's {self._vocab_size}"
        return next((problem for sample in group.samples if (problem := _problem(sample))), None)


def _problem(sample: Sample) -> str | None:
    if not np.isfinite(sample.logprobs).all():
        return "a log-probability is not finite"
    if len(sample.logprobs) and float(sample.logprobs.max()) > _ROUNDING:
        return f"a log-probability is {float(sample.logprobs.max()):.3g}, above 0"
    return None
