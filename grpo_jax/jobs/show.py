"""`grpo-jax samples`: what a run has sampled, as a table."""

from rich.console import Console

from grpo_jax.errors import EXIT_DONE, UsageError
from grpo_jax.models.source import resolve_config
from grpo_jax.observability.samples import Decode, Order, run_model, samples_table, select_samples
from grpo_jax.rollouts.tokenizer import load_tokenizer
from grpo_jax.storage.bucket import Bucket


def show_samples(bucket: Bucket, n: int, step: int | None, policy: str | None, order: Order) -> int:
    """Prints `n` samples of the run whose prefix is `bucket`; UsageError if there are none of that kind."""
    if n < 1:
        raise UsageError(f"--n: {n} samples cannot be shown")
    shown = select_samples(bucket, run_decoder(bucket), n=n, step=step, policy=policy, order=order)
    Console().print(samples_table(shown))
    return EXIT_DONE


def run_decoder(bucket: Bucket) -> Decode | None:
    """Tokens → text with the tokenizer of the run's model, if that is on this machine; nothing is fetched."""
    source = run_model(bucket)
    try:
        tokenizer = None if source is None else load_tokenizer(resolve_config(source, offline=True))
    except UsageError:
        return None
    return None if tokenizer is None else lambda tokens: tokenizer.decode(tokens)
