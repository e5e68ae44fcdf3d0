"""A headless browser for tests: Debian's chromium, driven by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

__all__ = ["Page", "opened", "why_not"]

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
    "--remote-allow-origins=*", "--force-color-profile=srgb",
)  # fmt: skip
PATIENCE = 30.0
OWN = ("file:", "data:", "blob:")
"""Requests that do not leave the machine."""


def why_not() -> str:
    """Why there is no browser; empty: there is one."""
    if shutil.which("chromium") is None:
        return "needs chromium (apt-get install chromium)"
    try:
        import websocket  # noqa: F401
    except ImportError:
        return "needs websocket-client (pip install websocket-client)"
    return ""


class Page:
    """A page in the browser.

    Attributes:
        problems: errors and warnings of the console, exceptions, refusals of the page's policy.
        requests: addresses that were asked for, but for files and data of the page itself.
    """

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=PATIENCE)
        self._number = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for area in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{area}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note what happened meanwhile."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith(OWN):
            self.requests.append(about["request"]["url"])

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Open a file, and wait until it is there."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=file.as_uri())
        end = time.monotonic() + PATIENCE
        while self.run("document.readyState + location.href") != f"complete{file.as_uri()}":
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; promises are waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        found = self.run(f"document.querySelector({json.dumps(selector)}).textContent")
        assert isinstance(found, str), selector
        return found

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Scroll to an element, and return a place inside of it, in shares of its size, when the page has been drawn so."""
        box = self.run(
            f"new Promise((found) => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "requestAnimationFrame(() => requestAnimationFrame(() => { const box = one.getBoundingClientRect(); "
            "found([box.x, box.y, box.width, box.height]); })); })"
        )
        return box[0] + across * box[2], box[1] + down * box[3]

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Click with the mouse."""
        x, y = self.place(selector, across, down)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the mouse over an element."""
        x, y = self.place(selector, across, down)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, where the focus is."""
        for key in keys:
            codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
                     "End": 35, "Home": 36}  # fmt: skip
            about = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Write a picture of the page."""
        content = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._whole(whole))
        file.write_bytes(base64.b64decode(content["data"]))

    def _whole(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        """Leave the page."""
        self._socket.close()


@contextmanager
def opened() -> Iterator[Page]:
    """A browser with an empty page, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="meshwright-browser-", ignore_cleanup_errors=True) as folder:
        command = ["chromium", *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            port = Path(folder) / "DevToolsActivePort"
            end = time.monotonic() + PATIENCE
            while not (port.is_file() and port.read_text().count("\n") >= 1):
                assert process.poll() is None, "chromium ended at its start"
                assert time.monotonic() < end, "chromium does not start"
                time.sleep(0.05)
            number = port.read_text().splitlines()[0]
            with urlopen(f"http://127.0.0.1:{number}/json/list") as answer:
                pages = [one for one in json.loads(answer.read()) if one["type"] == "page"]
            page = Page(pages[0]["webSocketDebuggerUrl"])
            yield page
            page.close()
        finally:
            with open(os.devnull, "w"):
                os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
