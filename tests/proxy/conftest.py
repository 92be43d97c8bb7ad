import pytest


@pytest.fixture(autouse=True)
def _frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_jax.proxy.fleet.HEARTBEAT_POLL_S", 0.02)
    monkeypatch.setattr("grpo_jax.proxy.fleet.STATIC_POLL_S", 0.02)


@pytest.fixture
def long_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strike outlasts the test, so that counts of requests do not depend on the speed of the machine."""
    monkeypatch.setattr("grpo_jax.proxy.backoff.FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr("grpo_jax.proxy.backoff.MAX_DELAY_S", 1000.0)
