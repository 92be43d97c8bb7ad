"""Ways to serve a wrong policy without any error, each as the mistake of one adapter or of an exporter as a whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load, save

from grpo_jax.storage import layout
from tests.generator.served import Served
from tests.generator.stand_in import StandIn

KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

Tensors = dict[str, np.ndarray]


def edited(files: dict[str, bytes], edit: Callable[[Tensors], Tensors]) -> dict[str, bytes]:
    tensors = {key: np.ascontiguousarray(value) for key, value in edit(load(files[layout.ADAPTER_WEIGHTS])).items()}
    return {**files, layout.ADAPTER_WEIGHTS: save(tensors)}


def renamed(tensors: Tensors) -> Tensors:
    return {key.replace("base_model.model.", "base_model."): value for key, value in tensors.items()}


def transposed(tensors: Tensors) -> Tensors:
    return {**tensors, KEY: tensors[KEY].T}


def garbled(tensors: Tensors) -> Tensors:
    """What a transposition comes to where the shape is right all the same."""
    return {key: x.T.ravel().reshape(x.shape) if "lora_A" in key else x for key, x in tensors.items()}


def doubled(tensors: Tensors) -> Tensors:
    """The scale of 2 is in B already."""
    return {key: 2 * x if "lora_B" in key else x for key, x in tensors.items()}


@contextmanager
def other_base(learner: StandIn) -> Iterator[None]:
    """The learner computes on another base, and says that it is the same."""
    right = learner.base
    learner.base = jax.tree.map(lambda x: x * 1.2, right)
    yield
    learner.base = right


@dataclass(frozen=True)
class Fault:
    publish: Callable[[Served, Any], str]
    """Publishes a tree as the next version, wrongly."""
    reason: str


def _files(edit: Callable[[Tensors], Tensors]) -> Callable[[Served, Any], str]:
    return lambda served, tree: served.next(tree, files=edited(served.learner.files(tree), edit))


def _of_another_base(served: Served, tree: Any) -> str:
    with other_base(served.learner):
        return served.next(tree)


def _previous(served: Served) -> dict[str, bytes]:
    return served.learner.files(served.learner.version(501))


FAULTS = {
    "wrong key prefix": Fault(_files(renamed), "has the key"),
    "transposed factor": Fault(_files(transposed), f"{KEY} is F32"),
    "garbled factors": Fault(_files(garbled), "differ from the learner's"),
    "wrong alpha": Fault(
        lambda served, tree: served.next(tree, files=served.learner.files(tree, alpha=16.0)), "has lora_alpha 16.0"
    ),
    "scale applied twice": Fault(_files(doubled), "differ from the learner's"),
    "previous weights under the new digest": Fault(
        lambda served, tree: served.next(tree, files=_previous(served), name_of=served.learner.files(tree)),
        "digest in its name",
    ),
    "previous weights under their own digest": Fault(
        lambda served, tree: served.next(tree, files=_previous(served)), "differ from the learner's"
    ),
    "another base by its digest": Fault(
        lambda served, tree: served.next(tree, manifest={"base_digest": "0" * 64}), "base_digest"
    ),
    "another base by its numbers": Fault(_of_another_base, "differ from the learner's"),
}

MISTAKES: dict[str, Callable[[StandIn, Any], dict[str, bytes]] | None] = {
    "wrong key prefix": lambda learner, tree: edited(learner.files(tree), renamed),
    "garbled factors": lambda learner, tree: edited(learner.files(tree), garbled),
    "wrong alpha": lambda learner, tree: learner.files(tree, alpha=16.0),
    "another base": None,
}
"""Of an exporter, in the probe and the policies alike, so that they are of one make; None: see `other_base`."""
