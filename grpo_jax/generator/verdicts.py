"""What to make of a server's refusals: a verdict on the adapter, or a sign that the server itself is not well."""

from grpo_jax.generator.client import EngineClient, ServerError


class Refused(Exception):
    """An adapter that must not be served. The message is the reason.

    `retry_at`: monotonic seconds from which on it may be tried again; None: never on this server.
    """

    def __init__(self, reason: str, retry_at: float | None = None):
        super().__init__(reason)
        self.retry_at = retry_at


async def load(client: EngineClient, name: str, path: str) -> None:
    """Loads an adapter; Refused if a sound server does not. One of `UNREACHABLE` is no verdict."""
    try:
        await client.load(name, path)
    except ServerError as error:
        await _require_health(client, error)
        # It may have been registered a moment ago, by the server itself or by a load whose answer was lost.
        if name not in await client.models():
            raise Refused(f"the server does not load it: {error}") from None


async def score(client: EngineClient, name: str, tokens: list[int]) -> list[float]:
    """The canary's log-probabilities; Refused if a sound server that lists the name gives none."""
    try:
        return await client.canary(name, tokens)
    except ServerError as error:
        await _require_health(client, error)
        if name not in await client.models():
            raise ConnectionError(f"the server has lost {name}") from None
        raise Refused(f"the server does not score the canary: {error}") from None


async def _require_health(client: EngineClient, error: ServerError) -> None:
    if not await client.healthy():
        raise ConnectionError(f"the server is ill: {error}") from None
