"""One device or eight, one process or two: the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax.errors import UsageError
from grpo_jax.generator.process import free_port
from grpo_jax.learner.sharding import check_divisible, make_mesh, param_shardings, spec
from tests.learner.tiny import MODEL

ONE = [1, 1, 1]
MESHES = [[8, 1, 1], [1, 8, 1], [2, 2, 2]]


def start(sizes, devices, **environ):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.learner.on_devices", *map(json.dumps, sizes)],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(process, timeout=400):
    try:
        out, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, error[-3000:]
    found = [line for line in out.splitlines() if line.startswith("RESULTS ")]
    return json.loads(found[0].partition(" ")[2]) if found else None


@pytest.fixture(scope="module")
def on_one_and_on_eight_devices():
    return results(start([ONE, *MESHES], devices=8))


def assert_same(found, expected, tolerance=1e-9):
    for name, values in expected.items():
        scale = np.linalg.norm(values)
        assert scale > 0, name
        assert np.linalg.norm(np.subtract(found[name], values)) <= tolerance * scale, name


@pytest.mark.parametrize("index", range(len(MESHES)), ids=[" x ".join(map(str, mesh)) for mesh in MESHES])
def test_a_step_is_the_same_on_one_device_and_on_a_mesh(on_one_and_on_eight_devices, index):
    one, *many = on_one_and_on_eight_devices
    assert_same(many[index], one)


@pytest.mark.slow
@pytest.mark.parametrize("size", [[4, 1, 1], [1, 2, 2]])
def test_a_step_is_the_same_in_one_process_and_in_two(on_one_and_on_eight_devices, size):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    pair = [
        start([size], devices=2, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        for index in range(2)
    ]
    try:
        (leader,) = results(pair[0])
        assert results(pair[1]) is None
    finally:
        for process in pair:
            process.kill()
    assert_same(leader, on_one_and_on_eight_devices[0])


def test_what_a_mesh_cannot_shard_is_refused_by_name():
    with pytest.raises(
        UsageError, match=r"learner\.mesh\.tensor: 4 does not divide the model's num_key_value_heads, 2"
    ):
        check_divisible({"data": 1, "fsdp": 1, "tensor": 4}, MODEL)
    with pytest.raises(UsageError, match=r"learner\.mesh\.fsdp: 5 does not divide the model's hidden_size, 32"):
        check_divisible({"data": 1, "fsdp": 5, "tensor": 1}, MODEL)
    with pytest.raises(UsageError, match="data 3 x fsdp 2 x tensor 1 does not make up the 1 devices"):
        make_mesh(3, 2, 1, devices=jax.devices()[:1])


def test_no_array_is_sharded_twice_over_one_axis():
    with pytest.raises(ValueError, match="twice"):
        spec(("rows", "hidden"))
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    assert jax.tree.leaves(param_shardings(mesh, MODEL))  # builds the partition of every array of a model
