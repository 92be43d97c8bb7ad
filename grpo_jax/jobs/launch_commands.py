"""`grpo-jax launch` and its variants, from the words of the command line."""

import argparse
import logging
import os
import re
from collections.abc import Sequence

from grpo_jax.config.load import load_config
from grpo_jax.config.schema import Config
from grpo_jax.config.sweep import Sweep, Variant, load_sweep
from grpo_jax.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USAGE, RunFailed, UsageError
from grpo_jax.generator.runs import in_fleet, sharing
from grpo_jax.jobs.hub_jobs import HubError
from grpo_jax.jobs.huggingface import attach, dry_run, launch, make_bucket, scale
from grpo_jax.jobs.launch_show import say, shown
from grpo_jax.jobs.launch_spec import Target
from grpo_jax.jobs.local import default_environment
from grpo_jax.jobs.preflight import preflight
from grpo_jax.jobs.sweep import FINISHED, OTHER_CONFIG, choose, state_of
from grpo_jax.observability.members import write_index
from grpo_jax.storage.bucket import Bucket, BucketError


def launch_command(arguments: argparse.Namespace) -> int:
    default_environment()
    # The client tells each of its own attempts; what they come to is said here.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if arguments.attach is not None:
        if arguments.config is not None:
            raise UsageError("launch --attach: one run, and no config beside it")
        return attach(arguments.attach, on_interrupt=arguments.on_interrupt)
    if arguments.config is None:
        raise UsageError("launch: a config is needed, or --attach RUN")
    if arguments.scale is not None:
        found = re.fullmatch(r"generators=(\d+)", arguments.scale)
        if found is None:
            raise UsageError(f"launch --scale {arguments.scale}: expected generators=N")
        return scale(arguments.config, int(found[1]))
    sweep = load_sweep(arguments.config, arguments.overrides)
    if sweep is not None:
        return _launch_sweep(sweep, arguments)
    config = load_config(arguments.config, arguments.overrides)
    _check_backend(config)
    target = Target.run(config)
    if arguments.dry_run:
        return dry_run(target)
    return launch(
        target, detach=arguments.detach, on_interrupt=arguments.on_interrupt, compile=not arguments.no_compile
    )


def _launch_sweep(sweep: Sweep, arguments: argparse.Namespace) -> int:
    """Its runs one after the other, on one fleet of generators as far as they can share it.

    What is wrong with any of them is said first.
    """
    chosen = choose(sweep, arguments.only)
    if arguments.detach:
        raise UsageError("launch --detach: the runs of a sweep follow each other, so somebody has to stay")
    for variant in chosen:
        _check_backend(variant.config)
    if arguments.dry_run:
        for target in targets_of(sweep, chosen):
            if (code := dry_run(target)) != EXIT_DONE:
                return code
        return EXIT_DONE
    if not shown(preflight(chosen[0].config, os.environ, compile=not arguments.no_compile)):
        return EXIT_USAGE
    try:
        make_bucket(chosen[0].config)
        write_index(Bucket(sweep.folder), sweep)
        return _launch_each(sweep, chosen, arguments.on_interrupt)
    except (HubError, BucketError) as error:
        raise RunFailed(str(error)) from None


def _launch_each(sweep: Sweep, chosen: Sequence[Variant], on_interrupt: str) -> int:
    states = {variant.config.run: state_of(variant.config) for variant in chosen}
    for run, state in states.items():
        say(f"{run}: {state}")
    others = [run for run, state in states.items() if state.startswith(OTHER_CONFIG)]
    if others:
        raise UsageError(f"{others[0]} {states[others[0]]}")
    targets = targets_of(sweep, [variant for variant in chosen if states[variant.config.run] != FINISHED])
    codes = []
    for target in targets:
        codes.append(launch(target, on_interrupt=on_interrupt, compile=False))
        if codes[-1] == EXIT_RESUMABLE:
            return EXIT_RESUMABLE
    if not targets:
        say(f"all runs have finished; `grpo-jax report {sweep.folder}` compares them")
    return EXIT_FAILED if any(codes) else EXIT_DONE


def targets_of(sweep: Sweep, chosen: Sequence[Variant]) -> list[Target]:
    """The runs, put together where one fleet can serve them."""
    configs = [in_fleet(variant.config, sweep.name) for variant in chosen]
    return [Target.sweep(sweep.folder, group) for group in sharing(configs, ["jobs"])]


def _check_backend(config: Config) -> None:
    if config.jobs.backend != "huggingface":
        raise UsageError("jobs.backend is 'local': `grpo-jax run` starts the roles here; jobs want huggingface there")
