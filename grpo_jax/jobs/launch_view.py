"""What the records of a run say about it, for the launcher and for `status`."""

from grpo_jax.jobs.launch_fleet import RunView
from grpo_jax.observability.metrics import read_metrics
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, BucketError
from grpo_jax.storage.records import Record, RecordReader

_AVERAGED_AT_START, _AVERAGED = 3, 5


class RunRecords:
    def __init__(self, run: Bucket):
        self._run, self._learner = RecordReader(run, layout.RUN), RecordReader(run, layout.LEARNER_STATE)

    def view(self) -> RunView:
        run, learner = self._run.read() or {}, self._learner.read() or {}
        return RunView(run.get("status"), learner.get("step", 0), run.get("error"))


def rewards(run: Bucket) -> tuple[int, float | None, float | None]:
    """Steps with metrics, and the mean training reward of the first three and of the last five."""
    metrics = read_metrics(run)
    found = [record["reward"] for record in metrics if "reward" in record]
    first, last = found[:_AVERAGED_AT_START], found[-_AVERAGED:]
    return len(metrics), (sum(first) / len(first) if first else None), (sum(last) / len(last) if last else None)


def summary(run: Bucket, total_steps: int) -> str:
    try:
        steps, first, last = rewards(run)
    except BucketError as error:
        return str(error)
    text = f"{steps} of {total_steps} steps"
    return text if first is None or last is None else f"{text}, training reward {first:.2f} → {last:.2f}"


def replicas(bucket: Bucket, fleet: str) -> list[Record]:
    """The last word of each replica of a fleet."""
    found = [RecordReader(bucket, key).read() for key in bucket.list(layout.replicas(fleet))]
    return [record for record in found if record is not None]
