"""Stands in for a learner: writes run, probe, policies and canaries as a learner would and, when asked, wrongly."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.adapters.manifest import Canary, Manifest, file_entry, manifest_bytes
from grpo_jax.adapters.names import PolicyName
from grpo_jax.adapters.peft import adapter_files, modules
from grpo_jax.models.config import LoraConfig, ModelConfig, projection_shapes
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.logprobs import logits, token_logprobs
from grpo_jax.models.source import base_digest
from grpo_jax.models.weights import load_params
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter


@dataclass
class StandIn:
    """`publish` writes one adapter, `point` moves `policy.json`."""

    root: str
    run: str
    model_dir: Path
    lora: LoraConfig
    digest: str = ""
    window: list[str] = field(default_factory=list)
    probe: str = ""

    def __post_init__(self) -> None:
        self.bucket = Bucket(self.root).child(self.run)
        self.model = ModelConfig.from_dir(self.model_dir)
        self.base = load_params(self.model_dir, self.model, jnp.float32)
        self.digest = self.digest or base_digest(self.model_dir)
        self.tokens = np.random.default_rng(0).integers(0, min(self.model.vocab_size, 250), 24).astype(np.int32)
        self._writers = {
            key: RecordWriter(self.bucket, key, 1) for key in (layout.RUN, layout.POLICY, layout.LEARNER_STATE)
        }

    def begin(self, status: str = "running") -> None:
        record = {"run": self.run, "status": status, "error": None, "base": {"source": "test", "digest": self.digest}}
        self._writers[layout.RUN].write(record)
        self.beat()

    def beat(self) -> None:
        self._writers[layout.LEARNER_STATE].write({"run": self.run, "step": 0, "phase": "training", "at": time.time()})

    def start(self) -> str:
        """Run, probe, v0 and pointer: what an agent needs to get going. Returns v0's name."""
        self.begin()
        self.probe = self.publish(None, self.version(1001, size=0.3))
        v0 = self.publish(0, self.version(1000, size=0.0))
        self.point(v0)
        return v0

    def point(self, *window: str) -> None:
        """Newest first."""
        self.window = list(window)
        body = {"run": self.run, "current": window[0], "window": self.window, "probe": self.probe}
        self._writers[layout.POLICY].write(body)

    def version(self, seed: int, size: float = 0.1) -> Any:
        """A trained-looking adapter: A as peft draws it, B random with the deviation `size`."""
        rng, layers, rank = np.random.default_rng(seed), self.model.num_layers, self.lora.rank
        tree: dict[str, Any] = {}
        for module, (rows, columns) in projection_shapes(self.model).items():
            a = rng.uniform(-1, 1, (layers, rows, rank)) * rows**-0.5
            b = size * rng.normal(size=(layers, rank, columns))
            block, _, name = module.partition(".")
            tree.setdefault(block, {})[name] = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
        return {"layers": tree}

    def logprobs(self, tree: Any, tokens: Any = None) -> list[float]:
        scored = _scorer(self.model, self.lora)(self.base, tree, jnp.asarray(self.tokens if tokens is None else tokens))
        return [float(x) for x in scored]

    def next_logits(self, tree: Any, tokens: list[int]) -> np.ndarray:
        """Float64 [vocabulary], raw, of the token after `tokens`."""
        padded = jnp.asarray([*tokens, *[0] * (64 - len(tokens))], jnp.int32)
        return np.asarray(_next_logits(self.model, self.lora)(self.base, tree, padded, len(tokens) - 1), np.float64)

    def files(self, tree: Any, **settings: Any) -> dict[str, bytes]:
        given = {"rank": self.lora.rank, "alpha": self.lora.alpha, "rslora": self.lora.rslora, "base_model": "test"}
        return adapter_files(tree, **(given | settings))

    def publish(
        self,
        version: int | None,
        tree: Any,
        *,
        files: dict[str, bytes] | None = None,
        corrupt: str | None = None,
        name_of: dict[str, bytes] | None = None,
        manifest: dict[str, Any] | None = None,
        canary: list[float] | None = None,
        without_manifest: bool = False,
    ) -> str:
        """Uploads an adapter; the manifest's canary is that of `tree`.

        Args:
            files: what is uploaded instead of the export of `tree`.
            corrupt: a file of which one byte is changed after its digest was taken.
            name_of: the files whose digest names the adapter.
            manifest: fields that the manifest gets instead.
            canary: log-probabilities that the manifest gets instead.
        """
        files = files or self.files(tree)
        named = name_of or files
        digest = hashlib.sha256(named[layout.ADAPTER_CONFIG] + named[layout.ADAPTER_WEIGHTS]).hexdigest()
        name = str(PolicyName(self.run, version, digest[:8]))
        fields: dict[str, Any] = {
            "name": name,
            "version": version,
            "step": version or 0,
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
            "scale": self.lora.scale,
            "targets": sorted(module.rpartition(".")[2] for module, _ in modules(tree)),
            "base_digest": self.digest,
            "norm": 1.0,
            "digest": digest,
            "files": {file: file_entry(data) for file, data in files.items()},
            "canary": Canary(tokens=self.tokens.tolist(), logprobs=self.logprobs(tree) if canary is None else canary),
        }
        for file, data in files.items():
            if file == corrupt:
                data = data[:-1] + bytes([data[-1] ^ 1])
            self.bucket.put(layout.adapter(name, file), data)
        self._manifest = layout.adapter(name, layout.MANIFEST), manifest_bytes(Manifest(**(fields | (manifest or {}))))
        if not without_manifest:
            self.finish()
        return name

    def finish(self) -> None:
        """Writes the manifest of what was published last."""
        self.bucket.put(*self._manifest)


# Compiled once for all stand-ins.
@lru_cache
def _scorer(model: ModelConfig, lora: LoraConfig) -> Callable[..., Any]:
    @jax.jit
    def score(base: Any, tree: Any, tokens_T: Any) -> Any:
        hidden = _hidden(model, lora, base, tree, tokens_T)[:-1]
        return token_logprobs(base, hidden, tokens_T[1:], config=model, temperature=1.0, chunk=32)[0]

    return score


@lru_cache
def _next_logits(model: ModelConfig, lora: LoraConfig) -> Callable[..., Any]:
    return jax.jit(lambda base, tree, tokens, at: logits(base, _hidden(model, lora, base, tree, tokens)[at], model))


def _hidden(model: ModelConfig, lora: LoraConfig, base: Any, tree: Any, tokens_T: Any) -> Any:
    row = tokens_T[None]
    position = jnp.arange(row.shape[1])[None]
    variables = {"params": base, "lora": tree}
    return Decoder(model, lora).apply(variables, row, position, jnp.ones_like(row), jnp.zeros_like(row))[0]
