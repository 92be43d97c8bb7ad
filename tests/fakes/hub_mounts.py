"""A bucket as a directory: what a job sees at the mount path of a volume."""

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, get_session


@dataclass(frozen=True)
class _Known:
    """A file that was equal on both sides, as both sides show it. `hash` is None until the Hub was seen with it."""

    stamp: tuple[int, int, int]
    hash: str | None


class Mount:
    """Keeps `folder` equal to (a folder of) a bucket from `start` to `stop`, both ways, through the real client.

    Like the real mount it is late: `close()` returns before the upload, others' writes show up a moment later, a rename
    is many writes, and what a machine had not sent when it was lost is lost. Of a file that both sides have changed
    the local one wins.
    """

    def __init__(
        self,
        url: str,
        token: str,
        bucket: str,
        folder: Path,
        prefix: str = "",
        *,
        read_only: bool = False,
        every_s: float = 0.25,
    ):
        disable_progress_bars()
        self.folder, self._bucket, self._read_only, self._every_s = folder, bucket, read_only, every_s
        self._url, self._prefix = url, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._api = HfApi(endpoint=url, token=token)
        self._known: dict[str, _Known] = {}
        self._staging = folder.with_name(f".{folder.name}.staging")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mount-{folder.name}", daemon=True)
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Returns with the bucket's content in the folder."""
        self._pull()
        self._thread.start()

    def stop(self, *, flush: bool) -> None:
        """`flush`: what has been written is sent first; False: the machine is lost."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if flush:
            self._push()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._push()
                self._pull()
            except Exception as error:  # the Hub is gone or ordered to fail: there is a next time
                print(f"mount of {self._bucket}: {error!r}")

    def _push(self) -> None:
        if self._read_only:
            return
        local = self._local()
        changed = {
            key: stamp for key, stamp in local.items() if key not in self._known or self._known[key].stamp != stamp
        }
        gone = [key for key in self._known if key not in local]
        add: dict[str, bytes] = {}
        for key in changed:
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                add[key] = (self.folder / key).read_bytes()
        if add:
            self._api.batch_bucket_files(self._bucket, add=[(data, self._prefix + key) for key, data in add.items()])
        self._known |= {key: _Known(changed[key], None) for key in add}
        if gone:
            with contextlib.suppress(HfHubHTTPError):  # deleted on the other side, too
                self._api.batch_bucket_files(self._bucket, delete=[self._prefix + key for key in gone])
        for key in gone:
            del self._known[key]

    def _pull(self) -> None:
        entries = self._api.list_bucket_tree(self._bucket, self._prefix.rstrip("/") or None, recursive=True)
        remote = {entry.path.removeprefix(self._prefix): entry.xet_hash for entry in entries if entry.type == "file"}
        local = {} if self._read_only else self._local()
        for key, hash in remote.items():
            known = self._known.get(key)
            if known is not None and known.hash is None:
                self._known[key] = _Known(known.stamp, hash)
            elif known is None or known.hash != hash:
                if key in local and (known is None or known.stamp != local[key]):
                    continue  # changed here meanwhile
                self._download(key, hash)
        for key in [key for key in self._known if key not in remote]:
            if local.get(key) in (None, self._known[key].stamp):
                (self.folder / key).unlink(missing_ok=True)
                del self._known[key]

    def _download(self, key: str, hash: str) -> None:
        url = f"{self._url}/buckets/{self._bucket}/resolve/{quote(self._prefix + key, safe='')}"
        answer = get_session().get(url, headers=self._api._build_hf_headers(), follow_redirects=True)
        if answer.status_code == 404:
            return
        answer.raise_for_status()
        target = self.folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        self._staging.write_bytes(answer.content)
        stamp = _stamp(self._staging)
        self._staging.replace(target)
        self._known[key] = _Known(stamp, hash)

    def _local(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for path in self.folder.rglob("*"):
            try:
                if path.is_file():
                    found[path.relative_to(self.folder).as_posix()] = _stamp(path)
            except FileNotFoundError:
                continue
        return found


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
