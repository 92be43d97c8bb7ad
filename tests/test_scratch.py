"""Temporary folders and the deaths of their owners."""

import errno
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from grpo_jax.scratch import Scratch, scratch

_OWNER = """
import sys, time
from grpo_jax.scratch import Scratch
folder = Scratch(sys.argv[1])
(folder.path / "large").write_text("x")
print(folder.path, flush=True)
time.sleep(300)
"""


def test_a_folder_is_empty_and_goes_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch() as one, scratch() as other:
        assert one != other
        assert list(one.iterdir()) == []
        (one / "folder").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_owners_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            theirs = Path(process.stdout.readline().strip())
            Scratch(str(tmp_path)).close()
            assert (theirs / "large").exists()
        finally:
            process.send_signal(signal.SIGKILL)
    Scratch(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "grpo_jax-scratch-of-somebody"
    other.mkdir()
    (other / "lock").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("")
    Scratch(str(tmp_path)).close()
    assert other.exists()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    folder = Scratch(str(tmp_path))
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="no space"):
        Scratch(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
