"""Model repositories for the fake Hub: made, and committed to with whole files."""

import base64
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web


class Repos:
    """`repos`: {name: {"private": …, "files": {path: bytes}, "messages": […]}}. `refuse`: status of all answers."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.refuse: int | None = None

    def routes(self) -> Iterable[web.RouteDef]:
        at = "/api/models/{owner}/{name}"
        return [
            web.post("/api/repos/create", self._create),
            web.post(at + "/preupload/{revision}", self._preupload),
            web.post(at + "/commit/{revision}", self._commit),
            web.get(at, self._info),
            web.get(at + "/revision/{revision}", self._info),
            web.post("/api/validate-yaml", self._validate),
        ]

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuse:
            return web.json_response({"error": "You don't have the rights"}, status=self.refuse)
        name = f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
        url = f"{request.url.origin()}/{name}"
        if name in self.repos:
            return web.json_response({"error": "You already created this model repo", "url": url}, status=409)
        private = body.get("private") or body.get("visibility") == "private"  # by the version of the client
        self.repos[name] = {"private": private, "files": {}, "messages": []}
        return web.json_response({"url": url, "name": name, "id": name})

    async def _preupload(self, request: web.Request) -> web.Response:
        files = (await request.json())["files"]
        answer = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]
        return web.json_response({"files": answer})

    async def _commit(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        for line in (await request.text()).splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                repo["messages"].append(entry["value"]["summary"])
            else:
                assert entry["key"] == "file", entry
                repo["files"][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return web.json_response(
            {
                "commitUrl": f"{request.url.origin()}/{self._name(request)}/commit/{'0' * 40}",
                "commitOid": "0" * 40,
                "success": True,
            }
        )

    async def _info(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        files = [{"rfilename": path} for path in repo["files"]]
        return web.json_response(
            {"id": self._name(request), "sha": "0" * 40, "siblings": files, "private": repo["private"]}
        )

    async def _validate(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    def _name(self, request: web.Request) -> str:
        return f"{request.match_info['owner']}/{request.match_info['name']}"

    def _repo(self, request: web.Request) -> dict[str, Any]:
        if self._name(request) not in self.repos:
            raise web.HTTPNotFound(text="no such repository", headers={"X-Error-Code": "RepoNotFound"})
        return self.repos[self._name(request)]
