"""`grpo-jax export --to hub:…` with the real client, against a Hub on loopback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_jax.storage.bucket import Bucket
from tests.adapters.hub_repos import Repos
from tests.fakes.hub import FakeHub
from tests.observability import synthetic
from tests.storage.test_hf_bucket import TOKEN


@dataclass
class Place:
    hub: FakeHub
    repos: Repos
    run: Bucket
    home: Path

    def export(self, *arguments: str, token: str | None = TOKEN) -> tuple[int, str, str]:
        env = {k: v for k, v in os.environ.items() if k not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")}
        env |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), **({"HF_TOKEN": token} if token else {})}
        command = [sys.executable, "-m", "grpo_jax.cli", "export", str(self.run.local_path()), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    bucket = Bucket(str(tmp_path / "bucket"))
    run = synthetic.write_run(bucket, tmp_path / "bucket" / synthetic.RUN)
    synthetic.publish(run, 10)
    hub, repos = FakeHub(tmp_path / "hub", token=TOKEN), Repos()
    hub.areas.append(repos)
    with hub:
        yield Place(hub, repos, run, tmp_path / "home")


def test_an_adapter_goes_up_in_one_commit_and_private(place: Place) -> None:
    code, out, err = place.export("--to", "hub:someone/toy-adapter")
    assert (code, err) == (0, "")
    assert out.endswith("/someone/toy-adapter")
    repo = place.repos.repos["someone/toy-adapter"]
    assert repo["private"] is True
    assert repo["messages"] == [f"{synthetic.policy(10)}, exported by grpo_jax"]
    assert {k: v for k, v in repo["files"].items() if k in synthetic.files(10)} == synthetic.files(10)
    assert b"| Held-out reward, this policy | 0.94 |" in repo["files"]["README.md"]
    assert b"hf_abcdefgh" not in repo["files"]["README.md"]


def test_public_is_asked_for_and_an_existing_repository_is_taken(place: Place) -> None:
    assert place.export("--to", "hub:someone/toy", "--public")[0] == 0
    assert place.repos.repos["someone/toy"]["private"] is False
    assert place.export("--to", "hub:someone/toy")[0] == 0
    assert len(place.repos.repos["someone/toy"]["messages"]) == 2


def test_without_a_token_nothing_is_sent(place: Place) -> None:
    code, _, err = place.export("--to", "hub:someone/toy", token=None)
    assert code == 2
    assert err.startswith("grpo-jax: the Hub wants a token")
    assert "\n" not in err
    assert place.hub.requests == []


def test_a_refusal_is_one_sentence_without_the_token(place: Place) -> None:
    code, _, err = place.export("--to", "hub:someone/toy", token="hf_anothertokenentirely")
    assert code == 2
    assert err.startswith("grpo-jax: the Hub did not take someone/toy: ")
    assert "\n" not in err
    assert "hf_anothertokenentirely" not in err
    assert place.repos.repos == {}


@pytest.mark.parametrize("target", ["hub:", "hub:toy", "hub:a/b/c", "hub:some one/toy", "hub:../toy"])
def test_what_is_no_repository(place: Place, target: str) -> None:
    code, _, err = place.export("--to", target)
    assert code == 2
    assert "names no repository" in err
    assert place.hub.requests == []
