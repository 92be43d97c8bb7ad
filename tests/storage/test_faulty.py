"""The faults themselves: that each happens, and that nothing else does. What our own formats make of them is tested in
`test_under_faults`."""

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.storage.bucket import Bucket
from grpo_jax.storage.stores import Store, open_store


@pytest.fixture(params=["directory", "memory"])
def below(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "b") if request.param == "directory" else f"memory://{uuid.uuid4()}"


def opened(url: str, key: str = "x") -> tuple[Store, str]:
    store, root = open_store(url)
    return store, f"{root}/{key}"


def outcomes(call: Callable[[], Any], times: int = 200) -> list[str]:
    found = []
    for _ in range(times):
        try:
            call()
            found.append("")
        except (OSError, FileNotFoundError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_without_faults_it_is_the_bucket_below(below: str) -> None:
    store, path = opened(f"faulty::{below}")
    store.write(path, b"1")
    assert store.read(path, 9) == b"1"
    assert store.find(path.rpartition("/")[0]) == [path]
    assert not store.is_local
    plain = Bucket(below)
    assert plain.read("x") == b"1"
    plain.put("y/z", b"2")
    assert Bucket(f"faulty::{below}").child("y").read("z") == b"2"
    store.remove(path)
    store.remove_folder(path.replace("/x", "/y"))
    assert plain.list() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error=0.3", "OSError: 503 Service Unavailable"),
        ("denied=0.3", "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_any_call_may_fail(below: str, fault: str, message: str) -> None:
    Bucket(below).put("x", b"1")
    store, path = opened(f"faulty:{fault}:{below}")
    folder = path.rpartition("/")[0]
    for call in (lambda: store.read(path, 9), lambda: store.write(path, b"1"), lambda: store.find(folder)):
        found = outcomes(call)
        assert set(found) == {"", message}
        assert 30 < found.count(message) < 90


def test_a_full_disk_stops_writes_only(below: str) -> None:
    store, path = opened(f"faulty:full=0.5:{below}")
    assert set(outcomes(lambda: store.write(path, b"1"))) == {"", "OSError: [Errno 28] No space left on device"}
    assert set(outcomes(lambda: store.read(path, 9))) == {""}


def test_half_of_the_writes_that_fail_have_been_done(below: str) -> None:
    store, path = opened(f"faulty:error=1:{below}")
    assert set(outcomes(lambda: store.write(path, b"1"), 40)) == {"OSError: 503 Service Unavailable"}
    assert Bucket(below).read("x") == b"1"


def test_a_seed_and_a_command_line_decide_all_draws(tmp_path: Path) -> None:
    program = """
from grpo_jax.storage.stores import open_store
import sys
store, root = open_store(sys.argv[1])
for i in range(60):
    try:
        store.write(f"{root}/x", b"1")
        print("written")
    except OSError as error:
        print(error)
"""

    def run(options: str) -> str:
        argv = [sys.executable, "-c", program, f"faulty:{options}:{tmp_path}"]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout

    one = run("seed=1,error=0.3,full=0.3")
    assert one == run("seed=1,error=0.3,full=0.3")
    assert one != run("seed=2,error=0.3,full=0.3")


def test_a_torn_write_shows_its_beginning_and_then_all_of_it(below: str) -> None:
    store, path = opened(f"faulty:torn=1:{below}")
    plain, data, done, seen = Bucket(below), bytes(range(250)), threading.Event(), set()

    def write() -> None:
        for _ in range(3):
            store.write(path, data)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        seen.add(plain.read_or_none("x"))
        time.sleep(0.001)
    thread.join()
    assert plain.read("x") == data
    torn = {part for part in seen if part not in (None, data)}
    assert torn
    assert all(part and data.startswith(part) for part in torn)


def test_others_see_an_object_late_and_each_at_its_own_time(below: str) -> None:
    url = f"faulty:late=1.5:{below}"
    store, path = opened(url)
    readers = [opened(url)[0] for _ in range(4)]
    folder = path.rpartition("/")[0]
    store.write(path, b"1")
    assert store.read(path, 9) == b"1"
    assert store.find(folder) == [path]
    order: list[int] = []
    deadline = time.monotonic() + 30
    while len(order) < len(readers) and time.monotonic() < deadline:
        for index, reader in enumerate(readers):
            listed = reader.find(folder)
            try:
                assert reader.read(path, 9) == b"1"
            except FileNotFoundError:
                assert listed == []
                continue
            if index not in order:
                order.append(index)
        time.sleep(0.01)
    assert sorted(order) == [0, 1, 2, 3]
    for value in range(2, 20):
        store.write(path, str(value).encode())
        views = {int(reader.read(path, 9)) for reader in readers}
        assert views <= set(range(1, value + 1))
        if views != {value}:
            return
    raise AssertionError("no reader that cannot see the new object yet has an old one")


def test_an_old_object_is_not_late(below: str) -> None:
    Bucket(below).put("x", b"1")
    time.sleep(0.3)
    store, path = opened(f"faulty:late=0.25:{below}")
    assert store.read(path, 9) == b"1"


def test_a_listing_may_be_old_in_both_ways(below: str) -> None:
    plain, (store, path) = Bucket(below), opened(f"faulty:stale_list=1e6:{below}")
    plain.put("x", b"1")
    folder = path.rpartition("/")[0]
    assert store.find(folder) == [path]
    plain.delete("x")
    plain.put("y", b"1")
    assert store.find(folder) == [path]
    fresh, _ = opened(f"faulty:stale_list=1e6:{below}")
    assert fresh.find(folder) == [path.replace("/x", "/y")]


def test_a_write_that_was_held_back_lands_on_a_later_one(below: str) -> None:
    plain = Bucket(below)
    store, path = opened(f"faulty:reorder=0.5:{below}")
    last, wrong = b"", 0
    for i in range(40):
        last = str(i).encode()
        store.write(path, last)
        assert store.read(path, 9) in {str(k).encode() for k in range(i + 1)}
        time.sleep(0.05)
        wrong += plain.read_or_none("x") not in (None, last)
    assert wrong > 0


def test_what_is_held_back_lands_when_the_process_ends(tmp_path: Path) -> None:
    program = f"""
from grpo_jax.storage.bucket import Bucket
bucket = Bucket("faulty:reorder=1:{tmp_path}")
bucket.put("a/x", b"1")
bucket.put("y", b"2")
print(bucket.read("a/x"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'1'\n", "")
    plain = Bucket(str(tmp_path))
    assert {key: plain.read(key) for key in plain.list()} == {"a/x": b"1", "y": b"2"}


def test_a_slow_bucket_takes_its_time_for_each_object_written(below: str) -> None:
    store, path = opened(f"faulty:slow=0.2:{below}")
    started = time.monotonic()
    for _ in range(2):
        store.write(path, b"1")
    assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize("url", ["faulty:", "faulty:late=1", "faulty:late=1:", "faulty:mood=1:/x", "faulty:late=x:/x"])
def test_a_url_that_cannot_be_read_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="faulty"):
        Bucket(url)
