"""The commands. Each calls one function; imports are inside, so that a role loads only its own."""

import argparse
import logging
import os
import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USAGE, BucketError, RunFailed, UsageError
from grpo_jax.heap import keep_heap_small

if TYPE_CHECKING:
    from grpo_jax.config.schema import Config

log = logging.getLogger("grpo_jax")


# What a run has beside `local.stop_s` to end in order once the sweep that started it is gone.
_LAST_STEP_S = 30.0


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one run only; `run C.yaml --dir D steps=3` is as good as any other order.
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        arguments.overrides += rest
    # Tasks and rewards are named by import path; the directory of the command is where users keep them.
    sys.path.insert(0, os.getcwd())
    keep_heap_small()
    try:
        return arguments.command(arguments)
    except (UsageError, RunFailed, BucketError) as error:
        print(f"grpo-jax: {error}", file=sys.stderr)
        if isinstance(error, BucketError):
            return EXIT_FAILED
        return EXIT_USAGE if isinstance(error, UsageError) else error.exit_code
    except KeyboardInterrupt:
        return EXIT_RESUMABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-jax", description="Asynchronous GRPO with LoRA, without a cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=function)
        return sub

    def with_config(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("config", metavar="CONFIG", help="a YAML file")
        sub.add_argument(
            "overrides", nargs="*", metavar="key=value", help="override a key, e.g. optimizer.learning_rate=1e-4"
        )
        return sub

    sub = with_config(command("run", _run, "all roles on this machine; resumes a run that exists"))
    sub.add_argument("--dir", metavar="RUN", help="the run's directory (default: <bucket>/<run>)")
    sub.add_argument("--fresh", action="store_true", help="delete what there is of this run and start anew")
    sub = command("launch", _launch, "all roles as jobs of the Hugging Face Hub; resumes a run that exists")
    sub.add_argument("config", nargs="?", metavar="CONFIG|RUN", help="a YAML file; with --scale also a run's URL")
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, e.g. generator.replicas=2")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--attach", metavar="RUN", help="look after a run that is going on: its URL, or its config")
    how.add_argument("--scale", metavar="generators=N", help="of a run that is going on")
    how.add_argument("--dry-run", action="store_true", help="print the jobs and what they cost; ask nobody anything")
    how.add_argument("--detach", action="store_true", help="start the jobs and leave")
    sub.add_argument(
        "--on-interrupt",
        choices=("ask", "detach", "cancel"),
        default="ask",
        help="what Ctrl-C does to the jobs (default: ask; where there is no terminal to ask, detach)",
    )
    sub.add_argument("--no-compile", action="store_true", help="do not compile the step to see what memory it takes")
    sub.add_argument("--only", action="append", default=[], metavar="NAME", help="of a sweep: a run, or a glob")
    for name, function, text in (
        ("status", _status, "shows the jobs of a launched run, where it is and what it has cost"),
        ("cancel", _cancel, "ends all jobs of a launched run"),
    ):
        sub = command(name, function, text)
        sub.add_argument("run", metavar="RUN", help="the run's URL in its bucket, or its config")
    sub = with_config(command("check", _check, "validates a config and prints what it means; starts nothing"))
    sub.add_argument("--offline", action="store_true", help="fetch nothing; sizes come from configs/models")
    sub.add_argument(
        "--no-compile", action="store_true", help="leave out the step's memory (half a minute for rows of 16k tokens)"
    )
    sub = with_config(command("sample", _sample, "samples and scores the base model: is this task learnable?"))
    sub.add_argument("--n", type=int, default=64, help="completions (default 64)")
    sub = with_config(command("reward", _reward, "scores stored samples with the config's rewards, without training"))
    sub.add_argument("--on", required=True, metavar="SAMPLES", help="a JSONL file, or a run: its directory or URL")
    sub = command("samples", _samples, "shows prompts, completions and rewards of a run as a table")
    sub.add_argument("run", metavar="RUN", help="a run directory or its URL in a bucket")
    sub.add_argument("--n", type=int, default=8, help="samples (default 8, the newest)")
    sub.add_argument("--step", type=int, metavar="N", help="those that this step trained")
    sub.add_argument("--policy", metavar="NAME", help="those of one policy: its name, or v3")
    order = sub.add_mutually_exclusive_group()
    order.add_argument("--best", dest="order", action="store_const", const="best", help="by reward, from the top")
    order.add_argument("--worst", dest="order", action="store_const", const="worst", help="by reward, from the bottom")
    sub.set_defaults(order="newest")
    sub = command("export", _export, "writes a run's adapter, or the merged model, with a model card")
    sub.add_argument("run", metavar="RUN", help="a run directory or its URL in a bucket")
    sub.add_argument("--to", metavar="DIR|hub:OWNER/NAME", required=True, help="a new directory, or a Hub repository")
    sub.add_argument("--policy", metavar="NAME", help="another than the last")
    sub.add_argument("--merge", action="store_true", help="the whole model, with the adapter merged into its weights")
    sub.add_argument("--public", action="store_true", help="a repository that is made for it is public, not private")
    sub = command("explain", _explain, "says where one sample came from, which step trained it and what it weighed")
    sub.add_argument("run", metavar="RUN", help="a run directory or its URL in a bucket")
    sub.add_argument("sample", metavar="SAMPLE_ID", help="as `samples` shows it, e.g. e000.i000012.a00/3")
    sub.add_argument("--json", action="store_true", help="for machines")
    sub = command("replay", _replay, "trains a run again from its spool, offline, as it was or with another objective")
    sub.add_argument("run", metavar="RUN", help="a run directory or its URL in a bucket")
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="what is to differ, e.g. algorithm.loss=cispo or lora.rank=16"
    )
    sub.add_argument("--dir", metavar="NEW", help="directory of the new run (default: RUN-replay, beside the old one)")
    sub = command("diff", _diff, "says in what two runs differ: config, versions, metrics")
    sub.add_argument("runs", nargs=2, metavar="RUN", help="a run directory or its URL in a bucket")
    sub = with_config(command("sweep", _sweep, "runs what the section `sweep` of a config describes, one by one"))
    sub.add_argument("--only", action="append", default=[], metavar="NAME", help="a run of it, or a glob; repeatable")
    sub.add_argument("--dry-run", action="store_true", help="say what there is to do, and do nothing")
    sub = command("report", _report, "writes report.html and reward.png of runs, and compares several")
    sub.add_argument("runs", nargs="+", metavar="RUN", help="a run, or one sweep: its config or its folder")
    sub.add_argument("--only", action="append", default=[], metavar="NAME", help="of a sweep: these runs (or globs)")
    sub.add_argument("--to", metavar="DIR", help="where a comparison goes (default: the sweep's folder, or here)")
    sub.add_argument("--target", type=float, metavar="REWARD", help="of a comparison (default: 0.9 of the best)")

    def role(name: str, function, help: str, several: str | None = None) -> argparse.ArgumentParser:
        sub = command(name, function, help)
        action = "store" if several is None else "append"
        sub.add_argument("--config", required=True, metavar="CONFIG", action=action, help=several)
        sub.add_argument("--bucket", metavar="URL", help="instead of the config's")
        return sub

    sub = role("learner", _learner, "one role alone: trains and publishes")
    sub.add_argument("--dir", metavar="RUN", help="local directory of the run")
    sub.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    sub = role("worker", _worker, "one role alone: samples and scores groups")
    sub.add_argument("--proxy", required=True, metavar="URL")
    sub.add_argument("--id", default="worker-0")
    several = "given several times: of the runs that share this replica"
    sub = role("generator", _generator, "one role alone: vLLM and its agent", several)
    sub.add_argument("--id", required=True, help="names this replica in the fleet")
    sub.add_argument("--dir", metavar="DIR", help="local directory for adapters and logs")
    sub.add_argument("--host", help="where its server listens (default: generator.host)")
    sub.add_argument("--port", type=int, help="default: generator.port")
    sub.add_argument("--url", help="under which the proxy reaches this replica (default: its own address)")
    sub = role("trainer", _trainer, "learner, proxy and worker; generators are elsewhere, and come by the bucket")
    sub.add_argument("--dir", metavar="RUN", help="local directory for what the bucket does not hold")
    sub = role("proxy", _proxy, "one role alone: one address for many replicas")
    sub.add_argument("--host")
    sub.add_argument("--port", type=int)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from grpo_jax.config.load import load_config
    from grpo_jax.jobs.processes import leave_with_parent
    from grpo_jax.jobs.run import execute, place

    _configure_logging("run", logging.WARNING)
    config, run_dir = place(load_config(arguments.config, arguments.overrides), arguments.dir)
    leave_with_parent(config.local.stop_s + _LAST_STEP_S)  # a sweep's; nobody else names itself
    result = execute(config, run_dir, fresh=arguments.fresh)
    print(result.message, file=sys.stdout if result.exit_code == EXIT_DONE else sys.stderr)
    if result.report is not None:
        print(f"report: {result.report.html_path}  picture: {result.report.png_path}")
    return result.exit_code


def _launch(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.launch_commands import launch_command

    _configure_logging("launch", logging.WARNING)
    return launch_command(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.huggingface import status

    _configure_logging("status", logging.WARNING)
    return status(arguments.run)


def _cancel(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.huggingface import cancel

    _configure_logging("cancel", logging.WARNING)
    return cancel(arguments.run)


def _check(arguments: argparse.Namespace) -> int:
    from grpo_jax.config.load import load_config
    from grpo_jax.config.sweep import load_sweep
    from grpo_jax.jobs.local import default_environment

    default_environment()
    sweep = load_sweep(arguments.config, arguments.overrides)
    if sweep is None:
        return _check_one(load_config(arguments.config, arguments.overrides), arguments)
    # The step of each would be compiled; its shapes differ little, if at all.
    arguments.no_compile = True
    for i, variant in enumerate(sweep.variants, start=1):
        print(f"{i} of {len(sweep.variants)}: {variant.config.run}", flush=True)
        try:
            _check_one(variant.config, arguments)
        except UsageError as error:
            raise UsageError(f"{variant.config.run}: {error}") from None
    return EXIT_DONE


def _check_one(config: "Config", arguments: argparse.Namespace) -> int:
    from grpo_jax.config.plan import check_config

    plan = check_config(config, offline=arguments.offline, lint=True)
    rows, unchecked = list(plan.rows), list(plan.unchecked)
    if plan.model is not None and find_spec("jax") is None:
        unchecked.append("the learner's memory: jax is not installed here")
    elif plan.model is not None:
        from grpo_jax.learner.estimate import force_host_devices, memory_estimate

        force_host_devices(config.learner.mesh)
        rows += memory_estimate(config, plan.model, compile=not arguments.no_compile).rows()
        if arguments.no_compile:
            unchecked.append("the compiled step's memory: --no-compile")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for item in unchecked:
        print(f"not checked: {item}")
    return EXIT_DONE


def _sample(arguments: argparse.Namespace) -> int:
    from grpo_jax.config.load import load_config
    from grpo_jax.jobs.sample import sample_base

    _configure_logging("sample", logging.WARNING)
    return sample_base(load_config(arguments.config, arguments.overrides), arguments.n)


def _reward(arguments: argparse.Namespace) -> int:
    from grpo_jax.config.load import load_config
    from grpo_jax.jobs.score import score_stored

    _configure_logging("reward", logging.WARNING)
    return score_stored(load_config(arguments.config, arguments.overrides), arguments.on)


def _samples(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.show import show_samples
    from grpo_jax.storage.bucket import Bucket

    return show_samples(Bucket(arguments.run), arguments.n, arguments.step, arguments.policy, arguments.order)


def _export(arguments: argparse.Namespace) -> int:
    from grpo_jax.adapters.export import export
    from grpo_jax.jobs.local import default_environment
    from grpo_jax.storage.bucket import Bucket

    default_environment()
    where = export(
        Bucket(arguments.run), arguments.to, arguments.policy, merged=arguments.merge, public=arguments.public
    )
    print(where)
    return EXIT_DONE


def _explain(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.explain import explain_sample
    from grpo_jax.storage.bucket import Bucket

    return explain_sample(Bucket(arguments.run), arguments.sample, as_json=arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.replay import replay_run
    from grpo_jax.storage.bucket import Bucket

    _configure_logging("replay", logging.INFO)
    result = replay_run(Bucket(arguments.run), arguments.overrides, arguments.dir)
    print(result.message, file=sys.stdout if result.exit_code == EXIT_DONE else sys.stderr)
    if result.report is not None:
        print(f"report: {result.report.html_path}  picture: {result.report.png_path}")
    return result.exit_code


def _diff(arguments: argparse.Namespace) -> int:
    from grpo_jax.observability.diff import compare_runs
    from grpo_jax.storage.bucket import Bucket

    print(compare_runs(*(Bucket(name) for name in arguments.runs)))
    return EXIT_DONE


def _sweep(arguments: argparse.Namespace) -> int:
    from grpo_jax.config.sweep import load_sweep
    from grpo_jax.jobs.sweep import run_sweep

    _configure_logging("sweep", logging.WARNING)
    sweep = load_sweep(arguments.config, arguments.overrides)
    if sweep is None:
        raise UsageError(f"{arguments.config}: sweep: there is no such section; `grpo-jax run` runs this config")
    return run_sweep(sweep, arguments.only, dry_run=arguments.dry_run)


def _report(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.show import run_decoder
    from grpo_jax.jobs.sweep import compare_runs, compare_sweep
    from grpo_jax.observability.report import build_report
    from grpo_jax.storage.bucket import Bucket

    several = len(arguments.runs) > 1
    compared = None if several else compare_sweep(arguments.runs[0], arguments.to, arguments.target, arguments.only)
    if arguments.only and compared is None:
        raise UsageError("report --only: chooses runs of a sweep, and this is none")
    for name in () if compared else arguments.runs:
        bucket = Bucket(name)
        # A run in a bucket has no directory of its own here: its report comes into one with its name.
        run_dir = bucket.local_path() if bucket.is_local else Path(bucket.url.rpartition("/")[2])
        report = build_report(run_dir, bucket, run_decoder(bucket))
        print(f"{report.headline}\nreport: {report.html_path}  picture: {report.png_path}")
    if several:
        compared = compare_runs(arguments.runs, arguments.to, arguments.target)
    if compared is not None:
        print(compared)
    return EXIT_DONE


def _learner(arguments: argparse.Namespace) -> int:
    from grpo_jax.jobs.run import place

    config = _role_config(arguments, "learner")
    if arguments.bucket and arguments.dir:
        run_dir = Path(arguments.dir).absolute()
    else:
        config, run_dir = place(config, arguments.dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    from grpo_jax.learner.loop import run_learner

    run_dir.mkdir(parents=True, exist_ok=True)
    return run_learner(config, run_dir, stop, hold=arguments.hold)


def _worker(arguments: argparse.Namespace) -> int:
    config = _role_config(arguments, "worker")
    from grpo_jax.rollouts.worker import run_worker

    return run_worker(config, arguments.proxy, arguments.id)


def _generator(arguments: argparse.Namespace) -> int:
    configs = [_role_config(arguments, "generator", path) for path in arguments.config]
    from grpo_jax.cache import cache_dir
    from grpo_jax.generator.agent import run_generator

    said = {"host": arguments.host, "port": arguments.port}
    update = {key: value for key, value in said.items() if value is not None}
    configs = [c.model_copy(update={"generator": c.generator.model_copy(update=update)}) for c in configs]
    work_dir = Path(arguments.dir) if arguments.dir else cache_dir() / "generators" / configs[0].run / arguments.id
    return run_generator(configs, arguments.id, work_dir, arguments.url)


def _trainer(arguments: argparse.Namespace) -> int:
    config = _role_config(arguments, "trainer")
    from grpo_jax.cache import cache_dir
    from grpo_jax.jobs.trainer import run_trainer

    return run_trainer(config, Path(arguments.dir or cache_dir() / "runs" / config.run).absolute())


def _proxy(arguments: argparse.Namespace) -> int:
    config = _role_config(arguments, "proxy")
    from grpo_jax.proxy.app import run_proxy

    port = config.proxy.port if arguments.port is None else arguments.port
    return run_proxy(config, arguments.host or config.proxy.host, port)


def _role_config(arguments: argparse.Namespace, role: str, path: str | None = None) -> "Config":
    from grpo_jax.config.load import load_config
    from grpo_jax.jobs.local import default_environment
    from grpo_jax.jobs.processes import leave_with_parent

    default_environment()
    _configure_logging(role, logging.INFO)
    leave_with_parent()
    overrides = [f"bucket={arguments.bucket}"] if arguments.bucket else []
    return load_config(path or arguments.config, overrides)


def _configure_logging(role: str, level: int) -> None:
    from grpo_jax.observability.logs import configure_logging

    configure_logging(role, None)
    logging.getLogger().setLevel(level)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Orbax leaves threads behind that wait inside C++; the interpreter's orderly end can abort the process over them.
    os._exit(code)
