"""Packing: samples into rows of a fixed length, and rows into micro-batches.

A branch is the last prompt token followed by all completion tokens but the last: each of its positions predicts one
completion token, so a branch of L positions trains L tokens. With shared prompts a group lies behind one copy of
`prompt[:-1]` (prompt id of its own, branch id 0) and each of its samples is a branch; without, every
sample has a prompt of its own. Packing only places tokens: which are trained, and with which weight, is decided
before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PADDING_ID = 0  # prompt id of padding; prompts count from 1


@dataclass(frozen=True)
class TrainSample:
    """One sample to train on: its group, its tokens and what the objective needs of them."""

    group: int
    sample: int
    prompt: np.ndarray  # int32 [P]
    completion: np.ndarray  # int32 [L], L ≥ 1
    sampler_logprobs: np.ndarray  # float32 [L]
    advantage: float
    token_weight: float


@dataclass(frozen=True)
class MicroBatch:
    """Rows of T tokens and their N = R·T prediction slots, of which the first `count` are used."""

    tokens_RxT: np.ndarray  # int32
    positions_RxT: np.ndarray  # int32, position in the sample's own sequence
    prompt_ids_RxT: np.ndarray  # int32, 0 = padding
    branch_ids_RxT: np.ndarray  # int32, 0 = the shared prompt
    slot_N: np.ndarray  # int32, index into the flattened R×T hidden states
    target_N: np.ndarray  # int32, the token predicted there
    sampler_logprob_N: np.ndarray  # float
    advantage_N: np.ndarray  # float
    weight_N: np.ndarray  # float, 0 where unused
    mask_N: np.ndarray  # bool
    sample_N: np.ndarray  # int32, index into the list that was packed; −1 where unused

    @property
    def count(self) -> int:
        return int(self.mask_N.sum())


class PackingError(ValueError):
    """A sample does not fit into a row."""


def pack(
    samples: Sequence[TrainSample], *, row_tokens: int, rows: int, share_prompt: bool, dtype: type = np.float32
) -> list[MicroBatch]:
    """Packs samples into micro-batches of `rows` rows, first-fit with the longest first; ties keep their order.

    Samples of a group that do not fit into one row together are split over several, the prompt repeated.
    """
    blocks = _blocks(samples, row_tokens, share_prompt)
    placed: list[list[_Block]] = []
    free: list[int] = []
    for block in sorted(blocks, key=lambda b: -b.length):
        for row, space in enumerate(free):
            if block.length <= space:
                placed[row].append(block)
                free[row] -= block.length
                break
        else:
            placed.append([block])
            free.append(row_tokens - block.length)
    return [_micro_batch(samples, placed[i : i + rows], rows, row_tokens, dtype) for i in range(0, len(placed), rows)]


@dataclass(frozen=True)
class _Block:
    """A prompt (without its last token) and the branches that share it."""

    members: tuple[int, ...]
    length: int


def _blocks(samples: Sequence[TrainSample], row_tokens: int, share_prompt: bool) -> list[_Block]:
    blocks: list[_Block] = []
    open_blocks: dict[int, _Block] = {}
    for i, sample in enumerate(samples):
        stem, branch = len(sample.prompt) - 1, len(sample.completion)
        if stem + branch > row_tokens:
            raise PackingError(f"a sample of {stem + branch} tokens does not fit into a row of {row_tokens}")
        block = open_blocks.get(sample.group) if share_prompt else None
        if block is not None and block.length + branch <= row_tokens:
            open_blocks[sample.group] = _Block((*block.members, i), block.length + branch)
            continue
        if block is not None:
            blocks.append(block)
        open_blocks[sample.group if share_prompt else i] = _Block((i,), stem + branch)
    return blocks + list(open_blocks.values())


def _micro_batch(
    samples: Sequence[TrainSample], placed: list[list[_Block]], rows: int, row_tokens: int, dtype: type
) -> MicroBatch:
    shape, slots = (rows, row_tokens), rows * row_tokens
    tokens, positions, prompt_ids, branch_ids = (np.zeros(shape, np.int32) for _ in range(4))
    slot, target, owner = np.zeros(slots, np.int32), np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
    values: np.ndarray = np.zeros((3, slots), dtype)
    sampler, advantage, weight = values
    used = 0
    for row, blocks in enumerate(placed):
        at = 0
        for prompt_id, block in enumerate(blocks, start=1):
            prompt = samples[block.members[0]].prompt
            stem = len(prompt) - 1
            here = slice(at, at + stem)
            tokens[row, here], positions[row, here], prompt_ids[row, here] = prompt[:-1], np.arange(stem), prompt_id
            at += stem
            for branch_id, i in enumerate(block.members, start=1):
                sample = samples[i]
                length = len(sample.completion)
                here, there = slice(at, at + length), slice(used, used + length)
                tokens[row, here] = np.concatenate([prompt[-1:], sample.completion[:-1]])
                positions[row, here] = np.arange(stem, stem + length)
                prompt_ids[row, here], branch_ids[row, here] = prompt_id, branch_id
                slot[there], target[there], owner[there] = np.arange(at, at + length), sample.completion, i
                slot[there] += row * row_tokens
                sampler[there], advantage[there] = sample.sampler_logprobs, sample.advantage
                weight[there] = sample.token_weight
                at, used = at + length, used + length
    return MicroBatch(
        tokens, positions, prompt_ids, branch_ids, slot, target, sampler, advantage, weight, owner >= 0, owner
    )
