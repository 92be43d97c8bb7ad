"""The progress of `grpo-jax run`: a few lines that stay in place on a terminal, one line per step anywhere else."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_jax.observability.format import clock
from grpo_jax.observability.metrics import Metrics
from grpo_jax.observability.rundata import run_name
from grpo_jax.observability.snapshot import Observer, Snapshot
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.dropped import count_dropped

log = logging.getLogger(__name__)

_RECORDS_EVERY_S = 1.0  # their writers are no faster


class RunProgress:
    """Use as a context manager and call `update` about four times a second; it never raises for what it reads, nor for
    what it cannot show.

    Enter it before the roles are started: what an earlier life has left in the bucket is then not mistaken for theirs.
    """

    def __init__(
        self, bucket: Bucket, run_dir: Path, total_steps: int, fleet: str | None = None, console: Console | None = None
    ):
        """`bucket` is the run's prefix; `fleet` defaults to the run's name."""
        self._name = run_name(bucket)
        self._source = (bucket, run_dir, total_steps, fleet or self._name)
        self._console = console or Console()
        self._live: Live | None = None
        self._said: list[str] = []
        self._lost = False
        self._records_at = float("-inf")

    def __enter__(self) -> "RunProgress":
        self._observer = Observer(*self._source)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            with self._unless_lost():
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records_at = float("-inf")  # the last look is a full one
        self.update()
        if self._live is not None:
            with self._unless_lost():
                self._live.stop()

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """A disk that is full or a terminal that is gone is no reason to end a run."""
        try:
            yield
        except OSError as error:
            if not self._lost:
                log.warning("the progress cannot be shown: %s", error)
            self._lost = True
        else:
            self._lost = False

    def update(self, stuck: Sequence[str] = ()) -> None:
        """`stuck`: who waits for whom where the run does not get on; for a terminal, others find it in the log."""
        now = time.monotonic()
        records = now - self._records_at >= _RECORDS_EVERY_S
        if records:
            self._records_at = now
        snapshot = self._observer.snapshot(records)
        with self._unless_lost():
            self._show(snapshot, stuck)

    def _show(self, snapshot: Snapshot, stuck: Sequence[str]) -> None:
        if self._live is not None:
            self._live.update(panel(self._name, snapshot, stuck), refresh=True)
            return
        for record in snapshot.news:
            self._console.print(step_line(record, snapshot), highlight=False, markup=False, soft_wrap=True)
        # Between steps a log file is told only what changes.
        said = [*snapshot.waits(), *snapshot.quarantined(self._name)]
        for line in said:
            if line not in self._said:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._said = said


def step_line(record: Metrics, snapshot: Snapshot) -> str:
    """`step 12/25  reward 0.83  staleness 1.0  251 tok/s  9.1 s/step  eta 2:01`; what was not recorded is left out."""
    step = record["step"] + 1
    parts = [f"step {step:>{len(str(snapshot.total_steps))}}/{snapshot.total_steps}", *_facts(record)]
    left = snapshot.seconds_left(step)
    if left is not None:
        parts.append(f"eta {clock(left)}")
    return "  ".join(parts)


def panel(name: str, snapshot: Snapshot, stuck: Sequence[str] = ()) -> RenderableType:
    """Two to four lines, and more where something is wrong: where the run is, its last numbers, who waits for what."""
    head = Table.grid(padding=(0, 2), expand=False)
    bar = ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=32)
    left = snapshot.seconds_left(snapshot.step)
    head.add_row(
        Text(name, style="bold"),
        Text(snapshot.phase()),
        Text(f"step {snapshot.step}/{snapshot.total_steps}"),
        bar,
        Text("" if left is None or snapshot.phase() in ("draining", "done") else f"eta {clock(left)}", style="dim"),
    )
    lines: list[RenderableType] = [head]
    if snapshot.recent:
        facts = _facts(snapshot.recent[-1])
        mean = snapshot.mean("reward")
        if mean is not None and len(snapshot.recent) > 1:
            facts.insert(1, f"(mean of {len(snapshot.recent)}: {mean:.2f})")
        lines.append(Text("  ".join(facts)))
    waits = snapshot.waits() or _roles(snapshot)
    lines.append(Text(" · ".join(waits), style="dim", overflow="ellipsis", no_wrap=True))
    wrong = [*stuck, *snapshot.quarantined(name)]
    lines += [Text(line, style="yellow", overflow="ellipsis", no_wrap=True) for line in wrong]
    return Group(*lines)


def _facts(record: Metrics) -> list[str]:
    known = [
        ("reward", "reward {:.2f}"),
        ("sample/staleness_mean", "staleness {:.1f}"),
        ("rollout/generated_tok_s", "{:.0f} tok/s"),
        ("perf/step_s", "{:.1f} s/step"),
    ]
    return [text.format(record[key]) for key, text in known if key in record]


def _roles(snapshot: Snapshot) -> list[str]:
    """Who is at work while nobody waits."""
    ready = sum(r.get("state") == "ready" for r in snapshot.replicas.values())
    inflight = sum(w.get("inflight_samples", 0) for w in snapshot.workers.values())
    parts = [f"{ready}/{len(snapshot.replicas)} replicas ready"] if snapshot.replicas else []
    parts += [f"{inflight} samples in flight"] if snapshot.workers else []
    dropped = count_dropped(snapshot.learner).total()
    return [*parts, f"{dropped} dropped"] if dropped else parts
