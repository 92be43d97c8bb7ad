"""A learner that only publishes: real base, probe, canaries and publisher, and random adapters instead of training.

What a training step leaves on the device (an adapter and its canary) is made before anything is measured.
"""

import time
from typing import Any

import jax
import numpy as np

from grpo_jax.adapters.peft import adapter_files
from grpo_jax.adapters.publisher import Publisher
from grpo_jax.config.schema import Config
from grpo_jax.learner.engine import Engine
from grpo_jax.learner.fence import claim_incarnation
from grpo_jax.learner.probe import canary_tokens, probe_lora
from grpo_jax.learner.records import Heartbeat
from grpo_jax.learner.setup import adapter_spec, build_trainer
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordWriter
from grpo_jax.versions import versions

_FLUSH_S = 60.0
# Deviation of what a version adds to B: an update of about 1 % of a projection's output, well above rounding.
_CHANGE = 0.003


class PublishingLearner:
    def __init__(self, config: Config, count: int):
        """Loads the base and makes v0 and `count` further versions."""
        self._config, self._trainer = config, build_trainer(config)
        self._engine = Engine(self._trainer)
        self.tokens = canary_tokens(self._trainer.model)
        self._adapters: list[tuple[Any, np.ndarray]] = []
        tree = self._trainer.initial_lora()
        for version in range(count + 1):
            if version:
                tree = _changed(jax.random.key(version), tree)
            self._adapters.append(self._with_canary(tree))
        self._run = Bucket(config.bucket).child(config.run)
        self._incarnation = claim_incarnation(self._run)
        self._record = RecordWriter(self._run, layout.RUN, self._incarnation)
        self._published = 0
        self._heartbeat: Heartbeat | None = None
        self.publisher: Publisher | None = None

    def begin(self) -> None:
        """Run record, heartbeat, probe and v0, as a learner writes them before its first step."""
        self._write_record("running")
        self._heartbeat = Heartbeat(self._run, self._incarnation, self._state)
        self.publisher = self.publisher_into(self._run)
        trainer, seed = self._trainer, self._config.seed
        probe, logprobs = self._with_canary(probe_lora(jax.random.key(seed + 1), trainer.model, trainer.lora))
        self.publisher.publish_probe(probe, logprobs)
        self.publisher.submit(0, 0, *self._adapters[0])
        if not self.publisher.flush(_FLUSH_S):
            raise SystemExit(f"v0 was not published within {_FLUSH_S:.0f} s")

    def publisher_into(self, run: Bucket) -> Publisher:
        return Publisher(
            run,
            adapter_spec(self._config, self._trainer),
            self._incarnation,
            window=self._config.window,
            canary_tokens=self.tokens,
            to_host=jax.device_get,
        )

    def submit(self, publisher: Publisher, version: int) -> float:
        """Hands a version over as the training loop does; returns the seconds that this held the caller."""
        adapter = self._adapters[version]
        started = time.monotonic()
        publisher.submit(version, version, *adapter)
        held = time.monotonic() - started
        if publisher is self.publisher:
            self._published = version
        return held

    def files(self, version: int) -> dict[str, bytes]:
        """A version as a PEFT directory."""
        lora = self._trainer.lora
        return adapter_files(
            jax.device_get(self._adapters[version][0]),
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
            base_model=self._config.model.source,
        )

    def finish(self) -> None:
        """Marks the run finished, so that the other roles leave."""
        if self.publisher is not None:
            self.publisher.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._write_record("finished")

    def _with_canary(self, tree: Any) -> tuple[Any, np.ndarray]:
        form = self._trainer.published_form(tree)
        return form, self._engine.canary(form, self.tokens)

    def _write_record(self, status: str) -> None:
        self._record.write(
            {
                "run": self._config.run,
                "config": self._config.model_dump(mode="json"),
                "versions": versions(),
                "base": {"source": self._config.model.source, "digest": self._trainer.base_digest},
                "created_at": time.time(),
                "error": None,
                "status": status,
            }
        )

    def _state(self) -> dict[str, Any]:
        return {
            "run": self._config.run,
            "step": self._published,
            "version": self._published,
            "total_steps": self._config.steps,
            "phase": "training",
            "drops": [],
        }


def _changed(key: jax.Array, tree: Any) -> Any:
    """The adapter with a little noise on each B."""
    leaves, structure = jax.tree.flatten_with_path(tree)
    changed = []
    for i, (path, leaf) in enumerate(leaves):
        is_b = path[-1].key == "b"
        noise = _CHANGE * jax.random.normal(jax.random.fold_in(key, i), leaf.shape) if is_b else 0.0
        changed.append(leaf + noise)
    return jax.tree.unflatten(structure, changed)
