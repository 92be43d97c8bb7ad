import pytest

from grpo_jax.observability.load import FleetLoad


def replica(running: int, waiting: int = 0, state: str = "ready") -> dict[str, object]:
    return {"state": state, "running": running, "waiting": waiting}


def test_means_are_over_time_and_not_over_looks() -> None:
    load = FleetLoad(64)
    load.see([replica(0)], now=0.0)
    load.see([replica(10, 4)], now=1.0)
    load.see([replica(40, 0)], now=4.0)
    assert load.take() == {"fleet/slots": 64.0, "fleet/running": pytest.approx(32.5), "fleet/waiting": 1.0}


def test_each_call_begins_anew_where_the_last_one_ended() -> None:
    load = FleetLoad(8)
    load.see([replica(8)], now=0.0)
    load.see([replica(8)], now=2.0)
    load.take()
    load.see([replica(2)], now=3.0)
    assert load.take()["fleet/running"] == 2.0
    assert load.take() == {}


def test_only_replicas_that_are_ready_count() -> None:
    load = FleetLoad(8)
    load.see([], now=0.0)
    load.see([replica(3), replica(5), replica(7, state="starting")], now=1.0)
    assert load.take() == {"fleet/slots": 16.0, "fleet/running": 8.0, "fleet/waiting": 0.0}
    load.see([replica(7, state="starting")], now=2.0)
    assert load.take() == {}
