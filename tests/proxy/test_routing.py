from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from grpo_jax.proxy.affinity import prompt_chain
from grpo_jax.proxy.backoff import MAX_DELAY_S, TRIAL_S
from grpo_jax.proxy.pace import STALL_S
from grpo_jax.proxy.routing import NAMED_S, SPILL_SAMPLES, Lease, Route, Router
from grpo_jax.proxy.table import LATEST
from tests.proxy.harness import OTHER_RUN, PROBE, RUN, V0, V1, V2

NOW = 1000.0


def _router(**proved: list[str]) -> Router:
    router = Router(RUN, memory_s=60.0)
    router.complete = True
    for id, names in proved.items():
        router.observe(id, URL(f"http://{id}:1"), True, names, NOW)
    return router


def _begin(router: Router, model: str, samples: int = 1, now: float = NOW) -> Lease:
    route = router.choose(model, now)
    assert route is not None
    return router.begin(route, samples, now)


def _name(route: Route | None) -> tuple[str, str] | None:
    return None if route is None else (route.replica.id, route.policy)


def test_only_replicas_that_proved_a_policy_get_it() -> None:
    router = _router(a=[V0], b=[V0, V1])
    assert _name(router.choose(V1, NOW)) == ("b", V1)
    assert router.choose(V2, NOW) is None


def test_probes_other_runs_quarantined_and_foreign_names_are_never_routed() -> None:
    router = _router(a=[PROBE, OTHER_RUN, "smollm2", "../etc"])
    router.observe("b", URL("http://b:1"), True, [V1, PROBE], NOW, quarantined={V1: "canary differs"})
    for model in (PROBE, OTHER_RUN, "smollm2", "../etc", V1, LATEST):
        assert router.choose(model, NOW) is None, model
    assert "canary differs" in router.why_none(V1)
    assert not router.named_lately(PROBE)
    assert not router.named_lately(OTHER_RUN)


def test_what_left_the_window_and_is_proved_nowhere_is_gone_at_once_and_no_restart_is_waited_for() -> None:
    router = _router(a=[V0, V1])
    router.set_window([V2, V1])
    assert router.named_lately(V0)
    router.observe("a", URL("http://a:1"), False, [], NOW + 1)  # its server has died
    assert router.named_lately(V1)
    assert not router.named_lately(V0)


def test_latest_is_the_newest_of_the_replica_that_load_chooses() -> None:
    router = _router(a=[V0, V1], b=[V0])
    first = _begin(router, LATEST, samples=8)
    assert (first.replica.id, first.policy) == ("a", V1)
    assert _name(router.choose(LATEST, NOW)) == ("b", V0)
    _begin(router, LATEST, samples=9)
    assert _name(router.choose(LATEST, NOW)) == ("a", V1)


def test_of_two_lineages_with_one_version_the_one_proved_later_is_the_latest() -> None:
    again = "r.v000001.00000000"
    assert _name(_router(a=[V0, V1, again]).choose(LATEST, NOW)) == ("a", again)
    assert _name(_router(a=[again, V0, V1]).choose(LATEST, NOW)) == ("a", V1)


def test_load_counts_samples_and_equals_take_turns() -> None:
    router = _router(a=[V0], b=[V0], c=[V0])
    leases = [_begin(router, V0, samples=4) for _ in range(3)]
    assert {lease.replica.id for lease in leases} == {"a", "b", "c"}
    for lease in leases:
        router.end(lease)
    assert _name(router.choose(V0, NOW)) == (leases[0].replica.id, V0)  # the least recently used
    router.begin(Route(router.replicas["a"], V0), 1, NOW)
    router.begin(Route(router.replicas["b"], V0), 16, NOW)
    router.begin(Route(router.replicas["c"], V0), 2, NOW)
    assert _name(router.choose(V0, NOW)) == ("a", V0)


def test_a_struck_replica_is_left_alone_then_tried_by_one() -> None:
    router = _router(a=[V0, V1])
    lease = _begin(router, V0)
    router.strike(lease, NOW, "answered 500")
    router.end(lease)
    assert router.choose(V1, NOW) is None
    assert "answered 500" in router.why_none(V1)
    later = router.replicas["a"].health.until
    trial = _begin(router, V0, now=later)
    assert router.choose(V0, later) is None
    router.succeeded(trial, later)
    assert router.choose(V0, later) is not None


def test_a_denied_policy_is_struck_alone() -> None:
    router = _router(a=[V0, V1])
    lease = _begin(router, V0)
    router.strike(lease, NOW, f"answered 404 for {V0}", policy_only=True)
    router.end(lease)
    assert router.choose(V0, NOW) is None
    assert _name(router.choose(V1, NOW)) == ("a", V1)


def test_latest_never_falls_back_to_an_older_version_of_a_replica_that_denies_its_newest() -> None:
    router = _router(a=[V0, V1], b=[V0])
    router.begin(Route(router.replicas["b"], V0), 100, NOW)
    lease = _begin(router, LATEST)
    assert lease.policy == V1
    router.strike(lease, NOW, "answered 404", policy_only=True)
    router.end(lease)
    assert _name(router.choose(LATEST, NOW)) == ("b", V0)


def test_strikes_end_with_a_new_proof_or_a_new_address() -> None:
    router = _router(a=[V0])
    router.strike(_begin(router, V0), NOW, "404", policy_only=True)
    url = URL("http://a:1")
    router.observe("a", url, True, [V0], NOW)
    assert router.choose(V0, NOW) is None
    router.observe("a", url, True, [], NOW)
    router.observe("a", url, True, [V0], NOW)
    assert router.choose(V0, NOW) is not None
    router.strike(_begin(router, V0), NOW, "refused")
    router.observe("a", url, True, [V0], NOW)
    assert router.choose(V0, NOW) is None
    router.observe("a", URL("http://a:2"), True, [V0], NOW)
    assert router.choose(V0, NOW) is not None


def test_a_policy_stays_known_for_a_while_after_it_is_gone() -> None:
    router = _router(a=[V0])
    router.observe("a", URL("http://a:1"), True, [], NOW + 1, loaded=[V1], quarantined={V2: "why"})
    assert all(router.named_lately(name) for name in (V0, V1, V2))
    router.observe("a", URL("http://a:1"), True, [], NOW + 62)
    assert not any(router.named_lately(name) for name in (V0, V1, V2))


def test_latest_is_the_first_of_the_runs_window_that_a_replica_has_proved() -> None:
    """A run resumed from an older checkpoint counts up again: what is highest is of a lineage that is no more."""
    abandoned = "r.v000007.00000000"
    router = _router(a=[V0, V1, abandoned], b=[abandoned, V0])
    assert router.replicas["a"].newest == abandoned
    router.set_window([V2, V1, V0])
    assert router.replicas["a"].newest == V1
    assert router.replicas["b"].newest == V0
    router.observe("c", URL("http://c:1"), True, [V0, abandoned, V2], NOW)
    assert router.replicas["c"].newest == V2
    router.observe("b", URL("http://b:1"), True, [abandoned], NOW)  # nothing of the window: better this than nothing
    assert router.replicas["b"].newest == abandoned
    router.set_window([])
    assert router.replicas["a"].newest == abandoned


def test_a_prompt_goes_where_it_was_until_that_is_too_far_ahead() -> None:
    router, chain = _router(a=[V0], b=[V0]), prompt_chain([1, 2, 3])
    first = router.choose(V0, NOW, chain)
    assert first is not None
    router.begin(first, 1, NOW, chain)
    for _ in range(SPILL_SAMPLES):
        route = router.choose(V0, NOW, chain)
        assert route is not None
        assert route.replica is first.replica
        router.begin(route, 1, NOW, chain)
    spilt = router.choose(V0, NOW, chain)
    assert spilt is not None
    assert spilt.replica is not first.replica
    router.begin(spilt, 1, NOW, chain)
    again = router.choose(V0, NOW, chain)  # both hold it now
    assert again is not None
    assert again.replica is spilt.replica


def test_the_longest_match_wins_and_only_among_those_that_serve_the_policy_now() -> None:
    router = _router(a=[V0, V1], b=[V0], c=[V0, V1])
    short, long = list(range(16)), list(range(40))
    router.end(router.begin(Route(router.replicas["a"], V0), 1, NOW, prompt_chain(short)))
    router.end(router.begin(Route(router.replicas["b"], V0), 1, NOW, prompt_chain(long)))
    assert _name(router.choose(V0, NOW, prompt_chain([*long, 7]))) == ("b", V0)
    assert _name(router.choose(V0, NOW, prompt_chain([*short, 7]))) in (("a", V0), ("b", V0))
    # Under another policy nobody holds it, and `latest` is another policy on a and c.
    assert _name(router.choose(V1, NOW, prompt_chain(long))) == ("c", V1)
    assert _name(router.choose(LATEST, NOW, prompt_chain(long))) == ("b", V0)
    router.observe("b", URL("http://b:1"), False, [V0], NOW)
    assert _name(router.choose(V0, NOW, prompt_chain(long))) == ("a", V0)


def test_a_failure_or_a_new_address_forgets_what_a_replica_held() -> None:
    router, chain = _router(a=[V0], b=[V0]), prompt_chain([1, 2, 3])
    lease = router.begin(Route(router.replicas["a"], V0), 1, NOW, chain)
    router.end(lease)
    router.begin(Route(router.replicas["b"], V0), 1, NOW)
    router.begin(Route(router.replicas["a"], V0), 4, NOW)
    assert _name(router.choose(V0, NOW, chain)) == ("a", V0)
    router.strike(lease, NOW, "answered 500")
    later = router.replicas["a"].health.until
    assert router.replicas["a"].serves(V0, later)
    assert _name(router.choose(V0, later, chain)) == ("b", V0)
    router.observe("b", URL("http://b:2"), True, [V0], later)
    router.strike(lease, later, "an attempt that began before")
    assert len(router._by_number) == 2


def test_usage_counts_what_was_possible_and_what_was_reached() -> None:
    router, chain = _router(a=[V0, V1], b=[V0, V1]), prompt_chain([1, 2, 3])

    def ask(id: str, policy: str, samples: int) -> None:
        lease = router.begin(Route(router.replicas[id], policy), samples, NOW, chain)
        router.end(lease)
        router.succeeded(lease, NOW + 1)

    ask("a", V0, 8)
    ask("a", V0, 1)
    ask("b", V0, 4)
    ask("a", V1, 1)
    found = router.usage.policies()
    assert list(found) == [V1, V0]
    assert (found[V0].samples, found[V0].possible, found[V0].hits) == (13, 7 + 1 + 4, 7 + 1 + 3)
    assert (found[V1].samples, found[V1].possible, found[V1].hits) == (1, 0, 0)
    assert router.usage.total.samples == 14


def test_a_group_goes_to_the_replica_that_it_was_told_of() -> None:
    router = _router(a=[V0, V1], b=[V0, V1], late=[V0])
    told = [router.name(NOW) for _ in range(3)]
    assert {_name(route) for route in told} == {("a", V1), ("b", V1), ("late", V0)}
    late = next(route for route in told if route is not None and route.policy == V0)
    router.begin(Route(router.replicas["late"], V0), 8, NOW)
    router.claim("late", 8)
    assert _name(router.choose(V0, NOW, named="late")) == ("late", V0)
    router.begin(late, SPILL_SAMPLES - 7, NOW)
    assert _name(router.choose(V0, NOW, named="late")) != ("late", V0)
    for nobody in ("", "gone"):
        assert router.choose(V0, NOW, named=nobody) is not None
    router.observe("late", URL("http://late:1"), True, [V2], NOW)
    assert _name(router.choose(V1, NOW, named="late")) in (("a", V1), ("b", V1))


def test_who_is_told_a_policy_counts_until_its_request_comes_but_not_for_ever() -> None:
    router = _router(a=[V0], b=[V0])
    for _ in range(20):  # a worker that asks and asks, and starts nothing
        assert router.name(NOW) is not None
    router.begin(Route(router.replicas["a"], V0), 1, NOW)
    assert all(replica.in_flight <= 1 for replica in router.replicas.values())
    assert _name(router.name(NOW + NAMED_S)) == ("b", V0)
    router.claim("b", 8)
    assert not router.replicas["b"].named


def test_silence_is_a_failure_only_while_others_answer() -> None:
    router = _router(a=[V0], b=[V0])
    for id in "ab":
        router.begin(Route(router.replicas[id], V0), 1, NOW)
    assert router.strike_stalled(NOW + 100) == ([], [])  # nobody has answered anything so far: servers may be compiling
    lease = router.begin(Route(router.replicas["b"], V0), 1, NOW + 100)
    router.succeeded(lease, NOW + 100 + STALL_S)
    struck, given_up = router.strike_stalled(NOW + 100 + STALL_S)
    assert [replica.id for replica in struck] == ["a"]
    assert [replica.id for replica in given_up] == ["a"]
    assert _name(router.choose(V0, NOW + 100 + STALL_S)) == ("b", V0)
    assert "has answered nothing" in router.why_none(V0)
    assert router.strike_stalled(NOW + 100 + 10 * STALL_S) == ([], [])  # now b is as silent


def test_slow_answers_make_patient() -> None:
    router = _router(a=[V0], b=[V0])
    slow = router.begin(Route(router.replicas["b"], V0), 1, NOW)
    router.succeeded(slow, NOW + 60.0)
    router.end(slow)
    router.begin(Route(router.replicas["a"], V0), 1, NOW + 60.0)
    for i in range(6):
        quick = router.begin(Route(router.replicas["b"], V0), 1, NOW + 60.0 + 20 * i)
        router.succeeded(quick, NOW + 61.0 + 20 * i)
        router.end(quick)
        assert router.strike_stalled(NOW + 61.0 + 20 * i) == ([], [])


_NAMES = st.sampled_from([V0, V1, V2, PROBE, OTHER_RUN])
_REPLICAS = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.booleans(), st.lists(_NAMES, unique=True), st.lists(_NAMES)), max_size=4
)
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from([V0, V1, V2, LATEST]),
        st.integers(1, 16),
        st.sampled_from(["ok", "fault", "denied", "stays"]),
        st.floats(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(_REPLICAS, _EVENTS)
def test_whatever_happens_the_choice_is_sound_and_loads_add_up(
    replicas: dict[str, tuple[bool, list[str], list[str]]], events: list[tuple[str, int, str, float]]
) -> None:
    router, now, open_samples = Router(RUN, memory_s=60.0), NOW, 0
    for id, (ready, proved, quarantined) in replicas.items():
        router.observe(id, URL(f"http://{id}:1"), ready, proved, now, dict.fromkeys(quarantined, "bad"))
    for model, samples, outcome, passed in events:
        now += passed
        route = router.choose(model, now)
        if route is None:
            continue
        ready, proved, quarantined = replicas[route.replica.id]
        assert ready
        assert route.policy in proved
        assert route.policy not in quarantined
        assert route.policy in (V0, V1, V2)
        rivals = [r for r in router.replicas.values() if r.serves((r.newest or "") if model == LATEST else model, now)]
        assert route.replica.in_flight == min(r.in_flight for r in rivals)
        if model == LATEST:
            assert route.policy == max(n for n in proved if n in (V0, V1, V2) and n not in quarantined)
        else:
            assert route.policy == model
        lease = router.begin(route, samples, now)
        if outcome == "stays":
            open_samples += samples
            continue
        if outcome == "ok":
            router.succeeded(lease, now)
        else:
            router.strike(lease, now, outcome, policy_only=outcome == "denied")
            assert not route.replica.serves(route.policy, now)
        router.end(lease)
    assert sum(r.in_flight for r in router.replicas.values()) == open_samples
    # Left alone long enough, everything that is ready and proved can be had again.
    far = now + MAX_DELAY_S + TRIAL_S
    for replica in router.replicas.values():
        assert all(replica.serves(name, far) for name in replica.proved) or not replica.ready
