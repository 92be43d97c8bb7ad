"""`grpo-jax run` and `grpo_jax.run`: a whole run on this machine, from the config to the report."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.cache import cache_dir
from grpo_jax.config.compare import differing_keys
from grpo_jax.config.plan import check_config
from grpo_jax.config.schema import Config
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, RunFailed, UsageError
from grpo_jax.generator.engines import require_engine
from grpo_jax.jobs.local import Supervisor, default_environment, stop_on_signals
from grpo_jax.jobs.show import run_decoder
from grpo_jax.learner.fence import delete_claims
from grpo_jax.observability.logs import log_to
from grpo_jax.observability.progress import RunProgress
from grpo_jax.observability.report import Report, build_report
from grpo_jax.storage import layout
from grpo_jax.storage.bucket import Bucket, Limits
from grpo_jax.storage.records import RecordReader

log = logging.getLogger(__name__)

_POLL_S = 0.25
# Of a verb for what is shown: what takes longer is no news any more.
_SHOWN = Limits(attempt_s=5.0, total_s=5.0)
# A learner writes its state every second; one that is silent for so long does not live.
_ALIVE_S = 4.0


@dataclass(frozen=True)
class RunResult:
    """How a run ended: exit code, its directory, and its report if there is one."""

    exit_code: int
    run_dir: Path
    report: Report | None
    message: str


def place(config: Config, run_dir: str | None) -> tuple[Config, Path]:
    """The config with its bucket and run as `--dir` says, and the local run directory.

    A directory bucket holds the run itself; for any other bucket the run directory is a local cache, by default in
    the user's.
    """
    bucket = Bucket(config.bucket)
    if bucket.is_local:
        if run_dir is None:
            return config.model_copy(update={"bucket": str(bucket.local_path())}), bucket.local_path(config.run)
        path = Path(run_dir).absolute()
        if not RUN_NAME.fullmatch(path.name):
            raise UsageError(
                f"--dir: {path.name!r} cannot name a run (a-z, 0-9, '-' and '_', starting with a letter or digit)"
            )
        return config.model_copy(update={"bucket": str(path.parent), "run": path.name}), path
    return config, Path(run_dir).absolute() if run_dir else cache_dir() / "runs" / config.run


def execute(config: Config, run_dir: Path, *, fresh: bool = False) -> RunResult:
    """Starts, resumes or (if it is finished) only reports a run. What it started has ended on return."""
    default_environment()
    bucket = Bucket(config.bucket)
    run = bucket.child(config.run)
    record = RecordReader(run, layout.RUN).read()
    if record is not None or run.list(layout.INCARNATIONS):
        _refuse_living(run)
    if fresh:
        check_to_run(config, is_new=True)  # a config that cannot run must not cost the run that could
        delete_run(run)
        record = None
    if record is not None:
        differing = differing_keys(record["config"], config.model_dump(mode="json"))
        if differing:
            raise UsageError(
                f"the run {config.run} exists with another config; differing: {', '.join(differing)} "
                "(--fresh starts it anew, --dir names another run)"
            )
        if record["status"] == "finished" and record["config"]["steps"] >= config.steps:
            return _finished(run, run_dir, "finished already")
    check_to_run(config, is_new=record is None)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"bucket, or --dir: {run_dir} cannot be made: {error.strerror}") from None
    with stop_on_signals() as stop, log_to(run_dir / "logs" / "run.log", "run"):
        supervisor = Supervisor(config, run_dir)
        message = ""
        try:
            with show_progress(config, run_dir, supervisor):
                supervisor.start()
                while not stop.is_set():
                    if supervisor.poll():
                        supervisor.leave()
                        break
                    time.sleep(_POLL_S)
                else:
                    return _interrupted(config, run_dir, supervisor.stop(stop.at_once))
            return _finished(run, run_dir, "finished")
        except RunFailed as error:
            message = str(error)
            log.warning("the run fails: %s", message)
        finally:
            supervisor.stop(stop.at_once)
    return RunResult(EXIT_FAILED, run_dir, _report(run, run_dir), f"failed: {message}; logs in {run_dir / 'logs'}")


@contextmanager
def show_progress(config: Config, run_dir: Path, supervisor: Supervisor) -> Iterator[None]:
    """Shows the progress from a thread of its own: a bucket that hangs must hold up neither restarts nor signals."""
    run = Bucket(config.bucket, _SHOWN).child(config.run)
    over = threading.Event()
    with RunProgress(run, run_dir, config.steps, config.fleet_name) as progress:

        def show() -> None:
            while not over.wait(_POLL_S):
                progress.update(supervisor.watchdog.waits)

        shows = threading.Thread(target=show, name="progress", daemon=True)
        shows.start()
        try:
            yield
        finally:
            over.set()
            shows.join(2 * _SHOWN.total_s)


def _interrupted(config: Config, run_dir: Path, saved: bool) -> RunResult:
    how = (
        "" if saved else f", from an earlier step: the learner did not save in local.stop_s = {config.local.stop_s:g} s"
    )
    return RunResult(EXIT_RESUMABLE, run_dir, None, f"interrupted; the same command goes on{how} ({run_dir})")


def check_to_run(config: Config, *, is_new: bool) -> None:
    """UsageError for whatever would keep a role from its work. `is_new`: there is no such run so far."""
    check_config(config, weights=True)
    if config.generator.replicas:
        require_engine(config)
    if is_new and config.lora.init_from is not None:
        from grpo_jax.adapters.initial import require_source

        require_source(config.lora.init_from)


def delete_run(run: Bucket) -> None:
    """Deletes what a run has written, and nothing else that may lie in the same place.

    What stays is the newest claim, so that no learner of it, should one be alive all the same, goes on (`fence`).
    """
    for prefix in layout.RUN_FOLDERS:
        if prefix != layout.INCARNATIONS:
            run.delete_folder(prefix)
    for key in layout.RUN_FILES:
        run.delete(key)
    delete_claims(run)


def _refuse_living(run: Bucket) -> None:
    """A run has one learner: refuses if another one is writing its state."""
    reader = RecordReader(run, layout.LEARNER_STATE)
    first = reader.read()
    if first is None or first["phase"] == "done":
        return
    deadline = time.monotonic() + _ALIVE_S
    while time.monotonic() < deadline:
        time.sleep(0.25)
        if reader.read() != first:
            raise UsageError(f"the learner of this run is alive ({run.address}); stop it first, or use another --dir")


def _finished(run: Bucket, run_dir: Path, how: str) -> RunResult:
    report = _report(run, run_dir)
    message = f"{how}: {report.headline}\n{report.summary['verdict']}" if report else how
    return RunResult(EXIT_DONE, run_dir, report, message)


def _report(run: Bucket, run_dir: Path) -> Report | None:
    try:
        return build_report(run_dir, run, run_decoder(run))
    except Exception:
        log.exception("the report could not be written")
        return None
