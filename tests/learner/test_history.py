from grpo_jax.learner.history import History


def record(step, *groups, drops=()):
    files = [(f"rollouts/w0/{group}.safetensors", 10) for group in groups]
    return {"step": step, "groups": list(groups), "files": files, "drops": dict.fromkeys(drops, "stale")}


def history():
    return History({0: record(0, "a", "b"), 1: record(1, "c", "d", drops=["x"]), 2: record(2, "e", drops=["x", "y"])})


def test_what_a_restart_after_some_steps_knows():
    it = history()
    assert it.trained_before(2) == {"a", "b", "c", "d"}
    assert it.drops_before(2) == {"x": "stale"}
    assert it.drops_before(1) == {}
    assert it.steps == 3
    assert it.files["c"] == "rollouts/w0/c.safetensors"


def test_settled_is_what_no_later_step_can_ask_for_oldest_first():
    assert list(history().settled_before(2).items()) == [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("x", 1)]
    assert list(history().settled_before(0)) == []


def test_a_new_record_gives_up_those_that_followed_the_one_in_its_place():
    it = history()
    it.add(record(1, "e", drops=["a2"]))
    assert it.steps == 2
    assert it.record(2) is None
    assert it.groups == {"a", "b", "e"}
    assert it.settled_before(9) == {"a": 0, "b": 0, "a2": 1, "e": 1}


def test_a_record_says_what_it_adds_and_earlier_ones_said_all():
    adding = History({0: record(0, "a", drops=["w"]), 1: record(1, "b", drops=["x"]), 2: record(2, drops=["y"])})
    of_old = History({0: record(0, "a", drops=["w"]), 1: record(1, "b", drops=["w", "x"]), 2: record(2, drops="wxy")})
    for it in (adding, of_old):
        assert it.drops_before(2) == {"w": "stale", "x": "stale"}
        assert [it.dropped(step)["stale"] for step in range(3)] == [1, 2, 3]
        assert it.unrecorded({"a": "stale", "x": "stale", "z": "invalid"}) == {"z": "invalid"}
        it.add(record(1, "c", drops=["z"]))
        assert it.dropped(1).total() == 2
        assert it.unrecorded({"x": "stale", "z": "stale"}) == {"x": "stale"}
