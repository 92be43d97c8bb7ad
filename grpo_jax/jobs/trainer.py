"""`grpo-jax trainer`: learner, proxy and worker as one job. Generators are jobs of their own and come by the bucket."""

import logging
import sys
import time
from collections import defaultdict
from pathlib import Path

from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_RESUMABLE
from grpo_jax.jobs.local import Supervisor, stop_on_signals
from grpo_jax.jobs.run import check_to_run, show_progress
from grpo_jax.observability.logs import mask_secrets
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader

log = logging.getLogger(__name__)

_POLL_S = 0.25


def run_trainer(config: Config, run_dir: Path) -> int:
    """Runs the three roles until the learner is done (0) or a signal comes (75). What it started has ended on return.

    Args:
      config: its bucket may be a directory that is mounted here; `run_dir` is local disk in any case.

    Raises:
      UsageError: the config cannot run here.
      RunFailed: a role has failed for good.
    """
    alone = config.generator.model_copy(update={"replicas": 0})
    config = config.model_copy(update={"generator": alone})
    is_new = RecordReader(Bucket(config.bucket).child(config.run), layout.RUN).read() is None
    check_to_run(config, is_new=is_new)
    run_dir.mkdir(parents=True, exist_ok=True)
    with stop_on_signals() as stop:
        supervisor = Supervisor(config, run_dir, learner_arguments=("--bucket", config.bucket))
        logs = _Logs(supervisor.logs)
        try:
            with show_progress(config, run_dir, supervisor):
                supervisor.start()
                while not stop.is_set():
                    done = supervisor.poll()
                    logs.show()
                    if done:
                        supervisor.leave()
                        return EXIT_DONE
                    time.sleep(_POLL_S)
            return EXIT_RESUMABLE
        finally:
            supervisor.stop(stop.at_once)
            logs.show()


class _Logs:
    """Copies what the roles write into their files to this process's output: of a job nothing else is seen."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._offsets: dict[Path, int] = defaultdict(int)

    def show(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] += len(whole)
            sys.stdout.write(mask_secrets(whole.decode(errors="replace")))
        sys.stdout.flush()
