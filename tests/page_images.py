"""Tests of the web page: images in questions, with a demo that sees (tests/vision_demo.py)."""
import contextlib
import re
import struct
import tempfile
import zlib

import vision_demo
from browser import Page, Server, until

SIDE = 256  # 256 tokens: 16 x 16 pixels each


def png(seed):
    """A picture of slopes, no two directions alike."""
    rows = b"".join(b"\0" + bytes(v & 255 for x in range(SIDE) for v in (x + seed, y, x * y // 64)) for y in range(SIDE))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


PASTE = """const data = new DataTransfer(), [how, name, bytes] = arguments;
    data.items.add(new File([new Uint8Array(bytes)], name, { type: 'image/png' }));
    const target = how === 'paste' ? document.getElementById('text') : document.body;
    target.dispatchEvent(how === 'paste'
      ? new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true })
      : new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }));"""


def width_of(page, css):
    return page.browser.script("return document.querySelector(arguments[0])?.naturalWidth ?? 0", css)


def prompt(page):
    """(tokens of the prompt, of them cached)"""
    found = re.search(r"(\d+) of prompt, (\d+) of them cached", page.stats())
    assert found, page.stats()
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def seeing(page):
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(Server(page.server.binary, "-m", vision_demo.write(folder))) as server:
            yield Page(page.browser, server)


def test_paste_an_image_see_it_ask_reload_ask_again(page):
    with seeing(page) as seen:
        seen.load({"max_tokens": 8})
        seen.set("think", "off")
        seen.browser.script(PASTE, "paste", "picture.png", list(png(0)))
        until("a thumbnail beside the box", lambda: width_of(seen, "#attached img") == SIDE)
        seen.ask("What is this?")
        parts = seen.sent()["messages"][0]["content"]
        assert [p["type"] for p in parts] == ["image_url", "text"], parts
        assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR"), parts[0]
        assert width_of(seen, ".user img.picture") == SIDE and not seen.has("#attached img")
        tokens, cached = prompt(seen)
        assert tokens > SIDE and cached == 0, (tokens, cached)
        seen.reload({"max_tokens": 8})
        until("the picture in the history", lambda: width_of(seen, ".user img.picture") == SIDE)
        seen.ask("And now?")
        again, cached = prompt(seen)
        assert [m["role"] for m in seen.sent()["messages"]] == ["user", "assistant", "user"]
        assert seen.sent()["messages"][0]["content"] == parts, "another image was sent"
        assert again > tokens and SIDE <= cached < again, (again, cached)
        seen.picture("image")


def test_drop_an_image_and_leave_it_out(page):
    with seeing(page) as seen:
        seen.load({"max_tokens": 4})
        for i, name in enumerate(("a.png", "b.png")):
            seen.browser.script(PASTE, "drop", name, list(png(50 * i)))
            until("its thumbnail", lambda: seen.has("#attached img") == i + 1)
        seen.browser.press("#attached button[aria-label='Leave out a.png']")
        assert seen.browser.script("return attached.innerText").strip() == "b.png"
        seen.ask("What is this?")
        assert sum(p["type"] == "image_url" for p in seen.sent()["messages"][0]["content"]) == 1


def test_a_model_without_a_tower_says_so(page):
    page.load()
    page.browser.script(PASTE, "paste", "picture.png", list(png(0)))
    until("a refusal in words", lambda: "this model reads text only" in page.browser.script("return toasts.innerText"))
    assert not page.has("#attached img")
