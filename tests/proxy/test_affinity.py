import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.proxy import affinity
from grpo_jax.proxy.affinity import BLOCK_BYTES, BLOCK_TOKENS, FAN_OUT, MAX_BLOCKS, Affinity, prompt_chain
from tests.proxy.harness import V0, V1

_TOKENS = st.lists(st.integers(0, 200_000), max_size=5 * BLOCK_TOKENS)


def _held(table: Affinity, prompt: object, policy: str = V0) -> list[int]:
    """Who holds the longest specific prefix that anyone holds."""
    levels = table.levels(prompt_chain(prompt), [policy])
    return next(([id for _, id in level] for level in levels if level), [])


@given(_TOKENS, _TOKENS, _TOKENS)
def test_two_prompts_share_exactly_the_blocks_that_they_begin_with(
    head: list[int], one: list[int], other: list[int]
) -> None:
    a, b = head + one, head + other
    shared = 0
    for x, y in zip(prompt_chain(a), prompt_chain(b), strict=False):
        if x != y:
            break
        shared += 1
    same = 0
    while (block := a[same : same + BLOCK_TOKENS]) and block == b[same : same + BLOCK_TOKENS]:
        same += BLOCK_TOKENS
    assert shared == -(-min(same, len(a)) // BLOCK_TOKENS)
    assert len(prompt_chain(a)) == -(-len(a) // BLOCK_TOKENS)


def test_texts_and_chats_have_prefixes_too() -> None:
    head = "x" * 2 * BLOCK_BYTES
    one, other = prompt_chain(head + "a"), prompt_chain(head + "b")
    assert (one[:2], len(one)) == (other[:2], 3)
    assert one[2] != other[2]
    system = {"role": "system", "content": "y" * 3 * BLOCK_BYTES}
    chats = [prompt_chain([system, {"role": "user", "content": text}]) for text in ("a", "b")]
    assert len(set(chats[0]) & set(chats[1])) >= 3
    assert chats[0][-1] != chats[1][-1]
    reordered = [dict(reversed(system.items())), {"content": "a", "role": "user"}]
    assert prompt_chain(reordered) == chats[0]
    assert prompt_chain("7") != prompt_chain([55])


def test_the_end_of_a_very_long_prompt_counts_as_one_block() -> None:
    long = list(range((MAX_BLOCKS + 50) * BLOCK_TOKENS))
    chain, other = prompt_chain(long), prompt_chain([*long[:-1], 0])
    assert len(chain) == MAX_BLOCKS + 1
    assert chain[:-1] == other[:-1]
    assert chain[-1] != other[-1]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        5,
        {},
        [[1, 2]],
        ["a", "b"],
        [1, "a"],
        [1.5],
        [1, None],
        [2**70],
        [{"a": 1}, object()],
        [None],
        True,
    ],
)
def test_what_is_not_one_prompt_has_no_prefixes(prompt: object) -> None:
    assert prompt_chain(prompt) == ()
    assert Affinity().note((), V0, 1) == (False, False)


def test_lone_surrogates_are_text_like_any_other() -> None:
    assert len(prompt_chain(json.loads('"\\ud800"'))) == 1


def test_it_remembers_who_was_sent_a_prompt_for_each_policy_apart() -> None:
    table, prompt = Affinity(), list(range(26))
    assert table.note(prompt_chain(prompt), V0, 1) == (False, False)
    assert _held(table, prompt) == [1]
    assert _held(table, prompt, V1) == []
    assert table.note(prompt_chain(prompt), V1, 1) == (False, False)
    assert table.note(prompt_chain(prompt), V0, 2) == (True, False)
    assert table.note(prompt_chain(prompt), V0, 1) == (True, True)
    assert sorted(_held(table, prompt)) == [1, 2]


def test_the_next_turn_of_a_conversation_finds_the_last_one() -> None:
    table, turn = Affinity(), list(range(3 * BLOCK_TOKENS))
    table.note(prompt_chain(turn), V0, 1)
    table.note(prompt_chain([9, *turn]), V0, 2)
    assert _held(table, [*turn, 1, 2, 3]) == [1]


def test_a_prefix_that_goes_on_in_many_ways_attracts_nothing_nor_does_what_it_begins_with() -> None:
    table, system = Affinity(), list(range(2 * BLOCK_TOKENS))
    for i in range(FAN_OUT):
        table.note(prompt_chain([*system, i]), V0, i)
    assert _held(table, [*system, 1000]) != []  # so far it might be one prompt's own
    table.note(prompt_chain([*system, FAN_OUT]), V0, FAN_OUT)
    assert _held(table, [*system, 1000]) == []
    assert _held(table, [*system, 3]) == [3]  # the prompts themselves still are where they were


def test_what_is_common_is_known_of_a_new_policy_at_once() -> None:
    table, system = Affinity(), list(range(BLOCK_TOKENS))
    for i in range(FAN_OUT + 1):
        table.note(prompt_chain([*system, i]), V0, i)
    table.note(prompt_chain([*system, 0]), V1, 7)
    assert _held(table, [*system, 1], V1) == []
    assert _held(table, [*system, 0], V1) == [7]


def test_the_same_prompts_again_do_not_make_their_beginning_common() -> None:
    table, system = Affinity(max_prefixes=3), list(range(BLOCK_TOKENS))
    for i in range(20 * FAN_OUT):
        table.note(prompt_chain([*system, i % 3]), V0, i % 3)
    assert _held(table, [*system, 1000]) != []


@given(st.lists(st.tuples(_TOKENS, st.sampled_from([V0, V1]), st.integers(0, 40)), max_size=60))
def test_its_memory_is_bounded_and_the_last_prompt_is_in_it(sent: list[tuple[list[int], str, int]]) -> None:
    table = Affinity(max_prefixes=12)
    for prompt, policy, replica in sent:
        table.note(prompt_chain(prompt), policy, replica)
        assert len(table) <= 12
        assert replica in _held(table, prompt, policy) or not prompt
    assert all(prefix.continuations >= 0 for prefix in table._prefixes.values())
    assert all(len(holders) <= affinity._MAX_HOLDERS for holders in table._holders.values())
