"""What `check` says of a device's memory, against arrays that exist and bytes that were counted by hand."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.learner.estimate import memory_estimate
from grpo_jax.learner.optimizer import build_optimizer
from grpo_jax.learner.setup import lora_config
from grpo_jax.models.decoder import init_params
from grpo_jax.models.lora import init_lora
from grpo_jax.models.quantize import quantize_params
from tests.learner.tiny import MODEL

REPO = Path(__file__).parents[2]
ROWS, TOKENS = 2, 64
# Of a device: tokens, positions, two ids, slot, target, the sampler's log-probability, advantage and weight, and a mask
# of bytes. Staleness, segments and what is recomputed are not read by the default objective.
BATCH = ROWS * TOKENS * (9 * 4 + 1)


def config(mesh=(1, 1, 1), dtype="float32", algorithm=None, **learner):
    data, fsdp, tensor = mesh
    return Config.model_validate(
        {
            "run": "tiny",
            "model": {"source": "none", "dtype": dtype},
            "lora": {"rank": 8},
            "task": {"source": "a:b"},
            "rewards": [{"source": "a:b"}],
            "algorithm": algorithm or {},
            "batch": {"row_tokens": TOKENS, "rows_per_micro_batch": ROWS},
            "learner": {"mesh": {"data": data, "fsdp": fsdp, "tensor": tensor}, **learner},
        }
    )


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def compiled():
    return memory_estimate(config(), MODEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_a_device_holds_what_the_arrays_of_a_run_would_have(dtype, scheme):
    wanted = config(dtype=dtype, quantization=scheme)
    found = memory_estimate(wanted, MODEL, compile=False)
    base = init_params(jax.random.key(0), MODEL, jnp.dtype(dtype))
    adapter = init_lora(jax.random.key(0), MODEL, lora_config(wanted))
    assert found.base == nbytes(base if scheme == "none" else quantize_params(base, scheme))
    assert found.adapter == nbytes(adapter)
    assert found.optimizer == nbytes(build_optimizer(wanted.optimizer).init(adapter))
    assert found.peak is None


def test_the_compiler_counts_the_arguments_that_were_counted_by_hand(compiled):
    sums = compiled.adapter + 3 * 4
    assert compiled.accumulate.arguments == compiled.base + compiled.adapter + sums + BATCH
    assert compiled.accumulate.aliased == sums


def test_the_peak_holds_base_adapter_moments_gradient_and_temporaries(compiled):
    resident = compiled.base + 2 * compiled.adapter + compiled.optimizer
    assert compiled.accumulate.temporary > 0
    assert compiled.peak >= resident + compiled.accumulate.temporary
    assert f"{compiled.peak / 1e6:.2f} MB a device" in dict(compiled.rows())["compiled step"]


def test_fsdp_halves_the_base_of_a_device_but_for_the_norms():
    program = (
        "import dataclasses, json\n"
        "from grpo_jax.learner.estimate import force_host_devices, memory_estimate\n"
        "from tests.learner.test_estimate import MODEL, config\n"
        "force_host_devices(config((1, 2, 1)).learner.mesh)\n"
        "found = [memory_estimate(config((1, n, 1)), MODEL, compile=n == 2) for n in (1, 2)]\n"
        "print(json.dumps([dataclasses.asdict(x) for x in found]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = json.loads(done.stdout.splitlines()[-1])
    norms = 4 * (MODEL.hidden_size + MODEL.num_layers * 2 * (MODEL.hidden_size + MODEL.head_dim))
    assert two["base"] - norms == (one["base"] - norms) / 2
    assert two["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1}
    assert two["accumulate"]["arguments"] == two["base"] + 2 * two["adapter"] + 3 * 4 + BATCH


def test_a_kernel_of_another_platform_is_asked_and_replaced_and_that_is_said():
    found = memory_estimate(config(), MODEL, compile=False)
    assert (found.platform, found.attention, found.share_prompt) == ("cpu", "xla", True)
    # Heads of 12 and rows of 64 are not what the kernel takes.
    with pytest.raises(UsageError, match=r"learner\.attention: attention 'flash' cannot be used here: it takes heads"):
        memory_estimate(config(attention="flash"), MODEL, compile=False)


def test_what_does_not_fit_together_is_refused_by_name():
    with pytest.raises(UsageError, match=r"learner\.mesh"):
        memory_estimate(config((64, 1, 1)), MODEL, compile=False)
    with pytest.raises(UsageError, match=r"learner\.quantization: nf4 takes blocks of 64"):
        memory_estimate(config(quantization="nf4"), MODEL, compile=False)
    with pytest.raises(UsageError, match=r"algorithm\.loss: no_such_module:loss cannot be imported"):
        memory_estimate(config(algorithm={"loss": "no_such_module:loss"}), MODEL, compile=False)
