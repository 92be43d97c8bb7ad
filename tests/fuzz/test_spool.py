"""The reader of spool files: a group, or GroupError; and a group that it hands on is one that can be trained."""

from random import Random

import pytest

from tests.fuzz.profile import fuzz
from tests.fuzz.spool import Coverage, Fuzzer
from tests.fuzz.spool_files import SOUND, mutated, put_together, read, taken_apart


def test_sound_files_are_read() -> None:
    for data in SOUND:
        assert read(data) is not None
        assert read(put_together(*taken_apart(data))) is not None


@fuzz(400)
def test_a_damaged_file_is_refused_or_can_be_trained(rng: Random) -> None:
    data = rng.choice(SOUND)
    for _ in range(rng.choice((1, 1, 3))):
        data = mutated(rng, data)
    read(data)


@fuzz(200)
def test_noise_is_refused(rng: Random) -> None:
    assert read(rng.randbytes(rng.randint(0, 400))) is None


@pytest.mark.parametrize("key", ["started_at", "finished_at", "seed", "replica", "sampler", "policy", "failures"])
def test_provenance_of_another_type_is_refused(key: str) -> None:
    header, tensors = taken_apart(SOUND[0])
    header["provenance"][key] = {"x": 1} if key in ("started_at", "seed") else 3.5 if key != "finished_at" else "now"
    assert read(put_together(header, tensors)) is None


def test_the_fuzzer_finds_what_takes_several_steps_to_reach() -> None:
    def target(data: bytes) -> None:
        if data.startswith(b"{"):
            rest = data[1:]
            if rest.startswith(b'"'):
                rest = rest[1:]
                if rest.startswith(b"\xff"):
                    raise KeyError("planted")

    fuzzer = Fuzzer(target, Random(0), Coverage(frozenset({__file__})), [b"xx"])
    found = None
    while found is None and fuzzer.executions < 20_000:
        found = fuzzer.step()
    assert found is not None
    assert found.startswith("KeyError at test_spool.py")
    assert next(iter(fuzzer.findings.values())).startswith(b'{"\xff')
    assert len(fuzzer.corpus) >= 2
