"""Group files: what goes in comes out, and what is damaged is a GroupError, whatever the damage."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from grpo_jax.rollouts.sample import Group, GroupError, GroupId, Provenance, Sample, _checksum

PROVENANCE = Provenance(
    policy="toy.v000003.0123abcd",
    replica="r1",
    problem_id="3+4",
    seed=2**63 - 1,
    sampler={"temperature": 1.0, "stop": ["\n"]},
    started_at=1.5,
    finished_at=2.25,
    answer={"value": 7},
    failures=("sample 2: lost",),
)
GROUP = Group(
    GroupId(1, 70, 2),
    np.array([5, 6, 7], np.int32),
    (
        Sample(
            np.array([8, 9], np.int32), np.array([-0.5, -1.25], np.float32), 1.0, {"x": 1.0, "y": None}, "é 7", "stop"
        ),
        Sample(np.array([8], np.int32), np.array([-3.0], np.float32), None, {"x": None}, "", "length"),
        Sample(np.zeros(0, np.int32), np.zeros(0, np.float32), None, {}, "", "failed"),
        Sample(np.array([9], np.int32), np.array([0.0], np.float32), 0.0, {"x": 0.0}, "zero", "stop"),
    ),
    PROVENANCE,
)
DATA = GROUP.to_bytes()


def parts() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    header = json.loads(DATA[8 : 8 + int.from_bytes(DATA[:8], "little")])
    return load(DATA), json.loads(header["__metadata__"]["group"].partition(" ")[2])


def sealed(tensors: dict[str, np.ndarray], header: Any) -> bytes:
    """A file that is whole and has the right checksum, whatever is in it."""
    text = json.dumps(header)
    return save(tensors, {"group": f"{_checksum(tensors, text)} {text}"})


def equal(a: Group, b: Group) -> bool:
    same = (a.id, a.provenance, len(a.samples)) == (b.id, b.provenance, len(b.samples))
    return (
        same
        and np.array_equal(a.prompt_tokens, b.prompt_tokens)
        and all(
            np.array_equal(x.tokens, y.tokens)
            and np.array_equal(x.logprobs, y.logprobs)
            and (x.reward, x.reward_parts, x.text, x.finish_reason)
            == (y.reward, y.reward_parts, y.text, y.finish_reason)
            for x, y in zip(a.samples, b.samples, strict=True)
        )
    )


def test_what_goes_in_comes_out() -> None:
    found = Group.from_bytes(DATA)
    assert equal(found, GROUP)
    assert found.version == 3
    assert found.rewards.dtype == np.float64
    np.testing.assert_array_equal(found.rewards, [1.0, np.nan, np.nan, 0.0])
    # Writing a group again writes the same bytes.
    assert {found.to_bytes() for _ in range(20)} == {DATA}


def test_arrays_that_are_not_contiguous_or_of_another_integer_type_survive() -> None:
    wide = np.arange(12, dtype=np.int64).reshape(3, 4)
    group = Group(
        GroupId(0, 0),
        wide.T[1],
        (Sample(wide.T[2], np.arange(6, dtype=np.float64)[::2], 0.5, {}, "", "stop"),),
        PROVENANCE,
    )
    found = Group.from_bytes(group.to_bytes())
    assert found.prompt_tokens.tolist() == [1, 5, 9]
    assert found.samples[0].tokens.tolist() == [2, 6, 10]
    assert found.samples[0].logprobs.tolist() == [0.0, 2.0, 4.0]


def test_every_flipped_byte_is_noticed() -> None:
    for place in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[place] ^= 0x01
        try:
            found = Group.from_bytes(bytes(damaged))
        except GroupError:
            continue
        # Only what safetensors itself does not read may differ without a trace: spaces that pad its header.
        assert equal(found, GROUP), f"byte {place} was changed and the group with it"


def test_every_truncation_is_noticed() -> None:
    for length in range(len(DATA)):
        with pytest.raises(GroupError):
            Group.from_bytes(DATA[:length])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", np.zeros(4, np.int64)),
        ("tokens", np.zeros((2, 2), np.int32)),
        ("tokens", np.zeros(3, np.int32)),
        ("tokens", np.array([8, 9, 8, -9], np.int32)),
        ("logprobs", np.zeros(4, np.float64)),
        ("logprobs", np.zeros(5, np.float32)),
        ("lengths", np.array([2, 1, 1], np.int32)),
        ("lengths", np.array([3, 1, -1, 1], np.int32)),
        ("prompt_tokens", np.zeros(0, np.int32)),
        ("prompt_tokens", np.array([-1], np.int32)),
        ("prompt_tokens", np.array([1.0], np.float32)),
        ("rewards", np.zeros(4, np.float32)),
        ("rewards", np.zeros(3, np.float64)),
        ("rewards", np.array([np.inf, 0, 0, 0])),
        ("rewards", None),
    ],
)
def test_tensors_that_do_not_fit_are_refused_even_with_a_right_checksum(name: str, value: np.ndarray | None) -> None:
    tensors, header = parts()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    with pytest.raises(GroupError):
        Group.from_bytes(sealed(tensors, header))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", "e001.i000070"),
        ("id", 7),
        ("samples", []),
        ("samples", [None] * 4),
        ("samples", [{}] * 4),
        ("provenance", None),
        ("provenance", {}),
        ("provenance.policy", "toy.probe.0123abcd"),
        ("provenance.policy", "HuggingFaceTB/SmolLM2"),
        ("provenance.policy", None),
        ("provenance.failures", None),
        ("provenance.unknown", 1),
    ],
)
def test_headers_that_do_not_fit_are_refused_even_with_a_right_checksum(key: str, value: Any) -> None:
    tensors, header = parts()
    node = header
    *path, last = key.split(".")
    for part in path:
        node = node[part]
    node[last] = value
    with pytest.raises(GroupError):
        Group.from_bytes(sealed(tensors, header))


def test_the_sealed_helper_makes_sound_files() -> None:
    """Else the two tests above would pass whatever they change."""
    assert equal(Group.from_bytes(sealed(*parts())), GROUP)


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=60).map(lambda tail: len(tail).to_bytes(8, "little") + tail),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: st.dictionaries(st.sampled_from(["__metadata__", "group", "x"]), inner, max_size=3),
            max_leaves=6,
        ).map(lambda value: len(text := json.dumps(value).encode()).to_bytes(8, "little") + text),
    )
)
def test_bytes_of_any_kind_are_a_group_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(GroupError):
        Group.from_bytes(data)


@given(st.integers(0, 5000), st.integers(0, 10**8), st.integers(0, 300))
def test_group_ids_can_be_read_back_however_long_the_run(epoch: int, index: int, attempt: int) -> None:
    group_id = GroupId(epoch, index, attempt)
    assert GroupId.parse(str(group_id)) == group_id


@pytest.mark.parametrize(
    "text",
    ["", "e000.i000000", "e000.i000000.a0", "e0000.i000000.a00", "e٠٠٠.i000000.a00", "e000.i000000.a00\n", "../x"],
)
def test_only_the_one_spelling_of_a_group_id_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="is not a group id"):
        GroupId.parse(text)
