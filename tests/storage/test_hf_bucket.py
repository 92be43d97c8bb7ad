"""The facade on `hf://buckets/`, through the real huggingface_hub client, against a Hub on loopback."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.storage.bucket import Bucket
from tests.fakes.hub import FakeHub
from tests.storage.remote import check_freshness, run_check

TOKEN = "hf_thisisnotoneofthehubs"


@dataclass(frozen=True)
class Hub:
    server: FakeHub
    env: dict[str, str]

    def bucket(self) -> str:
        """The URL of a folder in a new bucket."""
        name = f"someone/b-{uuid.uuid4().hex[:8]}"
        program = f"from huggingface_hub import HfApi; HfApi().create_bucket({name!r})"
        done = subprocess.run([sys.executable, "-c", program], env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return f"hf://buckets/{name}/runs"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    with FakeHub(folder / "data", token=TOKEN, page_size=10) as server:
        home = str(folder / "home")
        yield Hub(server, {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HOME": home})


@pytest.mark.parametrize(
    "check",
    ["verbs", "many", "side_by_side", "sizes", "publish", "spool", pytest.param("checkpoint", marks=pytest.mark.slow)],
)
def test_a_bucket_of_the_hub(hub: Hub, check: str) -> None:
    run_check(check, hub.bucket(), hub.env)


def test_the_bucket_itself_can_be_used_without_a_prefix(hub: Hub) -> None:
    run_check("verbs", hub.bucket().removesuffix("/runs"), hub.env)


def test_what_one_process_writes_another_sees_at_once(hub: Hub) -> None:
    check_freshness(hub.bucket(), hub.env)


def test_a_read_is_one_question_to_the_hub(hub: Hub) -> None:
    url = hub.bucket()
    name = url.split("/")[4]
    run_check("sizes", url, hub.env)
    paths = [path for method, path in hub.server.requests if method == "GET" and name in path]
    assert any("/resolve/" in path for path in paths)
    assert not any("/tree" in path or path.endswith(name) for path in paths)


def test_a_bucket_that_does_not_exist_is_named(hub: Hub) -> None:
    url = "hf://buckets/someone/nothing"
    assert f"writing 'x' in {url} failed: " in run_check("no_such_bucket", url, hub.env)


def test_a_wrong_token_is_an_error_that_does_not_tell_it(hub: Hub) -> None:
    url, token = hub.bucket(), "hf_anotheronethatiswrong"
    told = run_check("denied", url, {**hub.env, "HF_TOKEN": token})
    assert f"reading 'x' in {url} failed" in told
    assert "401" in told
    assert token not in told


@pytest.mark.parametrize("url", ["hf://buckets/", "hf://buckets/someone", "hf://buckets//name"])
def test_a_url_without_a_bucket_is_a_usage_error(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hf://buckets"):
        Bucket(url)
