"""Three changes to vLLM's CPU backend: a LoRA layer with one pair of matrix products per adapter in a batch, blocks of
16 tokens, and an engine that is forked.

The stock layer gathers a copy of A and B for every token, in float32, and multiplies token by token; it also indexes
the slots with -1 for tokens without an adapter, so that those get the adapter of the last slot. Here the tokens of each
adapter are multiplied at once (a batch of one adapter needs no gathering), and tokens without one are left alone.

The attention kernel has a path for blocks of 16, but the backend declares multiples of 32 only. Prompts share whole
blocks: at 26 tokens, blocks of 32 share nothing and every sample of a group computes its prompt again.

The engine is a child of the API server, and the backend has it spawned: it imports again what the server has just
imported, which is a third of a start. Forked, as vLLM does it by default elsewhere, it has all of it. What a fork does
not survive, a team of OpenMP threads, the API server does not have at that time: it computes nothing.

This depends on vLLM's internals, so it is installed only into versions it was tested with. Imported only inside vLLM's
processes.
"""

import logging
import os
from typing import Any

import vllm
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

log = logging.getLogger("vllm.grpo_jax")

TESTED_VERSIONS = frozenset({"0.32.0"})


class GroupedPunicaWrapperCPU(PunicaWrapperCPU):
    """Stock metadata, grouped by slot once per batch; `add_lora_linear` of every layer then reuses the groups."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # (slot, rows of the batch that use it); None stands for all rows.
        self._groups: list[tuple[int, Any]] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        slot_of_row = self.token_lora_indices
        slots = slot_of_row.unique().tolist()
        alone = len(slots) == 1
        self._groups = [(s, None if alone else (slot_of_row == s).nonzero()[:, 0]) for s in slots if s >= 0]

    def add_lora_linear(
        self,
        y: Any,
        x: Any,
        lora_a_stacked: tuple[Any, ...],
        lora_b_stacked: tuple[Any, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """y[:, slice] += scale · (x Aᵀ) Bᵀ for each slice of a fused layer, in place.

        Shapes: y (rows, out), x (rows, in); per slice A (slots, 1, rank, in) and B (slots, 1, slice, rank).
        """
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            own = x if rows is None else x.index_select(0, rows)
            start = 0
            for a_stacked, b_stacked, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                update = own.mm(a_stacked[slot, 0].t()).mm(b_stacked[slot, 0].t())
                target = y[:, start : start + width]
                if rows is None:
                    target.add_(update, alpha=scale)
                else:
                    target.index_add_(0, rows, update, alpha=scale)
                start += width


def install() -> bool:
    """Makes all of them; returns whether it did. An untested version keeps its own ways, and warns."""
    if vllm.__version__ not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s keeps its own LoRA layer, block sizes and way to start its engine: ours are tested with %s",
            vllm.__version__,
            set(TESTED_VERSIONS),
        )
        return False
    name = f"{__name__}.{GroupedPunicaWrapperCPU.__name__}"
    platform: Any = CpuPlatform
    platform.get_punica_wrapper = classmethod(lambda cls: name)
    attention: Any = CPUAttentionBackend
    attention.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    configure = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        configure(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # it has just been set to spawn

    platform.check_and_update_config = classmethod(check_and_update_config)
    return True
