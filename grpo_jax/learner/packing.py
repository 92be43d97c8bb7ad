"""Packing: samples into rows of a fixed length, and rows into micro-batches.

A branch is the last prompt token followed by all completion tokens but the last: each of its positions predicts one
completion token, so a branch of L positions trains L tokens. With shared prompts the samples of a group lie behind one
copy of `prompt[:-1]` (prompt id of its own, branch id 0) and each of them is a branch; without, every sample has a
prompt of its own. Packing only places tokens: which are trained, and with which weight, is decided before.

A micro-batch has S shards of R rows; a row, and so every sample, lies on one shard whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    staleness: float = 0.0  # optimiser updates between the policy that sampled it and the start of the step


@dataclass(frozen=True)
class MicroBatch:
    """B = S·R rows of T tokens, and for each of the S shards N = R·T prediction slots, of which the first are used."""

    tokens_BxT: np.ndarray  # int32
    positions_BxT: np.ndarray  # int32, position in the sample's own sequence
    prompt_ids_BxT: np.ndarray  # int32, 0 = padding
    branch_ids_BxT: np.ndarray  # int32, 0 = the shared prompt
    slot_SxN: np.ndarray  # int32, index into the shard's flattened R×T hidden states
    target_SxN: np.ndarray  # int32, the token predicted there
    sampler_logprob_SxN: np.ndarray  # float
    advantage_SxN: np.ndarray  # float
    weight_SxN: np.ndarray  # float, 0 where unused
    staleness_SxN: np.ndarray  # float, see TrainSample
    mask_SxN: np.ndarray  # bool
    segment_SxN: np.ndarray  # int32, numbers this micro-batch's samples from 0; 0 where unused
    sample_SxN: np.ndarray  # int32, index into the list that was packed; −1 where unused
    old_logprob_SxN: np.ndarray  # float, log π_old where it was recomputed, else 0
    reference_logprob_SxN: np.ndarray  # float, log π_ref where a KL needs it, else 0

    @property
    def count(self) -> int:
        return int(self.mask_SxN.sum())


class PackingError(ValueError):
    """A sample does not fit into a row."""


def pack(
    samples: Sequence[TrainSample],
    *,
    row_tokens: int,
    rows: int,
    share_prompt: bool,
    shards: int = 1,
    dtype: type = np.float32,
) -> list[MicroBatch]:
    """Packs samples into micro-batches of `shards` × `rows` rows.

    First-fit, the longest first; ties keep their order. Groups that share a prompt stay whole if that takes no more
    rows than splitting them does; a split group repeats its prompt in each row that has some of it.
    """
    placed = _layout(samples, row_tokens, share_prompt)
    step = rows * shards
    return [
        _micro_batch(samples, placed[i : i + step], rows, shards, row_tokens, dtype)
        for i in range(0, len(placed), step)
    ]


@dataclass
class _Row:
    """Blocks of samples behind one copy of their prompt, by group (or by sample where nothing is shared)."""

    free: int
    blocks: dict[int, list[int]] = field(default_factory=dict)

    def cost(self, key: int, stem: int, branches: int) -> int:
        return branches + (0 if key in self.blocks else stem)

    def put(self, key: int, stem: int, branches: int, members: Iterable[int]) -> None:
        self.free -= self.cost(key, stem, branches)
        self.blocks.setdefault(key, []).extend(members)


def _layout(samples: Sequence[TrainSample], row_tokens: int, share_prompt: bool) -> list[_Row]:
    units: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        stem, branch = len(sample.prompt) - 1, len(sample.completion)
        if stem + branch > row_tokens:
            raise PackingError(f"a sample of {stem + branch} tokens does not fit into a row of {row_tokens}")
        units.setdefault(sample.group if share_prompt else i, []).append(i)
    whole = _first_fit(samples, units, row_tokens, keep_whole=True)
    split = _first_fit(samples, units, row_tokens, keep_whole=False) if share_prompt else whole
    return whole if len(whole) <= len(split) else split


def _first_fit(
    samples: Sequence[TrainSample], units: dict[int, list[int]], row_tokens: int, *, keep_whole: bool
) -> list[_Row]:
    def length(i: int) -> int:
        return len(samples[i].completion)

    rows: list[_Row] = []
    sized = {key: len(samples[members[0]].prompt) - 1 + sum(map(length, members)) for key, members in units.items()}
    for key in sorted(units, key=lambda key: -sized[key]):
        members, stem = units[key], len(samples[units[key][0]].prompt) - 1
        pieces = [members]
        if not keep_whole or sized[key] > row_tokens:
            pieces = [[i] for i in sorted(members, key=lambda i: -length(i))]
        for piece in pieces:
            branches = sum(map(length, piece))
            # Rows that hold the prompt already come first: there the piece costs its branches alone.
            holding = [row for row in rows if key in row.blocks and branches <= row.free]
            row = next(iter(holding), None) or next((r for r in rows if stem + branches <= r.free), None)
            if row is None:
                rows.append(row := _Row(row_tokens))
            row.put(key, stem, branches, piece)
    return rows


def _micro_batch(
    samples: Sequence[TrainSample], placed: list[_Row], rows: int, shards: int, row_tokens: int, dtype: type
) -> MicroBatch:
    shape, slots = (rows * shards, row_tokens), (shards, rows * row_tokens)
    tokens, positions, prompt_ids, branch_ids = (np.zeros(shape, np.int32) for _ in range(4))
    slot, target, segment, owner = (np.zeros(slots, np.int32) for _ in range(4))
    owner -= 1
    values: np.ndarray = np.zeros((6, *slots), dtype)
    sampler, advantage, weight, staleness, old, reference = values
    segments = 0
    for shard in range(shards):
        used = 0
        # Dealt out in turn, so that the shards of a last, partly filled micro-batch have equal work.
        for row, blocks in enumerate(r.blocks for r in placed[shard::shards]):
            at, line = 0, shard * rows + row
            for prompt_id, members in enumerate(blocks.values(), start=1):
                prompt = samples[members[0]].prompt
                stem = len(prompt) - 1
                here = slice(at, at + stem)
                tokens[line, here], positions[line, here] = prompt[:-1], np.arange(stem)
                prompt_ids[line, here] = prompt_id
                at += stem
                for branch_id, i in enumerate(members, start=1):
                    sample = samples[i]
                    length = len(sample.completion)
                    here, there = slice(at, at + length), slice(used, used + length)
                    tokens[line, here] = np.concatenate([prompt[-1:], sample.completion[:-1]])
                    positions[line, here] = np.arange(stem, stem + length)
                    prompt_ids[line, here], branch_ids[line, here] = prompt_id, branch_id
                    slot[shard, there] = np.arange(at, at + length) + row * row_tokens
                    target[shard, there], owner[shard, there], segment[shard, there] = sample.completion, i, segments
                    sampler[shard, there], advantage[shard, there] = sample.sampler_logprobs, sample.advantage
                    weight[shard, there], staleness[shard, there] = sample.token_weight, sample.staleness
                    at, used, segments = at + length, used + length, segments + 1
    return MicroBatch(
        tokens_BxT=tokens,
        positions_BxT=positions,
        prompt_ids_BxT=prompt_ids,
        branch_ids_BxT=branch_ids,
        slot_SxN=slot,
        target_SxN=target,
        sampler_logprob_SxN=sampler,
        advantage_SxN=advantage,
        weight_SxN=weight,
        staleness_SxN=staleness,
        mask_SxN=owner >= 0,
        segment_SxN=segment,
        sample_SxN=owner,
        old_logprob_SxN=old,
        reference_logprob_SxN=reference,
    )
