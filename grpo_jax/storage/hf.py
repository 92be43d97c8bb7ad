"""Buckets of the Hugging Face Hub (`hf://buckets/<namespace>/<name>[/<prefix>]`), through huggingface_hub's client.

Its fsspec filesystem decides by cached listings of whole folders what exists, so a read there costs a listing and may
miss what another job has just written. Here every verb is one question to the Hub, and nothing is remembered. Token and
endpoint are the client's own (`HF_TOKEN` or a login, `HF_ENDPOINT`).
"""

from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, hf_raise_for_status, http_stream_backoff

from grpo_jax.storage.stores import TooLarge

_URL = "hf://buckets/"
_ONCE: dict[str, Any] = {"retry_on_exceptions": (), "retry_on_status_codes": ()}


def open_hub(url: str) -> "tuple[HubStore, str]":
    """The store of a bucket's URL, and the path of the prefix in it; ValueError if it names no bucket."""
    path = url.removeprefix(_URL).strip("/")
    namespace, _, rest = path.partition("/")
    name, _, _ = rest.partition("/")
    if not namespace or not name:
        raise ValueError(f"{_URL}<namespace>/<name> is what it must begin with")
    return HubStore(f"{namespace}/{name}"), path


class HubStore:
    """One bucket; paths begin with its id."""

    is_local = False

    def __init__(self, bucket_id: str):
        self._id, self._api = bucket_id, HfApi()
        # Else the client draws bars for every heartbeat. It knows no finer switch.
        disable_progress_bars()

    def read(self, path: str, limit: int) -> bytes:
        url = f"{self._api.endpoint}/buckets/{self._id}/resolve/{quote(self._inside(path), safe='')}"
        headers = self._api._build_hf_headers()
        try:
            with http_stream_backoff(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, **_ONCE
            ) as response:
                hf_raise_for_status(response)
                data = bytearray()
                for part in response.iter_bytes():
                    data += part
                    if len(data) > limit:
                        raise TooLarge(limit)
                return bytes(data)
        except EntryNotFoundError:
            raise FileNotFoundError(path) from None

    def write(self, path: str, data: bytes) -> None:
        try:
            self._api.batch_bucket_files(self._id, add=[(data, self._inside(path))])
        except ConnectionError:
            # The uploader calls a bucket that is missing or forbidden a network error; this says what it is.
            self._api.bucket_info(self._id)
            raise

    def find(self, path: str) -> list[str]:
        try:
            entries = list(self._api.list_bucket_tree(self._id, self._inside(path) or None, recursive=True))
        except EntryNotFoundError:
            return []
        return [f"{self._id}/{entry.path}" for entry in entries if entry.type == "file"]

    def remove(self, path: str) -> None:
        self._delete([self._inside(path)])

    def remove_folder(self, path: str) -> None:
        below = f"{self._inside(path)}/"
        self._delete([key for key in map(self._inside, self.find(path)) if key.startswith(below)])

    def modified(self, path: str) -> float:
        for info in self._api.get_bucket_paths_info(self._id, [self._inside(path)]):
            if info.uploaded_at is not None:
                return info.uploaded_at.timestamp()
        raise FileNotFoundError(path)

    def _delete(self, keys: list[str]) -> None:
        if not keys:
            return
        try:
            self._api.batch_bucket_files(self._id, delete=keys)
        except HfHubHTTPError:
            # It may have been for a key that is not there any more, which is all that is wanted.
            if list(self._api.get_bucket_paths_info(self._id, keys)):
                raise

    def _inside(self, path: str) -> str:
        return path.removeprefix(self._id).lstrip("/")
