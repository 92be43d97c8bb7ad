"""Which groups the learner has dropped, as its state says it: short enough for a run that drops half of all it draws.

`dropped` holds for each reason lists [epoch, attempt, gaps]: the first data index, then the distance of each to the
next, a few bytes a group. A list of (id, reason), as `drops`, is what learners wrote before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

from grpo_jax.rollouts.sample import GroupId


def dropped_body(drops: Mapping[str, str]) -> dict[str, list[Any]]:
    """Args: `drops`: group id → reason."""
    indices: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for text, reason in drops.items():
        group = GroupId.parse(text)
        indices[reason][group.epoch, group.attempt].append(group.index)
    return {
        reason: [[*which, _gaps(sorted(found))] for which, found in sorted(groups.items())]
        for reason, groups in sorted(indices.items())
    }


def dropped_in(state: Mapping[str, Any] | None) -> Iterator[tuple[GroupId, str]]:
    """(group, reason) of all that a learner's state names; what is no group's name is passed over."""
    for text, reason in (state or {}).get("drops") or ():
        try:
            yield GroupId.parse(text), str(reason)
        except ValueError:  # a learner of another make; none of our groups is called so
            continue
    for reason, groups in ((state or {}).get("dropped") or {}).items():
        for epoch, attempt, gaps in groups:
            for index in accumulate(gaps):
                yield GroupId(epoch, index, attempt), reason


def count_dropped(state: Mapping[str, Any] | None) -> Counter[str]:
    """Reason → how many groups."""
    counts = Counter(str(reason) for _, reason in (state or {}).get("drops") or ())
    for reason, groups in ((state or {}).get("dropped") or {}).items():
        counts[reason] += sum(len(gaps) for _, _, gaps in groups)
    return counts


def _gaps(ordered: list[int]) -> list[int]:
    return ordered[:1] + [later - earlier for earlier, later in pairwise(ordered)]
