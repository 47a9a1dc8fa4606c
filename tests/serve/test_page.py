"""The web page in a real browser, driven over a pipe with the DevTools protocol."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Live, held, wait_for

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


def ask(browser: Browser, prompt: str) -> None:
    browser.js(f"""
        document.querySelectorAll("[data-done]").forEach(node => delete node.dataset.done);
        document.querySelector("#prompt").value = {json.dumps(prompt)};
        document.querySelector("#form").requestSubmit();
    """)


def answered(browser: Browser) -> bool:
    return bool(wait_for(lambda: browser.js("!!document.querySelector('[data-done]')")))


def test_a_conversation(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny")
    assert "continues a text" in browser.js(text("#hint"))  # it has no chat template
    browser.js("""
        document.querySelector("#max_tokens").value = 200;
        document.querySelector("#temperature").value = 0;
        document.querySelector("#drawer").dispatchEvent(new Event("input"));
    """)
    ask(browser, "def <b>main</b>(")
    assert answered(browser)
    body = {"prompt": "def <b>main</b>(", "max_tokens": 200, "temperature": 0}
    want = live.post("/v1/completions", body).json()["choices"][0]["text"]
    assert browser.js(text(".user .text")) == "def <b>main</b>("
    assert browser.js(text(".assistant .text")) == want
    assert "tokens/s" in browser.js(text(".assistant .tools"))
    assert wait_for(lambda: "0 running" in browser.js(text("#load")))
    # Regenerated, it is the same.
    browser.js("document.querySelector('[data-done]').querySelectorAll('.tools button')[1].click()")
    assert answered(browser)
    assert browser.js(text(".assistant .text")) == want
    # What was said and set is there after the page is loaded again, and a new chat is empty.
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text(".assistant .text")) == want)
    assert browser.js("document.querySelector('#max_tokens').value") == "200"
    browser.js("document.querySelector('#new').click()")
    assert browser.js(text(".message")) == ""
    browser.js("document.querySelector('#list .open').click()")
    assert browser.js(text(".assistant .text")) == want
    # A server's refusal is shown.
    browser.js("document.querySelector('#top_k').value = 1.5")
    ask(browser, "x")
    assert wait_for(lambda: "top_k" in browser.js(text(".error")))
    browser.js("document.querySelector('#list .remove').click()")
    assert browser.js(text("#list .open")) == ""
    assert browser.log == []


def test_fields_and_keys(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny")
    for value, want in (("9", "2"), ("-1", "0"), ("0.5", "0.5")):
        browser.js(f"""
            document.querySelector("#temperature").value = {value};
            document.querySelector("#temperature").dispatchEvent(
                new Event("change", {{ bubbles: true }}));
        """)
        assert browser.js("document.querySelector('#temperature').value") == want
    browser.js("document.querySelector('#temperature').value = 9")
    assert browser.js("sampling().temperature") == 2
    # Without a chat template there is no place for a system prompt.
    assert browser.js("document.querySelector('#told').hidden") is True
    browser.js("document.querySelector('#menu').click()")
    assert browser.js("document.body.className") == "menu"
    browser.js('document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }))')
    assert browser.js("document.body.className") == ""
    assert browser.js("document.activeElement.id") == "menu"
    assert browser.log == []


def test_only_a_whole_answer_is_announced(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny")
    browser.js("document.querySelector('#max_tokens').value = 450")
    assert browser.js("document.querySelectorAll('[aria-live], [role=status]').length") == 1
    with held(live.engine, steps=10):
        ask(browser, "x = 1")
        assert wait_for(lambda: browser.js(text(".assistant .text")) != "")
        assert browser.js(text("#said")) == ""
        assert wait_for(lambda: "1 running" in browser.js(text("#load")))
        browser.js("document.querySelector('#form').requestSubmit()")
        assert answered(browser)
    assert browser.js(text("#said")) == browser.js(text(".assistant .text"))


def test_an_answer_stops(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny")
    browser.js("document.querySelector('#max_tokens').value = 450")
    with held(live.engine, steps=10):
        ask(browser, "x = 1")
        assert wait_for(lambda: browser.js(text(".assistant .text")) != "")
        assert browser.js(text("#send")) == "Stop"
        browser.js("document.querySelector('#form').requestSubmit()")
        assert answered(browser)
    assert browser.js(text("#send")) == "Send"
    assert browser.js(text(".error")) == ""


MARKDOWN = """\
# A title

A [link](javascript:alert(1)), <img src=x onerror="window.broken = 1"> and **bold**.

```python
def f(): return "x"
```
<script>window.broken = 1</script>
"""


def test_markdown_is_shown_and_runs_nothing(browser: Browser, live: Live) -> None:
    browser.call("Page.navigate", url=live.url)
    assert wait_for(lambda: browser.js(text("#model")) == "tiny")
    browser.js(f"""
        about.template = true;
        show({{ role: "assistant", content: {json.dumps(MARKDOWN)} }});
    """)
    assert browser.js(text(".assistant h1")) == "A title"
    assert browser.js(text(".assistant strong")) == "bold"
    assert browser.js(text(".assistant pre .hljs-keyword")) == "def|return"
    assert browser.js(text(".assistant pre .copy")) == "Copy"
    assert browser.js("document.querySelectorAll('.text img, .text script').length") == 0
    assert browser.js("document.querySelector('.text a').href") == ""
    assert browser.js("window.broken") is None


def test_it_asks_nobody_else(live: Live) -> None:
    page = httpx.get(live.url)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in page.text.partition("<body>")[2]
    assert httpx.get(f"{live.url}/page/vendor/LICENSES.txt").status_code == 404
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
        assert httpx.get(f"{live.url}/{name}").status_code == 200
