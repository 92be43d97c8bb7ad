"""The content-addressed store of the fake Hub, as far as the client's upload and download speak to it."""

import asyncio
import json
import secrets
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.files import save, write

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub


class Cas:
    """The content-addressed store behind the buckets: chunks in xorbs, and of each file the pieces that it is made of.

    Chunks are kept as they came, compressed. Whole files are decoded by the client's own library.

    Its address is one that no other store ever had: clients remember, beyond their own end, what each address has
    been sent and do not send it again, and ports come back.
    """

    def __init__(self, hub: "FakeHub", folder: Path):
        self._hub, self._folder = hub, folder
        self.token = secrets.token_hex(8)
        self.path = f"/cas/{secrets.token_hex(8)}/"

    @property
    def url(self) -> str:
        return (self._hub.url + self.path).rstrip("/")

    def access(self, request: web.Request) -> str | None:
        """The bearer token that a request must have; None for those links that anybody may follow."""
        free = (f"{self.path}plain/", f"{self.path}data/")
        return None if request.path.startswith(free) else self.token

    def routes(self) -> Iterable[web.RouteDef]:
        return [
            web.post(self.path + "v1/xorbs/{prefix}/{hash}", self._put_xorb),
            web.post(self.path + "v1/shards", self._put_shard),
            web.get(self.path + "v1/reconstructions/{hash}", self._reconstruct),
            web.get(self.path + "data/{hash}", self._data),
            web.get(self.path + "plain/{hash}", self._plain),
        ]

    def size(self, file: str) -> int:
        return sum(term["unpacked_length"] for term in self._terms(file))

    async def _put_xorb(self, request: web.Request) -> web.Response:
        write(self._folder / "xorbs" / request.match_info["hash"], await request.read())
        return web.json_response({"was_inserted": True})

    async def _put_shard(self, request: web.Request) -> web.Response:
        for file, terms in _files_of_shard(await request.read()):
            save(self._folder / "files" / f"{file}.json", terms)
        return web.json_response({"result": 1})

    async def _reconstruct(self, request: web.Request) -> web.Response:
        terms = self._terms(request.match_info["hash"])
        if not terms:
            raise web.HTTPNotFound
        fetch = {}
        for xorb in {term["hash"] for term in terms}:  # one stretch of each, from the first chunk needed to the last
            spans = _chunk_spans((self._folder / "xorbs" / xorb).read_bytes())
            ranges = [term["range"] for term in terms if term["hash"] == xorb]
            first, last = min(r["start"] for r in ranges), max(r["end"] for r in ranges)
            url_range = {"start": spans[first][0], "end": spans[last - 1][1] - 1}
            url = f"{self.url}/data/{xorb}"
            fetch[xorb] = [{"range": {"start": first, "end": last}, "url": url, "url_range": url_range}]
        return web.json_response({"offset_into_first_range": 0, "terms": terms, "fetch_info": fetch})

    async def _data(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._folder / "xorbs" / request.match_info["hash"])

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        file = request.match_info["hash"]
        size, path = self.size(file), self._folder / "plain" / file
        if size == 0:
            return web.Response(body=b"")
        if not path.exists():
            if (data := self._uncompressed(file)) is not None:
                return web.Response(body=data)
            await asyncio.to_thread(self._decode, file, size, path)
        return web.FileResponse(path)

    def _uncompressed(self, file: str) -> bytes | None:
        """A file whose chunks the client has not compressed (`HF_XET_XORB_COMPRESSION_POLICY=none`)."""
        data = bytearray()
        for term in self._terms(file):
            xorb = (self._folder / "xorbs" / term["hash"]).read_bytes()
            for start, end in _chunk_spans(xorb)[term["range"]["start"] : term["range"]["end"]]:
                if xorb[start + 4] != 0:
                    return None
                data += xorb[start + 8 : end]
        return bytes(data)

    def _decode(self, file: str, size: int, path: Path) -> None:
        import hf_xet

        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        with hf_xet.XetSession().new_file_download_group(
            endpoint=self.url, token=self.token, token_expiry_unix_secs=int(time.time()) + 3600
        ) as group:
            group.start_download_file(hf_xet.XetFileInfo(file, size), str(temporary))
        temporary.replace(path)

    def _terms(self, file: str) -> list[dict[str, Any]]:
        path = self._folder / "files" / f"{file}.json"
        return json.loads(path.read_bytes()) if path.exists() else []


def _files_of_shard(data: bytes) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Of each file in a shard its hash and its terms: pieces of xorbs, as the client wants them back."""
    record, end = 48, b"\xff" * 32
    at = record  # behind the header: tag of 32 bytes, version, size of the footer
    while data[at : at + 32] != end:
        file, (flags, count) = _hex(data[at : at + 32]), struct.unpack_from("<II", data, at + 32)
        at += record
        terms = []
        for _ in range(count):
            length, first, last = struct.unpack_from("<III", data, at + 36)
            span = {"start": first, "end": last}
            terms.append({"hash": _hex(data[at : at + 32]), "unpacked_length": length, "range": span})
            at += record
        yield file, terms
        at += record * count if flags & 1 << 31 else 0  # what verifies each term
        at += record if flags & 1 << 30 else 0  # metadata of the file


def _chunk_spans(xorb: bytes) -> list[tuple[int, int]]:
    """Where each chunk of a xorb begins and ends. Its header: version 0, packed length, scheme, length."""
    spans, at = [], 0
    while at + 8 <= len(xorb) and xorb[at] == 0:
        end = at + 8 + int.from_bytes(xorb[at + 1 : at + 4], "little")
        spans.append((at, end))
        at = end
    return spans


def _hex(digest: bytes) -> str:
    """A hash as the client writes it: four little-endian words."""
    return "".join(digest[i : i + 8][::-1].hex() for i in range(0, 32, 8))
