import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax.adapters.manifest import AdapterError, download_adapter, read_manifest
from grpo_jax.adapters.names import parse_policy
from grpo_jax.adapters.peft import read_adapter, update_norm
from grpo_jax.adapters.publisher import AdapterSpec, Publisher
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.records import RecordReader, seal
from tests.learner.tiny import LORA, MODEL, base_and_lora

SPEC = AdapterSpec("tiny", LORA.rank, LORA.alpha, LORA.rslora, LORA.scale, "some/model", "d" * 64)
TOKENS = np.arange(8)
LOGPROBS = -np.ones(7)


def publisher(run, **kwargs):
    return Publisher(run, SPEC, 1, window=2, canary_tokens=TOKENS, to_host=jax.device_get, **kwargs)


def lora(scale=1.0):
    return jax.tree.map(lambda x: x * scale, base_and_lora()[1])


def test_a_published_adapter_comes_back_whole_and_its_name_says_what_it_is(tmp_path):
    run = Bucket(str(tmp_path / "bucket/tiny"))
    pub = publisher(run)
    probe = pub.publish_probe(lora(2.0), LOGPROBS)
    pub.submit(0, 0, lora(), LOGPROBS)
    assert pub.flush(30)
    pointer = RecordReader(run, "policy.json").read()
    assert pointer["probe"] == probe
    assert pointer["window"] == [pointer["current"]]
    manifest = read_manifest(run, pointer["current"])
    assert parse_policy(manifest.name)[:2] == ("tiny", 0)
    assert manifest.targets == sorted(LORA.targets)
    tree, config = read_adapter(download_adapter(run, manifest, tmp_path / "local"), MODEL.num_layers)
    jax.tree.map(np.testing.assert_array_equal, tree, jax.device_get(lora()))
    assert (config["r"], config["lora_alpha"]) == (LORA.rank, LORA.alpha)


def test_equal_weights_have_equal_names_and_others_have_not(tmp_path):
    names = []
    for i, scale in enumerate((1.0, 1.0, 1.0001)):
        pub = publisher(Bucket(str(tmp_path / str(i))))
        pub.submit(3, 3, lora(scale), LOGPROBS)
        assert pub.flush(30)
        names.append(pub.newest.name)
    assert names[0] == names[1] != names[2]


def test_the_window_holds_the_newest_versions(tmp_path):
    run = Bucket(str(tmp_path))
    pub = publisher(run)
    for version in range(4):
        pub.submit(version, version, lora(1 + version), LOGPROBS)
        assert pub.flush(30)
    pointer = RecordReader(run, "policy.json").read()
    assert [parse_policy(name).version for name in pointer["window"]] == [3, 2]
    assert pointer["current"] == pointer["window"][0]


def test_a_slow_bucket_never_holds_the_loop_up_and_the_newest_wins(tmp_path, monkeypatch):
    run = Bucket(str(tmp_path))
    gate = threading.Event()
    write = Bucket.put
    monkeypatch.setattr(Bucket, "put", lambda self, key, data: (gate.wait(30), write(self, key, data))[1])
    pub = publisher(run)
    for version in range(5):  # none of these could return if it waited for the bucket
        pub.submit(version, version, lora(1 + version), LOGPROBS)
    assert not pub.flush(0.05)
    gate.set()
    assert pub.flush(30)
    assert pub.newest.version == 4
    assert pub.skipped + len(pub.published) == 5
    assert pub.skipped >= 3


def test_a_bucket_that_fails_for_a_moment_is_tried_again(tmp_path, monkeypatch):
    run, failures = Bucket(str(tmp_path)), iter([OSError("503"), None])
    write = Bucket.put

    def put(self, key, data):
        error = next(failures, None)
        if error is not None:
            raise error
        write(self, key, data)

    monkeypatch.setattr(Bucket, "put", put)
    pub = publisher(run)
    pub.submit(0, 0, lora(), LOGPROBS)
    assert pub.flush(30)
    assert pub.newest.version == 0


def test_a_bucket_that_is_gone_for_long_is_waited_for_and_only_the_newest_version_counts(tmp_path, monkeypatch):
    run, is_gone = Bucket(str(tmp_path)), threading.Event()
    is_gone.set()
    write = Bucket.put

    def put(self, key, data):
        if is_gone.is_set():
            raise OSError("no route to the bucket")
        write(self, key, data)

    monkeypatch.setattr(Bucket, "put", put)
    monkeypatch.setattr("grpo_jax.adapters.publisher._FIRST_PAUSE_S", 0.01)
    pub = publisher(run)
    for version in range(3):
        pub.submit(version, version, lora(1 + version), LOGPROBS)
        assert not pub.flush(0.2)
    assert "no route" in pub.trouble
    is_gone.clear()
    assert pub.flush(30)
    assert pub.trouble is None
    assert [published.version for published in pub.published] == [2]
    assert pub.skipped == 2


def test_a_write_that_lands_late_does_not_move_the_pointer_back_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_jax.adapters.publisher._LOOK_AT_POINTER_S", 0.05)
    run = Bucket(str(tmp_path))
    pub = publisher(run)
    pub.submit(0, 0, lora(1), LOGPROBS)
    assert pub.flush(30)
    old = run.read("policy.json")
    pub.submit(1, 1, lora(2), LOGPROBS)
    assert pub.flush(30)
    run.replace("policy.json", old)
    deadline = time.monotonic() + 30
    while RecordReader(run, "policy.json").read()["current"] != pub.newest.name and time.monotonic() < deadline:
        time.sleep(0.01)
    assert RecordReader(run, "policy.json").read()["current"] == pub.newest.name


def test_the_pointer_of_a_learner_that_took_over_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_jax.adapters.publisher._LOOK_AT_POINTER_S", 0.02)
    run = Bucket(str(tmp_path))
    pub = publisher(run)
    pub.submit(0, 0, lora(1), LOGPROBS)
    assert pub.flush(30)
    taken_over = seal({"current": "another"}, incarnation=2, seq=1)
    run.replace("policy.json", taken_over)
    time.sleep(0.3)
    assert run.read("policy.json") == taken_over


def test_what_stops_the_publisher_reaches_the_loop(tmp_path):
    pub = publisher(Bucket(str(tmp_path)))
    pub.submit(0, 0, lora(), LOGPROBS[:-1] * np.nan)
    with pytest.raises(ValueError, match="finite number"):
        pub.flush(30)
    with pytest.raises(ValueError, match="finite number"):
        pub.submit(1, 1, lora(), LOGPROBS)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_corrupt_or_missing_file_is_named_and_leaves_nothing_behind(tmp_path, file):
    run = Bucket(str(tmp_path / "run"))
    pub = publisher(run)
    pub.submit(0, 0, lora(), LOGPROBS)
    assert pub.flush(30)
    manifest = read_manifest(run, pub.newest.name)
    key = f"adapters/{manifest.name}/{file}"
    data = bytearray(run.read(key))
    data[len(data) // 2] ^= 1
    run.replace(key, bytes(data))
    with pytest.raises(AdapterError, match=f"{file} does not match its manifest"):
        download_adapter(run, manifest, tmp_path / "local")
    run.delete(key)
    with pytest.raises(AdapterError, match=f"{file} is missing"):
        download_adapter(run, manifest, tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_an_adapter_under_the_name_of_another_is_refused(tmp_path):
    run = Bucket(str(tmp_path / "run"))
    pub = publisher(run)
    for version in range(2):
        pub.submit(version, version, lora(1 + version), LOGPROBS)
        assert pub.flush(30)
    old, new = (read_manifest(run, pub.lineage[v]) for v in (0, 1))
    for file in old.files:
        run.replace(f"adapters/{new.name}/{file}", run.read(f"adapters/{old.name}/{file}"))
    forged = new.model_copy(update={"files": old.files, "digest": old.digest})
    with pytest.raises(AdapterError, match="does not have the digest in its name"):
        download_adapter(run, forged, tmp_path / "local")


def test_the_norm_is_that_of_the_whole_update():
    tree = jax.device_get(lora())
    total = 0.0
    for block in tree["layers"].values():
        for factors in block.values():
            total += sum(
                np.sum((a.astype(float) @ b.astype(float)) ** 2)
                for a, b in zip(factors["a"], factors["b"], strict=True)
            )
    assert update_norm(tree, LORA.scale) == pytest.approx(LORA.scale * total**0.5)
