"""Tests of the web page: images in questions. The demo checkpoint sees."""
import contextlib
import pathlib
import re

from browser import Page, Server, until

DRAWING = (pathlib.Path(__file__).resolve().parents[1] / "models/demo/drawing.png").read_bytes()  # an orange 4
SIDE, TOKENS = 128, 16  # 32 x 32 pixels each

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


def test_paste_an_image_see_it_ask_reload_ask_again(page):
    page.load()
    page.set("think", "off")
    page.browser.script(PASTE, "paste", "picture.png", list(DRAWING))
    until("a thumbnail beside the box", lambda: width_of(page, "#attached img") == SIDE)
    assert page.ask("What do you see?") == "An orange 4."
    parts = page.sent()["messages"][0]["content"]
    assert [p["type"] for p in parts] == ["image_url", "text"], parts
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR"), parts[0]
    assert width_of(page, ".user img.picture") == SIDE and not page.has("#attached img")
    tokens, cached = prompt(page)
    assert tokens > TOKENS and cached == 0, (tokens, cached)
    page.reload({"max_tokens": 16})
    until("the picture in the history", lambda: width_of(page, ".user img.picture") == SIDE)
    for _ in range(3):  # states are kept at every 64th token
        page.ask("Which colour do you see?")
    again, cached = prompt(page)
    assert [m["role"] for m in page.sent()["messages"]] == ["user", "assistant"] * 3 + ["user"]
    assert page.sent()["messages"][0]["content"] == parts, "another image was sent"
    assert again > tokens and TOKENS < 64 <= cached < again, (again, cached)
    page.picture("image")


def test_drop_an_image_and_leave_it_out(page):
    page.load({"max_tokens": 4})
    for i, name in enumerate(("a.png", "b.png")):
        page.browser.script(PASTE, "drop", name, list(DRAWING))
        until("its thumbnail", lambda: page.has("#attached img") == i + 1)
    page.browser.press("#attached button[aria-label='Leave out a.png']")
    assert page.browser.script("return attached.innerText").strip() == "b.png"
    page.ask("What is this?")
    assert sum(p["type"] == "image_url" for p in page.sent()["messages"][0]["content"]) == 1


def test_a_model_without_a_tower_says_so(page):
    with contextlib.closing(Server(page.server.binary, "--no-vision")) as server:
        blind = Page(page.browser, server)
        blind.load()
        blind.browser.script(PASTE, "paste", "picture.png", list(DRAWING))
        until("a refusal in words", lambda: "this model reads text only" in blind.browser.script("return toasts.innerText"))
        assert not blind.has("#attached img")
