"""What the run has done so far, by its batch records: those found at the start and those written since."""

from collections import Counter
from collections.abc import Iterable, Mapping

from grpo_jax.storage.batches import BatchRecord


class History:
    """Steps and what became of groups. The main thread writes it; `settled_before` may be called from another one."""

    def __init__(self, records: Mapping[int, BatchRecord] | None = None):
        self._records: dict[int, BatchRecord] = {}
        self._settled: dict[str, int] = {}  # group id → the step whose record first names it, as trained or dropped
        self._files: dict[str, tuple[str, int]] = {}
        self._dropped: dict[int, Counter[str]] = {}
        for _, record in sorted((records or {}).items()):
            self.add(record)

    def add(self, record: BatchRecord) -> None:
        """The record of the next step. What was recorded of it and of later ones is given up."""
        step = record["step"]
        given_up = [t for t in self._records if t >= step]
        if given_up:
            for t in given_up:
                del self._records[t]
                del self._dropped[t]
            for key in [key for key, t in self._settled.items() if t >= step]:
                del self._settled[key]
        before = self._dropped[max(self._dropped)] if self._dropped else Counter()
        self._dropped[step] = before + Counter(self.unrecorded(record["drops"]).values())
        self._records[step] = record
        self._files.update(zip(record["groups"], map(tuple, record["files"]), strict=False))
        for key in (*record["groups"], *record["drops"]):
            self._settled.setdefault(key, step)

    def record(self, step: int) -> BatchRecord | None:
        return self._records.get(step)

    @property
    def steps(self) -> int:
        """How many steps have been begun: one more than the last that is on record."""
        return max(self._records, default=-1) + 1

    @property
    def files(self) -> dict[str, str]:
        """Group id → key of its file, of the groups that were trained, as far as that is on record."""
        return {group: key for group, (key, _) in self._files.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Key → bytes, of the same files."""
        return dict(self._files.values())

    @property
    def groups(self) -> set[str]:
        """The ids of all groups that any record trains."""
        return {group for record in self._records.values() for group in record["groups"]}

    def trained_before(self, step: int) -> set[str]:
        return {group for t, record in self._records.items() if t < step for group in record["groups"]}

    def drops_before(self, step: int) -> dict[str, str]:
        """What was dropped when the last step before `step` began."""
        records = [record for t, record in sorted(self._records.items()) if t < step]
        return {group: reason for record in records for group, reason in record["drops"].items()}

    def dropped(self, step: int) -> Counter[str]:
        """Reason → groups that were dropped when `step`, which is on record, began."""
        return self._dropped[step]

    def unrecorded(self, drops: Mapping[str, str]) -> dict[str, str]:
        """Those of which no record says anything: each record has only what it adds. (Earlier ones had all.)"""
        return {group: reason for group, reason in drops.items() if group not in self._settled}

    def settled_before(self, step: int) -> dict[str, int]:
        """Groups that no step from `step` on can ask for → the step that trained or dropped them; the oldest first."""
        settled: Iterable[tuple[str, int]] = list(self._settled.items())
        return {key: t for key, t in sorted(settled, key=lambda item: (item[1], item[0])) if t < step}
