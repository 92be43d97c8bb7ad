"""What vLLM's processes get from us: the entry point `grpo_jax` of its group `vllm.general_plugins`.

Where this package is installed, vLLM calls `register` in each of its processes; `launch_vllm` calls it in any case, so
that a package which only lies on PYTHONPATH works too. It acts on two environment variables that an agent sets for its
own server: in any other vLLM it does nothing. Imports vLLM only then.
"""

import os
from functools import cache
from pathlib import Path

from grpo_jax.generator.index import found

CPU_LORA = "GRPO_JAX_CPU_LORA"
"""Environment variable: "1" exchanges the LoRA layer of vLLM's CPU backend (see `cpu_lora`)."""

ADAPTERS = "GRPO_JAX_ADAPTERS"
"""Environment variable: the agent's adapters folder, whose indexes say what may be registered at a request."""


@cache
def register() -> None:
    """Does its work once in a process, however often it is called."""
    if os.environ.get(CPU_LORA) == "1":
        from grpo_jax.generator import cpu_lora

        cpu_lora.install()
    if folder := os.environ.get(ADAPTERS):
        _register_resolver(Path(folder))


def _register_resolver(folder: Path) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    class ProvedPolicies(LoRAResolver):
        """Registers again what the agent has proved and vLLM has dropped; asked at a request for an unknown name.

        vLLM holds the name's lock meanwhile, as it does for an unloading. The agent takes a name out of the index
        before it unloads it, so an unloaded name does not come back by a request that was under way.
        """

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            path = found(folder, lora_name)
            if path is None:
                return None
            # vLLM gives the request an id of its own, and its prefix cache knows an adapter by name and path: these
            # are those of a load by the agent.
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=path)

    LoRAResolverRegistry.register_resolver("grpo_jax", ProvedPolicies())
