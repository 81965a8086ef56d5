"""A Chromium without a window, driven through the two pipes of its debugging protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

# The browser looks for its pipes at 3 and 4.
_MOVE_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for number, pipe in enumerate(pipes, start=3):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The first that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab.

    Attributes:
        urls: of every request so far.
        complaints: what the page or the browser complained about.
    """

    def __init__(self, program: str, profile: Path):
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self._number, self._rest = 0, b""
        self._answers: dict[int, dict[str, Any]] = {}
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            sys.executable, "-c", _MOVE_PIPES, str(to_browser), str(from_browser), program,
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol gives."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while self._number not in self._answers:
            self._receive(until)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self, until: float) -> None:
        ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
        assert ready, "the browser does not answer"
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            params = message.get("params", {})
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            elif message["method"] == "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))

    def open(self, url: str) -> None:
        """Goes to a page and waits until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.03)

    def type(self, text: str) -> None:
        """Types a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """Presses a key and lets it go."""
        text = {"text": "\r"} if key == "Enter" else {}
        shared = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def resize(self, width: int, height: int) -> None:
        """Gives the page a size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
