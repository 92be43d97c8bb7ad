"""Buckets of the fake Hub: names, sizes and hashes; the content of the files is in the content-addressed store."""

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.files import save
from tests.fakes.hub_cas import Cas

if TYPE_CHECKING:
    from tests.fakes.hub import FakeHub


class Buckets:
    """Names, sizes and hashes of the files of each bucket; their content is in the content-addressed store."""

    def __init__(self, hub: "FakeHub", cas: Cas, folder: Path, page_size: int):
        self._hub, self._cas, self._folder, self._page_size = hub, cas, folder, page_size
        self.created: dict[str, dict[str, Any]] = {}
        """What was asked for when a bucket was made: `visibility`, `region`."""

    def exists(self, bucket_id: str) -> bool:
        return (self._folder / f"{bucket_id}.json").exists()

    def routes(self) -> Iterable[web.RouteDef]:
        bucket = "/api/buckets/{namespace}/{name}"
        return [
            web.post(bucket, self._create),
            web.get(bucket, self._info),
            web.post(f"{bucket}/batch", self._batch),
            web.post(f"{bucket}/paths-info", self._paths_info),
            web.get(f"{bucket}/tree", self._tree),
            web.get(f"{bucket}/tree/{{prefix:.+}}", self._tree),
            web.get(f"{bucket}/xet-{{kind}}-token", self._token),
            web.get("/buckets/{namespace}/{name}/resolve/{path:.+}", self._resolve),
        ]

    async def _create(self, request: web.Request) -> web.Response:
        index, url = self._index(request), f"{self._hub.url}/buckets/{_bucket_id(request)}"
        if index.exists():
            return web.json_response({"error": "this bucket exists", "url": url}, status=409)
        self.created[_bucket_id(request)] = await request.json() if request.can_read_body else {}
        save(index, {})
        return web.json_response({"url": url})

    async def _info(self, request: web.Request) -> web.Response:
        files = self._files(request)
        return web.json_response(
            {
                "id": _bucket_id(request),
                "private": True,
                "createdAt": _now(),
                "size": sum(file["size"] for file in files.values()),
                "totalFiles": len(files),
            }
        )

    async def _batch(self, request: web.Request) -> web.Response:
        # The whole body first: between the reading of the index and its saving nobody else may have a turn.
        lines = (await request.read()).splitlines()
        files, failed = self._files(request), []
        for operation in map(json.loads, lines):
            path = operation["path"]
            if operation["type"] == "addFile":
                entry = {"type": "file", "path": path, "xetHash": operation["xetHash"], "uploadedAt": _now()}
                files[path] = {**entry, "size": self._cas.size(operation["xetHash"])}
            elif operation["type"] != "deleteFile":
                failed.append({"path": path, "error": f"{operation['type']} is not known here"})
            elif files.pop(path, None) is None:
                failed.append({"path": path, "error": "no such file"})
        save(self._index(request), files)
        return web.json_response({"failed": failed}, status=422 if len(failed) == len(lines) else 200)

    async def _paths_info(self, request: web.Request) -> web.Response:
        paths = (await request.json())["paths"]
        files = self._files(request)
        return web.json_response([files[path] for path in paths if path in files])

    async def _tree(self, request: web.Request) -> web.Response:
        """Pages of entries whose path begins with the prefix, be it in the middle of a name."""
        prefix, entries = request.match_info.get("prefix", ""), {}
        is_recursive = request.query.get("recursive", "").lower() == "true"
        for path, file in sorted(self._files(request).items()):
            below, slash, _ = path[len(prefix) :].lstrip("/").partition("/")
            if not path.startswith(prefix):
                continue
            if is_recursive or not slash:
                entries[path] = file
            else:
                folder = path[: path.index(below, len(prefix)) + len(below)]
                entries[folder] = {"type": "directory", "path": folder, "uploadedAt": file["uploadedAt"]}
        first = int(request.query.get("cursor", "0"))
        last = first + self._page_size
        headers = {}
        if last < len(entries):
            following = request.url.update_query(cursor=str(last))
            headers["Link"] = f'<{following}>; rel="next"'
        return web.json_response(list(entries.values())[first:last], headers=headers)

    async def _token(self, request: web.Request) -> web.Response:
        self._files(request)
        expires, url = int(time.time()) + 3600, self._cas.url
        return web.json_response(
            {"casUrl": url, "exp": expires, "accessToken": self._cas.token},
            headers={
                "X-Xet-Cas-Url": url,
                "X-Xet-Access-Token": self._cas.token,
                "X-Xet-Token-Expiration": str(expires),
            },
        )

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        """Points to where the content can be had, as the Hub does."""
        file = self._files(request).get(request.match_info["path"])
        if file is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        refresh = f"{self._hub.url}/api/buckets/{_bucket_id(request)}/xet-read-token"
        headers = {
            "X-Xet-Hash": file["xetHash"],
            "X-Linked-Size": str(file["size"]),
            "Link": f'<{refresh}>; rel="xet-auth"',
        }
        raise web.HTTPFound(f"{self._cas.url}/plain/{file['xetHash']}", headers=headers)

    def _index(self, request: web.Request) -> Path:
        return self._folder / request.match_info["namespace"] / f"{request.match_info['name']}.json"

    def _files(self, request: web.Request) -> dict[str, Any]:
        try:
            return json.loads(self._index(request).read_bytes())
        except FileNotFoundError:
            raise web.HTTPNotFound(
                headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Bucket not found"}
            ) from None


def _bucket_id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
