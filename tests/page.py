#!/usr/bin/env python3
"""The web page in a real headless Chromium, against the real server with the demo checkpoint: `make test-page`.

Usage: page.py QUERN_BINARY. Needs chromium and chromedriver on the PATH, else it is skipped (a line that begins with
SKIPPED, exit code 0); no Python packages: the browser is driven through the WebDriver protocol
(https://www.w3.org/TR/webdriver2/). What the model says is forced, where that matters, by adding fields to the page's
own request: the text still comes through the model, the server and the stream.
"""
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element
ENTER = "\ue007"


def started(command, stream, pattern):
    """A process, and what `pattern` finds in what it writes once it is ready."""
    process = subprocess.Popen(command, text=True, **{stream: subprocess.PIPE})
    said = ""
    for line in getattr(process, stream):
        said += line
        if found := re.search(pattern, line):
            return process, found[1]
    raise RuntimeError(f"{command[0]} ended with code {process.wait()} before it was ready: {said}")


class Browser:
    def __init__(self):
        self.driver, found = started(["chromedriver", "--port=0"], "stdout", r"started successfully on port (\d+)")
        self.base = f"http://127.0.0.1:{found}"
        self.profile = tempfile.mkdtemp()
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--no-first-run", f"--user-data-dir={self.profile}"]
        try:
            session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {
                "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
                "goog:loggingPrefs": {"browser": "ALL"}}}})
        except Exception:
            self.end()
            raise
        self.base += f"/session/{session['sessionId']}"

    def call(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {json.load(error)['value']['message']}") from None

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def script(self, text, *arguments):
        return self.call("POST", "/execute/sync", {"script": text, "args": arguments})

    def devtools(self, command, **parameters):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def find(self, css):
        return self.call("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self.call("POST", f"/element/{self.find(css)}/click")

    def type(self, css, text):
        self.call("POST", f"/element/{self.find(css)}/value", {"text": text})

    def replace(self, css, text):
        self.call("POST", f"/element/{self.find(css)}/clear")
        self.type(css, text)
        self.script("document.activeElement.blur()")  # a change is saved when the field is left

    def problems(self):
        """Errors in the browser's console since the last call: scripts, the security policy, resources."""
        return [e["message"] for e in self.call("POST", "/se/log", {"type": "browser"}) if e["level"] == "SEVERE"]

    def close(self):
        try:
            self.call("DELETE", "")
        finally:
            self.end()

    def end(self):
        self.driver.terminate()
        self.driver.wait(10)
        shutil.rmtree(self.profile, ignore_errors=True)


class Server:
    def __init__(self, binary, *flags):
        self.binary = binary
        command = [binary, "serve", "--port", "0", "--temp", "0", "--log-format", "none", *flags]
        self.process, self.url = started(command, "stderr", r"at (http://\S+)")

    def running(self):
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as reply:
            return int(re.search(r"^quern_requests_running (\d+)$", reply.read().decode(), re.M)[1])

    def close(self):
        self.process.terminate()
        self.process.wait(30)


def until(what, condition, seconds=30):
    end = time.time() + seconds
    while time.time() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"after {seconds} s still not: {what}")


class Page:
    """What a person sees and does."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server

    def load(self, extra=None):
        """`extra`: fields that every request gets beside the page's own, which are kept for looking at."""
        self.browser.open(self.server.url)
        until("the model's name", lambda: " · " in self.browser.script("return document.title + title.textContent"))
        self.watch(extra)

    def watch(self, extra=None):
        self.browser.script("""
            const real = window.realFetch ?? window.fetch;
            window.realFetch = real;
            window.sent = [];
            window.fetch = (url, options) => {
              if (!options?.body) return real(url, options);
              const body = { ...JSON.parse(options.body), ...arguments[0] };
              window.sent.push(body);
              return real(url, { ...options, body: JSON.stringify(body) });
            };""", extra or {})

    def send(self, text):
        self.browser.type("#text", text + ENTER)

    def busy(self):
        return self.browser.script("return send.textContent") == "Stop"

    def finish(self):
        until("the answer's end", lambda: not self.busy())
        return self.last()

    def ask(self, text):
        before = self.count()
        self.send(text)
        until("the question and its answer", lambda: self.count() == before + 2)
        return self.finish()

    def count(self):
        return self.browser.script("return document.querySelectorAll('.turn').length")

    def last(self):
        return self.browser.script("return [...document.querySelectorAll('.turn')].at(-1)?.children[1]?.innerText ?? ''")

    def stats(self):
        return self.browser.script("return [...document.querySelectorAll('.stats, .error')].at(-1).textContent")

    def texts(self):
        return self.browser.script("return [...document.querySelectorAll('.turn')].map(t => t.innerText)")

    def sent(self):
        return self.browser.script("return window.sent.at(-1)")

    def turn_thinking_off(self):
        self.browser.click("#gear")
        self.browser.script("think.value = 'off'; think.dispatchEvent(new Event('change'))")
        self.browser.click("#gear")


def test_send(page):
    page.load()
    page.turn_thinking_off()
    answer = page.ask("What is 3 + 4?")
    assert "7" in answer, answer
    assert re.search(r"\d+ tokens at [\d.]+/s, \d+ of prompt, \d+ of them cached", page.stats()), page.stats()


def test_thinking_is_folded(page):
    page.load()
    page.browser.script("localStorage.clear()")
    page.load({"chat_template_kwargs": {"enable_thinking": True}})
    assert "85" in page.ask("What is 48 + 37?")
    state = page.browser.script("const d = document.querySelector('details'); return [d.open, d.hidden, d.textContent]")
    assert state[:2] == [False, False] and len(state[2]) > len("Thinking"), state
    page.turn_thinking_off()


def test_stream_and_stop(page):
    page.load({"ignore_eos": True, "max_tokens": 100000})
    page.send("Tell me a story.")
    seen = set()
    until("five states of a growing answer", lambda: seen.add(page.last()) or len(seen) > 5)
    assert page.busy()
    page.browser.click("#send")
    text = page.finish()
    assert text and page.stats() == "stopped", page.stats()
    until("the server to stop, too", lambda: page.server.running() == 0)
    assert page.last() == text
    page.watch()
    assert page.ask("What is 3 + 4?"), "no answer after a stopped one"


def test_reload(page):
    page.load()
    page.ask("What is 5 + 6?")
    before = page.texts()
    page.load()
    assert page.texts()[:-1] == before[:-1] and page.count() == len(before), (before, page.texts())
    first = page.browser.script("return JSON.parse(localStorage.getItem('quern.turns'))[0].content")
    page.ask("And 1 more?")
    assert page.sent()["messages"][0]["content"] == first, "the history is not part of the request"


def test_regenerate(page):
    page.load()
    page.browser.click("#new")
    assert page.count() == 0
    page.ask("What is 2 + 2?")
    page.watch({"max_tokens": 1})
    page.browser.click("#again")
    until("a request", lambda: page.browser.script("return window.sent.length") == 1)
    page.finish()
    assert page.count() == 2 and page.stats().startswith("1 tokens"), page.stats()
    assert [m["role"] for m in page.sent()["messages"]] == ["user"]


def test_system_prompt_and_sampling(page):
    page.load()
    page.browser.click("#gear")
    page.browser.replace("#system", "You count grains.")
    page.browser.replace("#temperature", "0.5")
    page.browser.replace("#max_tokens", "7")
    page.load()  # kept over a reload
    page.ask("What is 4 + 4?")
    body = page.sent()
    assert body["messages"][0] == {"role": "system", "content": "You count grains."}, body
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7), body
    page.browser.click("#gear")
    for field in ("#system", "#temperature", "#max_tokens"):
        page.browser.replace(field, " ")
        page.browser.script("const e = document.querySelector(arguments[0]); e.value = '';"
                            "e.dispatchEvent(new Event('change'))", field)
    page.browser.click("#gear")


ATTACK = ("<img src=x onerror=window.pwned=1><script>window.pwned=1</script><svg onload=window.pwned=1>\n"
          "[click](javascript:window.pwned=1) **<b onclick=window.pwned=1>bold</b>** `<i>code</i>`\n"
          "```html\n<iframe src='javascript:parent.pwned=1'></iframe>\n```\n# <u>head</u>\n- <s>item</s>")


def test_markup_is_text(page):
    """The model really says it, because the schema lets it say nothing else; then a person does."""
    page.load({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": ATTACK}}}})
    said = page.ask("Attack!")
    assert "<script>window.pwned=1</script>" in said, said
    page.browser.script("turns.at(-1).content = arguments[0]; save('quern.turns', turns)", ATTACK)  # with real newlines
    page.load()
    page.watch({"max_tokens": 1})
    page.browser.script("text.value = arguments[0]", ATTACK)
    page.browser.click("#send")
    until("both answers", lambda: page.count() >= 4)
    page.finish()
    time.sleep(0.3)
    found = page.browser.script("""return [window.pwned ?? null,
        document.querySelectorAll('#log :is(img, script, svg, a, iframe, i, u, s, b b)').length,
        document.querySelectorAll('#log pre code').length, document.querySelectorAll('#log :is(h3, li)').length]""")
    assert found == [None, 0, 1, 2], found
    page.browser.click("#new")


def luminance(colour):
    red, green, blue = [int(n) for n in re.findall(r"\d+", colour)[:3]]
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_dark_and_light(page):
    page.load()
    for scheme, dark in (("dark", True), ("light", False)):
        page.browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        back, front = page.browser.script("const s = getComputedStyle(text); return [s.backgroundColor, s.color]")
        assert (luminance(back) < 0.3) == dark and abs(luminance(back) - luminance(front)) > 0.6, (scheme, back, front)
    page.browser.devtools("Emulation.setEmulatedMedia", features=[])


def test_phone_width(page):
    page.browser.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        wide = "word" * 100
        page.load({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": wide}}}})
        page.ask("x" * 300)
        page.browser.click("#gear")
        widths = page.browser.script("return [document.documentElement.scrollWidth, log.scrollWidth, innerWidth]")
        assert max(widths) == 360, widths
        for name in ("#new", "#send", "#text", "#gear"):
            left, right = page.browser.script(
                "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.left, r.right]", name)
            assert 0 <= left < right <= 360, (name, left, right)
        page.browser.click("#gear")
    finally:
        page.browser.devtools("Emulation.clearDeviceMetricsOverride")


def test_key(page):
    server = Server(page.server.binary, "--api-key", "secret")
    try:
        locked = Page(page.browser, server)
        page.browser.open(server.url)
        locked.watch()
        locked.ask("Hello?")
        assert "key" in locked.stats(), locked.stats()
        page.browser.click("#gear")
        page.browser.replace("#key", "secret")
        page.browser.click("#again")
        until("an answer", lambda: "tokens at" in locked.stats())
        page.browser.problems()  # the refusal is one
    finally:
        server.close()


def main():
    missing = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
    if missing:
        print(f"SKIPPED: no {' and no '.join(missing)} on the PATH; the web page was not tested")
        return 0
    tests = [test_send, test_thinking_is_folded, test_stream_and_stop, test_reload, test_regenerate,
             test_system_prompt_and_sampling, test_markup_is_text, test_dark_and_light, test_phone_width, test_key]
    failed = 0
    with contextlib.closing(Server(sys.argv[1])) as server, contextlib.closing(Browser()) as browser:
        page = Page(browser, server)
        for test in tests:
            try:
                test(page)
                problems = browser.problems()
                assert not problems, problems
                print("ok     ", test.__name__)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print("FAILED ", test.__name__, error)
    print(f"test cases: {len(tests)} | {len(tests) - failed} passed | {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
