"""The files of one server's adapters, from the proof to the last request that may need them."""

import logging
import time
from collections.abc import Collection

from grpo_jax.generator.client import Load
from grpo_jax.generator.sources import Fetched, Source
from grpo_jax.rollouts.threads import in_daemon_thread

log = logging.getLogger(__name__)

# Time for a request that was accepted just before the unloading to show up in the metrics.
_KEEP_S = 5.0


class Files:
    """Which adapters the server may register again by itself, and which it has been told to forget but may still read.

    vLLM may read an adapter again for a request that it accepted before the unloading, and dies if it is not there.
    """

    def __init__(self, source: Source):
        self._source = source
        self._offered: set[str] = set()
        self._leaving: dict[str, float] = {}  # since when, monotonic seconds
        source.offer(())

    @property
    def leaving(self) -> list[str]:
        return list(self._leaving)

    async def fetch(self, name: str) -> Fetched:
        """AdapterError says what is wrong with the adapter in the bucket."""
        return await in_daemon_thread(self._source.fetch, name)

    def offer(self, name: str) -> None:
        """It is proved here: should the server lose it, the server may take it back."""
        self._offered.add(name)
        self._source.offer(self._offered)

    def withdraw(self, name: str) -> None:
        """To be called before an unloading, so that no request brings the name back after it."""
        if name in self._offered:
            self._offered.remove(name)
            self._source.offer(self._offered)

    def leave(self, name: str) -> None:
        self.withdraw(name)
        self._leaving[name] = time.monotonic()

    def leave_all_but(self, names: Collection[str]) -> None:
        """For what an earlier server of ours held."""
        for name in self._source.stored().difference(names, self._leaving):
            self.leave(name)

    async def sweep(self, loaded: Collection[str], listed_at: float, load: Load) -> None:
        """Releases what was unloaded a while ago, if neither the server's list nor a request names it any more.

        Args:
            loaded: what the server listed at `listed_at` (monotonic seconds).
        """
        seen = min(load.asked_at, listed_at)
        for name, since in list(self._leaving.items()):
            if name in loaded:
                del self._leaving[name]
            elif seen - since >= _KEEP_S and name not in load.busy:
                del self._leaving[name]
                await in_daemon_thread(self._source.release, name)
