"""The web page in a real browser, driven over a pipe with the DevTools protocol."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Live, wait_for

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


class Browser:
    """A headless browser with one page. Messages are JSON that ends with a zero byte."""

    def __init__(self, profile: Path):
        their_in, self.out = os.pipe()
        self.into, their_out = os.pipe()
        redirect = f"exec 3<&{their_in} 4>&{their_out}; exec "
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe"
        self.process = subprocess.Popen(
            ["bash", "-c", f"{redirect} '{BROWSER}' {flags} --user-data-dir='{profile}'"],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self.count, self.rest, self.session = 0, b"", None
        self.log: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.log.append(json.dumps(answer["params"]))

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            part = os.read(self.into, 1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path)
    yield browser
    browser.close()


def text(selector: str) -> str:
    return f"[...document.querySelectorAll({selector!r})].map(node => node.textContent).join('|')"


def test_chat_and_numbers(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny", 30)
    browser.js("""
        document.querySelector("#max").value = 400;
        document.querySelector("#temperature").value = 0;
        document.querySelector("#prompt").value = "def <b>main</b>(";
        document.querySelector("#form").requestSubmit();
    """)
    assert wait_for(lambda: float(browser.js(text("#speed"))) > 0, 30)
    assert wait_for(lambda: browser.js("!!document.querySelector('[data-done]')"), 60)
    body = {"prompt": "def <b>main</b>(", "max_tokens": 400, "temperature": 0}
    want = live.post("/v1/completions", body).json()["choices"][0]["text"]
    assert browser.js(text(".user")) == "def <b>main</b>("
    assert browser.js(text(".assistant")) == want
    assert wait_for(lambda: browser.js(text("#running")) == "0", 10)
    assert 0 <= float(browser.js(text("#kv"))) <= 100
    # A server's refusal is shown.
    browser.js("""
        document.querySelector("#temperature").value = 1000;
        document.querySelector("#prompt").value = "x";
        document.querySelector("#form").requestSubmit();
    """)
    assert wait_for(lambda: "temperature" in browser.js(text(".error")), 30)
    assert browser.log == []
