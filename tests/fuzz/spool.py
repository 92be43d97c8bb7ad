"""A coverage-guided fuzzer of the spool reader: `python -m tests.fuzz.spool --seconds 300 [--seed S] [--findings DIR]`.

An input that makes the watched files take a way that none has taken before is kept, and further inputs are made of it.
Mutations know the format (see `spool_files`), or nothing would ever get past the checksum. A finding is any exception
but the documented one, a group that cannot be trained, or a hang; its input is written down, and the exit code is 1.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

from grpo_jax.learner import batch, diagnostics, ledger
from grpo_jax.rollouts import sample
from grpo_jax.storage import spool
from tests.fuzz.spool_files import SOUND, mutated, read

_WATCHED = frozenset(str(module.__file__) for module in (sample, spool, ledger, batch, diagnostics))
_HANG_S = 30
_LARGEST = 1 << 20
_NEWEST = 64

Edge = tuple[CodeType, int, int]


class Coverage:
    """Runs functions and notes which line of a watched file came after which."""

    def __init__(self, watched: frozenset[str] = _WATCHED):
        self._watched = watched
        self.seen: set[Edge] = set()

    def adds(self, function: Callable[[], Any]) -> bool:
        """Whether the call took a new way; raises what it raises."""
        found: set[Edge] = set()

        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            code, last = frame.f_code, 0
            if code.co_filename not in self._watched:
                return None

            def on_line(frame: FrameType, event: str, argument: Any) -> Any:
                nonlocal last
                if event == "line":
                    found.add((code, last, frame.f_lineno))
                    last = frame.f_lineno
                return on_line

            return on_line

        sys.settrace(on_call)
        try:
            function()
        finally:
            sys.settrace(None)
            news = found - self.seen
            self.seen |= news
        return bool(news)


class Fuzzer:
    """`findings`: where something went wrong → the input, one of each."""

    def __init__(self, target: Callable[[bytes], Any], rng: Random, coverage: Coverage, corpus: list[bytes]):
        self._target, self._rng, self._coverage = target, rng, coverage
        self.corpus, self.findings, self.executions = list(corpus), dict[str, bytes](), 0

    def step(self) -> str | None:
        """One input; returns what is new about it if it is a finding."""
        rng = self._rng
        parents = self.corpus[-_NEWEST:] if rng.random() < 0.5 else self.corpus
        data = rng.choice(parents)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = mutated(rng, data)
        self.executions += 1
        signal.alarm(_HANG_S)
        try:
            if self._coverage.adds(lambda: self._target(data)) and len(data) <= _LARGEST:
                self.corpus.append(data)
        except Exception as error:
            where = _where(error)
            if where not in self.findings:
                self.findings[where] = data
                return where
        finally:
            signal.alarm(0)
        return None


class Hang(Exception):
    pass


def _where(error: Exception) -> str:
    """The kind of an error and the last line of ours that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/grpo_jax/" in frame.filename or "/fuzz/" in frame.filename]
    at = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{at}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _ring(*_: object) -> None:
    raise Hang(f"no answer within {_HANG_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _ring)
    fuzzer = Fuzzer(partial(read, train=False), Random(arguments.seed), Coverage(), SOUND)
    started = said = time.monotonic()
    while (now := time.monotonic()) - started < arguments.seconds:
        if (finding := fuzzer.step()) is not None:
            arguments.findings.mkdir(parents=True, exist_ok=True)
            path = arguments.findings / f"{len(fuzzer.findings):03d}.safetensors"
            path.write_bytes(fuzzer.findings[finding])
            print(f"finding: {finding} ({path})", flush=True)
        if now - said > 30:
            said = now
            print(_status(fuzzer, now - started), flush=True)
    print(_status(fuzzer, time.monotonic() - started))
    return 1 if fuzzer.findings else 0


def _status(fuzzer: Fuzzer, seconds: float) -> str:
    return (
        f"{fuzzer.executions} executions in {seconds:.0f} s ({fuzzer.executions / max(seconds, 1e-9):.0f} a second), "
        f"{len(fuzzer.corpus)} inputs kept, {len(fuzzer._coverage.seen)} edges, {len(fuzzer.findings)} findings"
    )


if __name__ == "__main__":
    sys.exit(main())
