"""The ledger: which groups a batch may take, which will never be trained, and why. Pure bookkeeping, no I/O."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from grpo_jax.learner.batch import trainable
from grpo_jax.rollouts.sample import Group, GroupId
from grpo_jax.storage.layout import ZERO_VARIANCE


@dataclass
class Ledger:
    """Groups on offer, trained and dropped.

    A group is consumed oldest start first. It is dropped, whole, when it is `stale` (more than `max_staleness`
    versions old when a batch is formed), `foreign` (its policy is not the one that this run has under that version: a
    lineage that a resume gave up), `invalid` (fewer than two samples to train on, or refused at the door) or
    `zero_variance` (its rewards are all equal, and another group takes its place).

    `exactly`: a batch takes only groups that are `max_staleness` versions old, the first ones only groups of v0.
    """

    max_staleness: int
    exactly: bool = False
    trained: set[str] = field(default_factory=set)
    drops: dict[str, str] = field(default_factory=dict)
    _offered: dict[str, Group] = field(default_factory=dict)
    _replaced: int = 0  # since the last batch was taken

    @property
    def offered_versions(self) -> set[int]:
        """The versions that sampled what is on offer."""
        return {group.version for group in self._offered.values()}

    def offer(self, groups: Iterable[Group]) -> None:
        for group in groups:
            key = str(group.id)
            if key in self.trained or key in self.drops:
                continue
            if trainable(group).sum() < 2:
                self.drops[key] = "invalid"
            else:
                self._offered[key] = group

    def reject(self, group_ids: Iterable[str]) -> None:
        """Drops groups whose files are not good, so that the worker draws them again; not what is no group's name."""
        for key in group_ids:
            if key not in self.trained and _is_group_id(key):
                self.drops.setdefault(key, "invalid")

    def sweep(self, version: int, lineage: Mapping[int, str], newest: int | None = None) -> None:
        """Drops what can no longer be trained by a learner at `version`.

        Groups of later versions are of a life before a resume, and judged once the replay has come so far; it comes to
        the version `newest`, if that is given, and there will never be a policy that those above it name.
        """
        for key, group in list(self._offered.items()):
            if group.version > version:
                if newest is None or group.version <= newest:
                    continue
                self.drops[key] = "foreign"
            elif lineage.get(group.version) != group.provenance.policy:
                self.drops[key] = "foreign"
            elif version - group.version > self.max_staleness:
                self.drops[key] = "stale"
            else:
                continue
            del self._offered[key]

    def ready(self, version: int) -> int:
        """How many groups a batch at `version` could take now."""
        return sum(self._is_ready(group, version) for group in self._offered.values())

    def take(
        self,
        count: int,
        version: int,
        *,
        is_replaced: Callable[[Group], bool] | None = None,
        max_candidates: int = 0,
    ) -> list[Group] | None:
        """The `count` oldest groups, now trained; None (and nothing taken) if there are fewer.

        Args:
          is_replaced: says which groups are dropped, so that others take their place.
          max_candidates: groups that a batch looks at before it takes what is left of them, fewer than `count` or none.
        """
        candidates = [group for group in self._offered.values() if self._is_ready(group, version)]
        candidates.sort(key=lambda g: (g.provenance.started_at, g.id))
        kept: list[Group] = []
        for group in candidates:
            if len(kept) == count or (is_replaced and self._replaced + len(kept) == max_candidates):
                break
            if is_replaced and is_replaced(group):
                self.drops[str(group.id)] = ZERO_VARIANCE
                del self._offered[str(group.id)]
                self._replaced += 1
            else:
                kept.append(group)
        if len(kept) < count and not (is_replaced and self._replaced + len(kept) == max_candidates):
            return None
        self._replaced = 0
        return [self._train(str(group.id)) for group in kept]

    def take_recorded(self, ids: Iterable[str], drops: Mapping[str, str] | None = None) -> list[Group] | None:
        """The groups of a batch record, in its order, with what was dropped until then; None (and nothing taken) if
        some have not been read yet."""
        ids = list(ids)
        if any(key not in self._offered for key in ids):
            return None
        for key, reason in (drops or {}).items():
            self.drops[key] = reason
            self._offered.pop(key, None)
        return [self._train(key) for key in ids]

    def _is_ready(self, group: Group, version: int) -> bool:
        if self.exactly:
            return group.version == max(0, version - self.max_staleness)
        return group.version <= version

    def _train(self, key: str) -> Group:
        self.trained.add(key)
        return self._offered.pop(key)


def _is_group_id(text: str) -> bool:
    try:
        GroupId.parse(text)
    except ValueError:
        return False
    return True
