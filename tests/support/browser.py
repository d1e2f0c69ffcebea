"""A real browser for tests of pages: headless Chromium, driven through its DevTools protocol.

It speaks the protocol over two pipes, so no port is open and no package is needed. It reaches this machine only.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-breakpad", "--hide-scrollbars", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank",
)  # fmt: skip
_TO_BROWSER, _FROM_BROWSER = 3, 4  # the descriptors at which Chromium expects the pipes
_FAR = 64  # copies of ours get higher numbers, so that none is in the way of those two
_START = (
    f"import os, sys; os.dup2(int(sys.argv[1]), {_TO_BROWSER}); os.dup2(int(sys.argv[2]), {_FROM_BROWSER}); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)  # `pass_fds` cannot renumber
_PATIENCE_S, _END_S = 60.0, 5.0
_CHUNK = 1 << 16


def executable() -> str:
    """Return the path of this machine's Chromium; "" if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


class Tab:
    """The browser's one tab. Each call waits for the browser's answer; only one thread may use it.

    Attributes:
        received: the bytes that have come over the network, headers included, as far as the browser has counted them.
        errors: what the page has written to the console as an error, and exceptions that nobody caught.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._rest = to_browser, from_browser, b""
        self._calls, self._session = 0, ""
        self.received = 0
        self.errors: list[str] = []

    def attach(self) -> None:
        """Take the tab over."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """Open an address in a window of this size (CSS pixels; `scale`: device pixels in each)."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        failed = self.call("Page.navigate", url=address).get("errorText", "")
        if failed:
            raise RuntimeError(f"the browser cannot open {address}: {failed}")

    def evaluate(self, expression: str, patience: float = _PATIENCE_S) -> Any:
        """Return the value of a JavaScript expression; of a promise, what it becomes."""
        answer = self.call("Runtime.evaluate", patience, expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {json.dumps(answer['exceptionDetails'])[:600]}")
        return answer["result"].get("value")

    def until(self, condition: str, patience: float = _PATIENCE_S) -> None:
        """Wait until a JavaScript expression is true. It may fail meanwhile: the page may not be there yet."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with suppress(RuntimeError):  # the page has been replaced by another one while we waited
                if self.evaluate(_waits(condition), patience):
                    return
        raise TimeoutError(f"not within {patience:.0f} s: {condition}; errors: {self.errors}")

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or (`whole`) of all of the page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more = {"clip": clip, "captureBeyondViewport": True}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))

    def call(self, method: str, patience: float = _PATIENCE_S, /, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + patience
        while True:
            answer = self._next(deadline)
            if answer.get("id") != self._calls:
                self._happened(answer.get("method", ""), answer.get("params", {}))
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error'].get('message')}")
            else:
                return dict(answer["result"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            if not (piece := os.read(self._in, _CHUNK)):
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _happened(self, method: str, about: dict[str, Any]) -> None:
        match method:
            case "Network.responseReceived":
                self.received += about["response"]["encodedDataLength"]
            case "Network.dataReceived":
                self.received += about["encodedDataLength"] or about["dataLength"]
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(about["exceptionDetails"])[:600])
            case "Runtime.consoleAPICalled" if about["type"] == "error":
                self.errors.append(json.dumps(about["args"])[:600])
            case _:
                pass


def _waits(condition: str) -> str:
    """A promise that is kept when `condition` is true."""
    return f"""new Promise((done) => {{
        const look = () => {{
            let met = false;
            try {{ met = {condition}; }} catch {{ /* not yet */ }}
            if (met) done(true); else setTimeout(look, 50);
        }};
        look();
    }})"""


@contextmanager
def browser() -> Iterator[Tab]:
    """In the body a browser runs; RuntimeError if this machine has none. Its files are gone with it."""
    path = executable()
    if not path:
        raise RuntimeError(f"this machine has no browser: none of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        its_in, to_browser = os.pipe()
        from_browser, its_out = os.pipe()
        far = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _FAR) for one in (its_in, its_out)]
        for one in (its_in, its_out):
            os.close(one)
        options = [*_OPTIONS[:-1], f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        argv = [sys.executable, "-S", "-c", _START, *map(str, far), path, *options, _OPTIONS[-1]]
        home = {**os.environ, "HOME": profile, "TMPDIR": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        try:
            process = subprocess.Popen(
                argv, pass_fds=far, env=home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            for one in far:
                os.close(one)
        tab = Tab(to_browser, from_browser)
        try:
            tab.attach()
            yield tab
        finally:
            _end(process, tab)
            os.close(to_browser)
            os.close(from_browser)


def _end(process: subprocess.Popen[bytes], tab: Tab) -> None:
    with suppress(RuntimeError, TimeoutError, OSError):
        tab.call("Browser.close", _END_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):  # its helpers too: they are its session's
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
