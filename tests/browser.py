"""A headless Chromium through the WebDriver protocol (https://www.w3.org/TR/webdriver2/), the real server, and the
server's page as a person uses it. No Python packages."""
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element
ENTER, ESCAPE, CONTROL, SHIFT, ALT, UP = "\ue007", "\ue00c", "\ue009", "\ue008", "\ue00a", "\ue013"


def started(command, stream, pattern):
    """A process, and what `pattern` finds in what it writes once it is ready."""
    process = subprocess.Popen(command, text=True, **{stream: subprocess.PIPE})
    said = ""
    for line in getattr(process, stream):
        said += line
        if found := re.search(pattern, line):
            return process, found[1]
    raise RuntimeError(f"{command[0]} ended with code {process.wait()} before it was ready: {said}")


def until(what, condition, seconds=30):
    end = time.time() + seconds
    while time.time() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"after {seconds} s still not: {what}")


class Browser:
    def __init__(self):
        self.driver, found = started(["chromedriver", "--port=0"], "stdout", r"started successfully on port (\d+)")
        self.root = f"http://127.0.0.1:{found}"
        self.profile = tempfile.mkdtemp()
        try:
            self.start()
        except Exception:
            self.end()
            raise

    def start(self):
        self.base = self.root
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en",
                     "--disable-background-networking", "--no-first-run", f"--user-data-dir={self.profile}",
                     "--window-size=1280,860"]
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL"}}}})
        self.process = session["capabilities"]["goog:processID"]
        self.base += f"/session/{session['sessionId']}"

    def crash_and_restart(self):
        """As if the power had gone; the same profile again."""
        os.kill(self.process, signal.SIGKILL)
        with contextlib.suppress(RuntimeError):
            self.call("DELETE", "")
        until("the profile to be free", lambda: not os.path.lexists(self.profile + "/SingletonLock") or
              os.unlink(self.profile + "/SingletonLock") is None)
        self.start()

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

    def press(self, css):
        """Clicks what is shown only while the pointer is near, too."""
        self.script("document.querySelector(arguments[0]).click()", css)

    def type(self, css, text):
        self.call("POST", f"/element/{self.find(css)}/value", {"text": text})

    def keys(self, *names):
        """Presses them all, then lets go."""
        down = [{"type": "keyDown", "value": name} for name in names]
        up = [{"type": "keyUp", "value": name} for name in reversed(names)]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": down + up}]})

    def replace(self, css, text):
        self.call("POST", f"/element/{self.find(css)}/clear")
        self.type(css, text)
        self.script("document.activeElement.blur()")  # a change is saved when the field is left

    def tabs(self):
        return self.call("GET", "/window/handles")

    def new_tab(self):
        self.go_to_tab(self.call("POST", "/window/new", {"type": "tab"})["handle"])

    def go_to_tab(self, handle):
        self.call("POST", "/window", {"handle": handle})

    def close_tab(self):
        self.call("DELETE", "/window")
        self.go_to_tab(self.tabs()[0])

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

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


# Requests get the fields `extra` beside the page's own and are kept in `sent`. With `script`, a list of
# [milliseconds, delta or event], nothing is sent: the answer is these, as the server would send them.
WATCH = """
const real = window.realFetch ?? window.fetch;
const [extra, script] = arguments;
window.realFetch = real;
window.sent = [];
window.fetch = (url, options) => {
  if (!options?.body) return real(url, options);
  const body = { ...JSON.parse(options.body), ...extra };
  window.sent.push(body);
  if (!script) return real(url, { ...options, body: JSON.stringify(body) });
  const stream = new ReadableStream({ async start(to) {
    const write = event => to.enqueue(new TextEncoder().encode('data: ' + event + '\\n\\n'));
    options.signal.addEventListener('abort', () => to.error(new DOMException('', 'AbortError')));
    for (const [ms, event] of script) {
      await new Promise(done => setTimeout(done, ms));
      if (options.signal.aborted) return;
      if (event === null) { to.error(new TypeError('network')); return; }
      write(JSON.stringify(event.whole ?? { choices: [{ delta: event }] }));
    }
    write(JSON.stringify({ choices: [{ delta: {}, finish_reason: 'stop' }], timings: { predicted_per_second: 9, predicted_n: 9 } }));
    write(JSON.stringify({ choices: [], usage: { completion_tokens: 9, prompt_tokens: 1234, prompt_tokens_details: { cached_tokens: 1000 } } }));
    write('[DONE]');
    to.close();
  } });
  return Promise.resolve(new Response(stream));
};"""


class Page:
    """What a person sees and does."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        self.pictures = os.environ.get("QUERN_SCREENSHOTS")

    def load(self, extra=None):
        """A new, empty conversation."""
        self.browser.open(self.server.url + "/")
        self.is_ready(extra)

    def reload(self, extra=None):
        self.browser.call("POST", "/refresh")
        self.is_ready(extra)

    def is_ready(self, extra=None):
        until("the model's name", lambda: self.browser.script("return document.getElementById('about')?.textContent"))
        self.watch(extra)

    def watch(self, extra=None):
        self.browser.script(WATCH, extra or {}, None)

    def model_says(self, text, pieces=8, ms=5, reasoning="", more=()):
        """From now on answers are this text, in pieces; `more`: what comes after it."""
        size = max(1, -(-len(text) // pieces))
        parts = [text[i:i + size] for i in range(0, len(text), size)]
        script = [[ms, {"reasoning_content": part}] for part in re.findall(r"\S+\s*", reasoning)]
        script += [[ms, {"content": part}] for part in parts]
        self.browser.script(WATCH, {}, script + list(more))

    def send(self, text):
        self.browser.type("#text", text + ENTER)

    def busy(self):
        return self.browser.script("return send.textContent") == "Stop"

    def finish(self):
        until("the answer's end", lambda: not self.busy())
        time.sleep(0.05)  # a frame
        return self.last()

    def ask(self, text):
        before = self.count()
        self.send(text)
        until("the question and its answer", lambda: self.count() == before + 2)
        return self.finish()

    def count(self):
        return self.browser.script("return document.querySelectorAll('.turn').length")

    def last(self):
        return self.browser.script("return [...document.querySelectorAll('.turn .body')].at(-1)?.innerText ?? ''")

    def stats(self):
        return self.browser.script("return [...document.querySelectorAll('.stats')].at(-1).textContent")

    def note(self):
        return self.browser.script("return [...document.querySelectorAll('.note')].at(-1)?.innerText ?? ''")

    def texts(self):
        return self.browser.script("return [...document.querySelectorAll('.turn .body')].map(t => t.innerText)")

    def chats(self):
        return self.browser.script("return [...document.querySelectorAll('.chat .open span')].map(t => t.textContent)")

    def records(self, store):
        """What is on disk."""
        return self.browser.call("POST", "/execute/async", {"script": """
            const done = arguments[1], open = indexedDB.open('quern', 1);
            open.onsuccess = () => {
              const all = open.result.transaction(arguments[0]).objectStore(arguments[0]).getAll();
              all.onsuccess = () => { open.result.close(); done(all.result); };
            };""", "args": [store]})

    def sent(self):
        return self.browser.script("return window.sent.at(-1)")

    def has(self, css):
        return self.browser.script("return document.querySelectorAll(arguments[0]).length", css)

    def set(self, name, value):
        """In the settings' dialog; returns what the hint below the field says."""
        self.browser.click("#gear")
        self.browser.script("""const e = document.getElementById('set-' + arguments[0]); e.value = arguments[1];
            e.dispatchEvent(new Event('change'))""", name, value)
        hint = self.browser.script("return document.getElementById(`set-${arguments[0]}-hint`).textContent", name)
        self.browser.keys(ESCAPE)
        return hint

    def phone(self, on=True):
        if on:
            self.browser.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2,
                                  mobile=True)
        else:
            self.browser.devtools("Emulation.clearDeviceMetricsOverride")

    def scheme(self, name):
        self.browser.devtools("Emulation.setEmulatedMedia",
                              features=[{"name": "prefers-color-scheme", "value": name}] if name else [])

    def picture(self, name):
        if self.pictures:
            os.makedirs(self.pictures, exist_ok=True)
            self.browser.screenshot(os.path.join(self.pictures, name + ".png"))
