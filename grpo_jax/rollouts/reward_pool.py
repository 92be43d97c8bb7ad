"""Processes for rewards that compute: one reward, a few daemon processes, and none of them holds the worker's loop.

They are spawned, not forked: the worker has threads. A process is started when it is first needed, outside of the
reward's time; one whose call does not come back in time is killed, and the next call gets a new one.
"""

import asyncio
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any

from grpo_jax.config.schema import Reward as RewardConfig
from grpo_jax.generator.lifeline import die_with_parent
from grpo_jax.rollouts.rewards import Completion, Value, load_reward
from grpo_jax.rollouts.threads import in_daemon_thread

log = logging.getLogger(__name__)

_SPAWN = multiprocessing.get_context("spawn")
_START_S = 120.0

Limited = Callable[[Coroutine[Any, Any, list[Value]]], Awaitable[list[Value]]]


class RaisedThere(Exception):
    """What a reward has raised in its process: shown as the original, whose traceback is the cause."""

    def __init__(self, shown: str, trace: str):
        super().__init__(shown)
        self.__cause__ = _Trace(trace)

    def __repr__(self) -> str:
        return str(self)


class _Trace(Exception):
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RewardPool:
    """Calls of one reward, at most `config.processes` at a time."""

    def __init__(self, config: RewardConfig):
        self._config = config
        self._slots = asyncio.Semaphore(config.processes)
        self._idle: list[_Process] = []

    async def values(self, completions: Sequence[Completion], limited: Limited) -> list[Value]:
        """The values of one call. `limited` awaits it for as long as it may take; what it raises kills the process."""
        payload = pickle.dumps(completions)
        async with self._slots:
            process = self._idle.pop() if self._idle else _Process(self._config)
            try:
                await process.ready()
                values = await limited(process.call(payload))
            except RaisedThere:
                self._idle.append(process)
                raise
            except BaseException:
                process.kill()
                raise
            self._idle.append(process)
            return values

    def close(self) -> None:
        for process in self._idle:
            process.kill()
        self._idle.clear()


class _Process:
    """Starts from the thread of the event loop, which lives as long as the processes may (see `die_with_parent`)."""

    def __init__(self, config: RewardConfig):
        self._connection, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_serve, args=(there, config, os.getpid()), daemon=True, name=f"reward-{config.label}"
        )
        self._process.start()
        there.close()
        self._is_ready = False

    async def ready(self) -> None:
        if not self._is_ready:
            try:
                async with asyncio.timeout(_START_S):
                    await in_daemon_thread(self._receive)
            except TimeoutError:
                raise RuntimeError(f"the reward's process did not start within {_START_S:g} s") from None
            self._is_ready = True

    async def call(self, payload: bytes) -> list[Value]:
        return await in_daemon_thread(self._exchange, payload)

    def kill(self) -> None:
        self._process.kill()

    def _exchange(self, payload: bytes) -> list[Value]:
        self._connection.send_bytes(payload)
        return self._receive()

    def _receive(self) -> list[Value]:
        try:
            kind, *content = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise RuntimeError(f"the reward's process ended with exit code {self._process.exitcode}") from None
        if kind == "raised":
            raise RaisedThere(*content)
        return content[0]


def _serve(connection: Connection, config: RewardConfig, parent_pid: int) -> None:
    """The life of a process: one answer for each list of completions, until the other end is closed."""
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends its daemons
    reward = load_reward(config, "rewards")
    for module in getattr(reward.function, "requires", ()):  # imports of seconds are no part of the first call
        importlib.import_module(module)
    connection.send(("values", []))
    while True:
        try:
            completions = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = reward.call(completions)
            if inspect.isawaitable(answer):
                answer = asyncio.run(_awaited(answer))
            reply: tuple[Any, ...] = ("values", reward.read(answer, len(completions)))
        except (Exception, SystemExit) as error:
            reply = ("raised", f"{error!r:.300}", traceback.format_exc())
        connection.send(reply)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
