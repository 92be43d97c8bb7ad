"""A TCP relay between worker and proxy that breaks connections at random, with a reset as a dying router sends it."""

import asyncio
import random
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)
_CHUNK = 1 << 16


class Relay:
    """Listens on a free port of loopback, in a thread of its own, until `close`.

    A connection that it breaks lives for a time that is drawn with the mean `mean_s`; `breaking` turns that on and off.
    """

    def __init__(self, target_port: int, mean_s: float, seed: int):
        self._target, self._mean_s, self._random = target_port, mean_s, random.Random(seed)
        self.breaking = True
        self.connections = self.broken = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._relay, sock=self._listener))
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _reset(writer)
            return
        pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        try:
            done, _ = await asyncio.wait(
                pumps, timeout=self._random.expovariate(1 / self._mean_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not done and not self.breaking:
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.broken += 1
                _reset(writer)
                _reset(back)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            back.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    except OSError:
        return


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with RST, without what was still to be sent."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
