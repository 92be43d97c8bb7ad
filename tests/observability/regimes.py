"""The truth about 200 random regimes, kept in `regimes.json`: finding it takes six simulations of each.

`python -m tests.observability.regimes` writes the file anew, which a changed simulator asks for.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from grpo_jax.observability.replay import RESOURCES
from tests.observability import queue_simulator
from tests.observability.queue_simulator import Regime, cycle_s, random_regime, simulate

# The constants of the verdict were chosen on the regimes 0 … 199.
SEEDS = range(10_000, 10_200)
_FILE = Path(__file__).with_name("regimes.json")
_STEPS, _SKIP = 100, 16

Gains = dict[str, float]


def truth(regime: Regime) -> Gains:
    """By resource: the gain of 20 % more of it, in the simulator."""
    now = cycle_s(simulate(regime, _STEPS), _SKIP)
    return {name: now / cycle_s(simulate(regime.with_more(name, 1.2), _STEPS), _SKIP) - 1 for name in RESOURCES}


@cache
def known_truths() -> dict[int, Gains]:
    """By seed, as the file has them; the file must be of this simulator."""
    kept = json.loads(_FILE.read_text())
    assert kept["simulator"] == _simulator(), "run python -m tests.observability.regimes"
    return {int(seed): dict(zip(RESOURCES, gains, strict=True)) for seed, gains in kept["gains"].items()}


@contextmanager
def all_cores() -> Iterator[ProcessPoolExecutor]:
    """Processes that share nothing with this one: it may have threads, and a device."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield pool


def _simulator() -> str:
    return hashlib.sha256(Path(queue_simulator.__file__).read_bytes()).hexdigest()


def _truth_of(seed: int) -> Gains:
    return truth(random_regime(seed))


def _write(seeds: Iterable[int]) -> None:
    with all_cores() as pool:
        found = dict(zip(seeds, pool.map(_truth_of, seeds, chunksize=4), strict=True))
    lines = [f'"{seed}": {json.dumps([round(gain, 5) for gain in gains.values()])}' for seed, gains in found.items()]
    body = ",\n".join(lines)
    _FILE.write_text(f'{{"simulator": "{_simulator()}",\n"gains": {{\n{body}\n}}}}\n')


if __name__ == "__main__":
    _write(SEEDS)
