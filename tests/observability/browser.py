"""A page in a real browser: headless Chromium over its debugging protocol, with nothing but what is installed."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_START_S, _CALL_S = 60.0, 60.0

# What sticks out to the right, but for what lies in a box that scrolls by itself.
_TOO_WIDE = """
(() => {
  const scrolls = e => { for (; e; e = e.parentElement) if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)) return true; return false };
  return [...document.querySelectorAll('body *')]
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5 && !scrolls(e.parentElement))
    .map(e => e.tagName + '.' + (e.getAttribute('class') || '') + ' ' + e.textContent.slice(0, 40))
})()
"""  # noqa: E501


@dataclass
class Look:
    """What a browser made of a page. `errors`: of the console, exceptions, failed loads."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    too_wide: list[str] = field(default_factory=list)
    page_width: int = 0
    text: str = ""
    background: str = ""
    png: bytes = b""


def chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def look(page: Path, *, width: int, dark: bool, height: int = 900) -> Look:
    """Opens a local page in a window of that size, all of its <details> open."""
    browser = chromium()
    assert browser is not None
    # Its helpers end a little later than the browser itself, and may write until then.
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as home:
        argv = [
            browser, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={home}", "--no-sandbox",
            "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return asyncio.run(_look(Path(home), process, page, width, height, dark))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _look(home: Path, process: subprocess.Popen, page: Path, width: int, height: int, dark: bool) -> Look:
    port = await _port(home, process)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(t for t in await answer.json() if t["type"] == "page")
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            return await _Tab(socket).look(page, width, height, dark)


async def _port(home: Path, process: subprocess.Popen) -> int:
    async with asyncio.timeout(_START_S):
        while True:
            assert process.poll() is None, f"the browser ended with {process.returncode}"
            with suppress(OSError, ValueError, IndexError):
                return int((home / "DevToolsActivePort").read_text().splitlines()[0])
            await asyncio.sleep(0.1)


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._ids = socket, itertools.count(1)
        self._found = Look()
        self._loaded = False

    async def look(self, page: Path, width: int, height: int, dark: bool) -> Look:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme])
        await self._call("Page.navigate", url=page.as_uri())
        async with asyncio.timeout(_CALL_S):
            while not self._loaded:
                self._take(await self._socket.receive_json())
        found = self._found
        await self._value("document.querySelectorAll('details').forEach(e => { e.open = true })")
        found.too_wide = await self._value(_TOO_WIDE)
        found.page_width = await self._value("document.documentElement.scrollWidth")
        found.text = await self._value("document.body.innerText")
        found.background = await self._value("getComputedStyle(document.body).backgroundColor")
        shot = await self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        found.png = base64.b64decode(shot["data"])
        return found

    async def _value(self, expression: str) -> Any:
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(_CALL_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return message["result"]
                self._take(message)

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self._found.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self._found.errors.append(str(params["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self._found.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self._found.errors.append(params["entry"]["text"])
        elif method == "Network.loadingFailed":
            self._found.errors.append(params["errorText"])
