"""A small decoding engine around our own model: the plain reading of what vLLM computes, for tests and tiny models.

Every token costs a full forward pass over the whole sequence; there is no key-value cache. Requests of one adapter are
decoded together, at most `ROWS` sequences at a time, by one worker thread. jax is imported when an engine is built.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.adapters.manifest import AdapterError
from grpo_jax.adapters.peft import modules, read_adapter
from grpo_jax.models.config import LoraConfig, ModelConfig, projection_shapes

ROWS = 8
_SHORTEST = 32


@dataclass(frozen=True, eq=False)
class Adapter:
    """`lora` is None for the base."""

    name: str
    folder: Path | None
    lora: LoraConfig | None
    tree: Any


@dataclass(eq=False)
class Sequence:
    """A completion in the making. Log-probabilities are of the sampled tokens, after temperature."""

    adapter: Adapter
    prompt: list[int]
    max_tokens: int
    temperature: float
    rng: np.random.Generator
    stopped: Callable[[list[int]], bool]
    """Whether the completion ends after these of its tokens."""
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    abandoned: bool = False
    done: Future[None] = field(default_factory=lambda: _uncancellable())


@dataclass(eq=False)
class _Scoring:
    adapter: Adapter
    tokens: list[int]
    done: Future[list[float]] = field(default_factory=lambda: _uncancellable())


def _uncancellable() -> Future[Any]:
    """A future whose result may always be set: a request that is cancelled must not end the worker thread."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Engine:
    def __init__(self, model_dir: Path, *, dtype: str, max_model_len: int, max_lora_rank: int):
        import jax
        import jax.numpy as jnp

        from grpo_jax.models.weights import load_params

        self.max_model_len, self._max_lora_rank = max_model_len, max_lora_rank
        self.config = ModelConfig.from_dir(model_dir)
        self.base = Adapter("", None, None, None)
        self._dtype = jnp.dtype(dtype)
        self._to_device = lambda tree: jax.tree.map(jnp.asarray, tree)
        self._params = load_params(model_dir, self.config, self._dtype)
        self._functions = lru_cache(maxsize=None)(self._build)
        self._scorings: deque[_Scoring] = deque()
        self._sequences: deque[Sequence] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="decoding", daemon=True).start()

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        """Of a PEFT directory; AdapterError says what of it this engine cannot serve."""
        try:
            tree, config = read_adapter(folder, self.config.num_layers)
            lora = LoraConfig(
                int(config["r"]),
                float(config["lora_alpha"]),
                bool(config.get("use_rslora", False)),
                tuple(config["target_modules"]),
            )
        except AdapterError:
            raise
        except Exception as error:  # whatever a broken file provokes in the readers
            raise AdapterError(f"{folder.name} cannot be read: {error}") from None
        if lora.rank > self._max_lora_rank:
            raise AdapterError(f"LoRA rank {lora.rank} is greater than max_lora_rank {self._max_lora_rank}.")
        shapes, layers = projection_shapes(self.config), self.config.num_layers
        found = {module: (factors["a"].shape, factors["b"].shape) for module, factors in modules(tree)}
        expected = {
            module: ((layers, rows, lora.rank), (layers, lora.rank, columns))
            for module, (rows, columns) in shapes.items()
            if lora.adapts(module)
        }
        if found != expected:
            wrong = sorted(m for m in found.keys() | expected.keys() if found.get(m) != expected.get(m))[0]
            raise AdapterError(f"{wrong} has the shapes {found.get(wrong)}, expected are {expected.get(wrong)}")
        return Adapter(name, folder, lora, self._to_device(tree))

    def decode(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences; their `done` tells when each is finished."""
        with self._changed:
            self._sequences.extend(sequences)
            self._changed.notify()

    def score(self, adapter: Adapter, tokens: list[int]) -> Future[list[float]]:
        """Raw log-probability of each token after the first."""
        scoring = _Scoring(adapter, tokens)
        with self._changed:
            self._scorings.append(scoring)
            self._changed.notify()
        return scoring.done

    def load(self) -> tuple[int, int, set[str]]:
        """Sequences that are decoded, sequences and scorings that wait, and the names of their adapters."""
        with self._changed:
            jobs: list[Sequence | _Scoring] = [*self._sequences, *self._scorings]
            running = min(ROWS, len(self._sequences))
            return running, len(jobs) - running, {job.adapter.name for job in jobs} - {""}

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._scorings or self._sequences)
                scoring = self._scorings[0] if self._scorings else None
                self._sequences = deque(s for s in self._sequences if not s.abandoned)
                batch = [s for s in self._sequences if s.adapter is self._sequences[0].adapter][:ROWS]
            try:
                if scoring is not None:
                    scoring.done.set_result(self._score(scoring))
                elif batch:
                    self._advance(batch)
            except Exception as error:
                for job in [scoring] if scoring is not None else batch:
                    job.done.set_exception(error)
            with self._changed:
                if scoring is not None:
                    self._scorings.popleft()
                finished = {id(s) for s in batch if s.done.done()}
                # Those that were decoded now go behind the others, so that no adapter waits for another to end.
                decoded = {id(s) for s in batch} if scoring is None else set()
                rest = [s for s in self._sequences if id(s) not in finished]
                self._sequences = deque(sorted(rest, key=lambda s: id(s) in decoded))

    def _advance(self, batch: list[Sequence]) -> None:
        """One more token for each sequence."""
        so_far = [s.prompt + s.completion for s in batch]
        length = self._padded(max(map(len, so_far)))
        tokens_BxT, last_B = np.zeros((ROWS, length), np.int32), np.zeros(ROWS, np.int32)
        for row, tokens in enumerate(so_far):
            tokens_BxT[row, : len(tokens)] = tokens
            last_B[row] = len(tokens) - 1
        adapter = batch[0].adapter
        next_logits, _ = self._functions(adapter.lora)
        logits_BxV = np.asarray(next_logits(self._params, adapter.tree, tokens_BxT, last_B), np.float64)
        for sequence, logits_V in zip(batch, logits_BxV, strict=False):
            token, logprob = sample(logits_V, sequence.temperature, sequence.rng)
            sequence.completion.append(token)
            sequence.logprobs.append(logprob)
            if sequence.stopped(sequence.completion):
                sequence.finish_reason = "stop"
            elif len(sequence.logprobs) >= sequence.max_tokens:
                sequence.finish_reason = "length"
            if sequence.finish_reason is not None:
                sequence.done.set_result(None)

    def _score(self, scoring: _Scoring) -> list[float]:
        tokens_T = np.zeros(self._padded(len(scoring.tokens)), np.int32)
        tokens_T[: len(scoring.tokens)] = scoring.tokens
        _, score = self._functions(scoring.adapter.lora)
        logprobs_T = np.asarray(score(self._params, scoring.adapter.tree, tokens_T), np.float64)
        return logprobs_T[: len(scoring.tokens) - 1].tolist()

    def _padded(self, length: int) -> int:
        """A power of two, so that few lengths are compiled."""
        return min(self.max_model_len, max(_SHORTEST, 1 << (length - 1).bit_length()))

    def _build(self, lora: LoraConfig | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The two compiled functions of a LoRA shape: logits after a position, and log-probabilities of a sequence."""
        import jax
        import jax.numpy as jnp

        from grpo_jax.models.decoder import Decoder
        from grpo_jax.models.logprobs import logits, token_logprobs

        decoder = Decoder(self.config, lora, self._dtype)

        def hidden(params: Any, tree: Any, tokens_BxT: Any) -> Any:
            variables = {"params": params} | ({} if lora is None else {"lora": tree})
            positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape)
            one_prompt, no_branch = jnp.ones_like(tokens_BxT), jnp.zeros_like(tokens_BxT)
            return decoder.apply(variables, tokens_BxT, positions, one_prompt, no_branch)

        def next_logits(params: Any, tree: Any, tokens_BxT: Any, last_B: Any) -> Any:
            hidden_BxTxD = hidden(params, tree, tokens_BxT)
            return logits(params, hidden_BxTxD[jnp.arange(tokens_BxT.shape[0]), last_B], self.config)

        def score(params: Any, tree: Any, tokens_T: Any) -> Any:
            hidden_NxD = hidden(params, tree, tokens_T[None])[0, :-1]
            scored = token_logprobs(
                params, hidden_NxD, tokens_T[1:], config=self.config, temperature=1.0, chunk=_SHORTEST
            )
            return scored[0]

        return jax.jit(next_logits), jax.jit(score)


def sample(logits_V: np.ndarray, temperature: float, rng: np.random.Generator) -> tuple[int, float]:
    """A token and its log-probability after temperature; 0 takes the best token, with its raw log-probability."""
    scaled_V = logits_V / temperature if temperature > 0 else logits_V
    shifted_V = scaled_V - np.max(scaled_V)
    logprobs_V = shifted_V - np.log(np.sum(np.exp(shifted_V)))
    chosen = np.argmax(logprobs_V + rng.gumbel(size=len(logprobs_V)) if temperature > 0 else logprobs_V)
    return int(chosen), float(logprobs_V[chosen])


def eos_tokens(model_dir: Path) -> frozenset[int]:
    eos = json.loads((model_dir / "config.json").read_bytes()).get("eos_token_id")
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
