#!/usr/bin/env python3
"""The web page in a real headless Chromium, against the real server with the demo checkpoint: `make test-page`.

Usage: page.py QUERN_BINARY. Needs chromium and chromedriver on the PATH, else it is skipped (a line that begins with
SKIPPED, exit code 0). With QUERN_SCREENSHOTS=DIR, pictures of the page are left there. Where a test needs certain
words or times, the page's fetch is answered in the browser (Page.model_says); else the answer comes from the model.
"""
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time

from browser import ALT, CONTROL, ENTER, ESCAPE, SHIFT, UP, WATCH, Browser, Page, Server, until

ENDLESS = {"ignore_eos": True, "max_tokens": 100000}
LONG = "\n\n".join(f"Paragraph {i} of a long answer that fills the page." for i in range(60))


# Answers

def test_send(page):
    page.load()
    page.set("think", "off")
    answer = page.ask("What is 3 + 4?")
    assert "7" in answer, answer
    assert re.search(r"\d+ tokens at [\d.]+/s · \d+ of prompt, \d+ of them cached · [\d.]+ s", page.stats()), page.stats()
    page.load()
    page.ask("These are many words. " * 40 + "What is 3 + 4?")
    page.ask("And 1 more?")
    assert re.search(r", [1-9]\d* of them cached", page.stats()), page.stats()
    assert [m["role"] for m in page.sent()["messages"]] == ["user", "assistant", "user"]


def test_thinking_is_folded_and_stays_open(page):
    page.load()
    page.set("think", "on")
    assert "85" in page.ask("What is 48 + 37?")
    state = "const d = document.querySelector('.thinking'); return [d.open, d.hidden, d.innerText, d.textContent.length]"
    opened, hidden, summary, length = page.browser.script(state)
    assert not opened and not hidden and re.fullmatch(r"Thought for [\d.]+ s", summary) and length > 40, summary
    page.model_says("Here it is.", reasoning="one two three four five six seven eight nine ten " * 4, ms=30)
    page.send("Again?")
    until("thinking", lambda: page.has(".turn:last-child .thinking:not([hidden])"))
    page.browser.press(".turn:last-child .thinking summary")
    page.finish()
    assert page.browser.script("return document.querySelector('.turn:last-child .thinking').open"), "it folded shut"
    page.set("think", "off")


def test_stop(page):
    for stop in (lambda: page.browser.click("#send"), lambda: page.browser.keys(ESCAPE)):
        page.load(ENDLESS)
        page.send("Tell me a story.")
        seen = set()
        until("five states of a growing answer", lambda: seen.add(page.last()) or len(seen) > 5)
        assert page.busy()
        stop()
        text = page.finish()
        assert text and "Stopped" in page.note(), page.note()
        until("the server to stop, too", lambda: page.server.running() == 0)
        assert page.last() == text
        page.watch()
        assert page.ask("What is 3 + 4?"), "no answer after a stopped one"


def test_prompt_progress(page):
    page.load()
    progress = {"choices": [{"delta": {}}], "prompt_progress": {"total": 9000, "processed": 4096, "cache": 0}}
    page.browser.script(WATCH, {}, [[1, {"whole": progress}], [1500, {"content": "Done."}]])
    page.send("A long text")
    until("how much is read", lambda: "4,096 of 9,000 tokens" in page.stats())
    assert page.has("progress:not([hidden])") == 1
    page.finish()
    assert page.has("progress:not([hidden])") == 0
    assert page.sent()["return_progress"] is True


def test_the_view_stays_where_the_reader_is(page):
    page.load()
    page.model_says(LONG, pieces=60, ms=25)
    page.send("Write")
    until("a page full", lambda: page.browser.script("return log.scrollHeight > log.clientHeight + 300"))
    assert page.browser.script("return log.scrollHeight - log.scrollTop - log.clientHeight") < 60, "does not follow"
    page.browser.script("log.scrollTop = 40")
    until("the way down is offered", lambda: page.has("#down:not([hidden])"))
    page.finish()
    time.sleep(0.2)
    assert page.browser.script("return log.scrollTop") == 40, "the view moved"
    page.browser.click("#down")
    assert page.browser.script("return log.scrollHeight - log.scrollTop - log.clientHeight") < 60


# Conversations are not lost

def test_reload_during_an_answer(page):
    page.load(ENDLESS)
    page.send("Tell me a story.")
    until("some text", lambda: len(page.last()) > 60)
    time.sleep(0.6)  # the longest time between two saves, and some
    before = page.last()
    page.reload()
    question, answer = page.texts()
    assert question == "Tell me a story." and answer.startswith(before[:40]) and len(answer) >= 40, (before, answer)
    until("what happened is said", lambda: "closed while this was written" in page.note())
    page.watch({"max_tokens": 2})
    page.browser.click(".retry")
    until("an answer", lambda: page.stats().startswith("2 tokens"))


def test_a_crash_keeps_what_was_saved(page):
    with contextlib.closing(Browser()) as browser:
        crashing = Page(browser, page.server)
        crashing.load()
        crashing.model_says(LONG, pieces=200, ms=20)
        crashing.send("Write")
        until("an answer on disk", lambda: any("Paragraph 3" in m["content"] for m in crashing.records("messages")))
        browser.crash_and_restart()
        crashing.load()
        saved = max(crashing.records("messages"), key=lambda m: m["time"])
        assert saved["state"] == "streaming" and "Paragraph 3" in saved["content"], saved
        browser.press(".chat .open")
        until("what happened is said", lambda: "closed while this was written" in crashing.note())
        assert "Paragraph 3" in crashing.last()


def test_two_tabs(page):
    page.load()
    page.ask("What is 1 + 1?")
    address = page.browser.script("return location.href")
    page.browser.new_tab()
    page.browser.open(address)
    page.is_ready()
    assert page.count() == 2
    page.ask("What is 2 + 2?")
    page.browser.go_to_tab(page.browser.tabs()[0])
    until("the other tab's messages", lambda: page.count() == 4)
    page.ask("What is 3 + 3?")
    page.browser.click("#new")
    page.ask("A conversation of the first tab")
    page.browser.close_tab()
    page.browser.open(address)
    page.is_ready()
    assert page.texts()[0::2] == ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 3?"], page.texts()
    assert "A conversation of the first tab" in page.chats()


def test_tabs_at_the_same_time(page):
    """Both write into one conversation at once: two versions, none lost."""
    page.load()
    page.ask("What is 1 + 1?")
    address = page.browser.script("return location.href")
    first = page.browser.tabs()[0]
    page.browser.new_tab()
    second = page.browser.tabs()[-1]
    page.browser.open(address)
    page.is_ready()
    for tab, words in ((second, "From the second"), (first, "From the first")):
        page.browser.go_to_tab(tab)
        page.model_says(words + " tab. " + LONG, pieces=100, ms=15)
    for tab, words in ((second, "Question of the second"), (first, "Question of the first")):
        page.browser.go_to_tab(tab)
        page.send(words)
    for tab in (first, second):
        page.browser.go_to_tab(tab)
        page.finish()
    said = [m["content"] for m in page.records("messages")]
    for words in ("Question of the second", "Question of the first"):
        assert words in said, said
    for words in ("From the second", "From the first"):
        assert any(text.startswith(words) and text.endswith(LONG[-20:]) for text in said), words
    page.browser.close_tab()


def test_conversations(page):
    page.load()
    page.ask("What is 5 + 6?")
    page.browser.click("#new")
    assert page.count() == 0 and page.chats().count("What is 5 + 6?") == 1, "New erased the conversation"
    page.model_says("The grinding zebra.")
    page.ask("Second conversation")
    page.browser.replace("#search", "zebra")
    until("what is found", lambda: page.chats() == ["Second conversation"])
    assert "grinding zebra" in page.browser.script("return document.querySelector('.chat small').textContent")
    page.browser.replace("#search", "")
    page.browser.script("search.value = ''; search.dispatchEvent(new Event('input'))")
    until("all again", lambda: "What is 5 + 6?" in page.chats())
    page.browser.press(".chat.here [aria-label^=Rename]")
    until("a box", lambda: page.has(".chat input"))
    page.browser.type(".chat input", "\ue009a\ue000Stones" + ENTER)
    until("the new name", lambda: page.chats()[0] == "Stones")
    page.browser.press(".chat.here [aria-label^=Delete]")
    until("it is gone", lambda: "Stones" not in page.chats() and page.count() == 0)
    page.browser.click(".toast button")
    until("it is back", lambda: "Stones" in page.chats() and page.count() == 2)
    page.reload()
    assert page.count() == 2 and "grinding zebra" in page.last()


def test_a_draft_survives_a_reload(page):
    page.load()
    page.browser.type("#text", "half a thought")
    page.reload()
    assert page.browser.script("return text.value") == "half a thought"
    page.send("")
    page.finish()
    page.reload()
    assert page.browser.script("return text.value") == ""


def test_export_and_import(page):
    page.load()
    page.ask("What is 7 + 1?")
    page.browser.script("""window.files = []; const real = URL.createObjectURL;
        URL.createObjectURL = blob => { blob.text().then(t => window.files.push(t)); return real(blob); };""")
    page.browser.click("#export")
    text = until("a file", lambda: page.browser.script("return window.files[0]"))
    data = json.loads(text)
    assert all(c["title"] for c in data["chats"]), data["chats"]
    mine = next(c for c in data["chats"] if c["title"] == "What is 7 + 1?")
    page.browser.press(".chat.here [aria-label^=Delete]")
    until("it is gone", lambda: "What is 7 + 1?" not in page.chats())
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=page.folder) as file:
        file.write(text)
        file.flush()
        page.browser.type("#importfile", file.name)
        until("it is back", lambda: "What is 7 + 1?" in page.chats())
        before = until("all on disk", lambda: len(page.records("messages")) == len(data["messages"]) and len(data["messages"]))
        page.browser.type("#importfile", file.name)  # twice changes nothing
        time.sleep(0.3)
        assert len(page.records("messages")) == before
        file.seek(0)
        file.write("[1, 2")
        file.flush()
        page.browser.type("#importfile", file.name)
        until("a refusal in words", lambda: "holds no conversations" in page.browser.script("return toasts.innerText"))
    page.browser.open(page.server.url + "/#" + mine["id"])
    page.reload()
    assert page.count() == 2, (page.texts(), page.browser.script('return location.href'), mine, data)
    page.browser.script("""window.files = []; const real = URL.createObjectURL;
        URL.createObjectURL = blob => { blob.text().then(t => window.files.push(t)); return real(blob); };""")
    page.browser.click("#markdown")
    text = until("a file", lambda: page.browser.script("return window.files[0]"))
    assert text.startswith("# What is 7 + 1?\n\n## You\n\nWhat is 7 + 1?\n\n## Answer\n\n"), text


def test_the_old_pages_conversation_is_taken_over(page):
    page.load()
    page.browser.script("""localStorage.setItem('quern.turns', JSON.stringify([{ role: 'user', content: 'An old question' },
        { role: 'assistant', content: 'An old answer', reasoning: '', stats: 'x' }]))""")
    page.load()
    assert "An old question" in page.chats()
    page.load()
    assert page.chats().count("An old question") == 1


# What a message can do

def test_regenerate_edit_branch_delete(page):
    page.load()
    page.ask("What is 2 + 2?")
    first = page.last()
    page.watch({"max_tokens": 1})
    page.browser.press(".assistant .regenerate")
    until("a second version", lambda: "2/2" in page.browser.script("return turns.innerText"))
    page.finish()
    assert page.count() == 2 and page.stats().startswith("1 tokens"), page.stats()
    assert [m["role"] for m in page.sent()["messages"]] == ["user"]
    page.browser.press("[aria-label='Earlier version']")
    until("the first version", lambda: page.last() == first)

    page.watch()
    page.browser.press(".user .edit")
    page.browser.type(".editor textarea", "\ue009a\ue000What is 9 + 9?")
    page.browser.click(".editor .primary")
    until("an answer", lambda: page.texts()[0] == "What is 9 + 9?" and page.count() == 2)
    page.finish()
    assert [m["content"] for m in page.sent()["messages"]] == ["What is 9 + 9?"]

    page.browser.press(".assistant .edit")
    page.browser.type(".editor textarea", "\ue009a\ue000I would say so.")
    page.browser.click(".editor .primary")
    until("the edited answer", lambda: page.last() == "I would say so.")
    page.ask("Why?")
    assert page.sent()["messages"][1] == {"role": "assistant", "content": "I would say so."}, page.sent()

    before = page.chats()
    page.browser.press(".turn:nth-child(2) .branch")
    until("a new conversation of two messages", lambda: page.count() == 2 and len(page.chats()) == len(before) + 1)
    page.browser.press(".turn:nth-child(2) .remove")
    until("one message less", lambda: page.last() != "I would say so.")
    page.browser.click(".toast:last-child button")
    until("it is back", lambda: page.last() == "I would say so.")


def test_up_edits_the_last_question(page):
    page.load()
    page.ask("What is 6 + 2?")
    page.browser.type("#text", UP)
    assert page.browser.script("return document.activeElement.value") == "What is 6 + 2?"
    page.browser.keys(ESCAPE)
    until("the message again", lambda: page.has(".editor") == 0 and page.texts()[0] == "What is 6 + 2?")


def test_copy(page):
    page.load()
    page.model_says("Before\n\n```python\nprint(1)\n```\n")
    page.ask("Code")
    page.browser.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    for css, text in ((".codehead button", "print(1)\n"), (".assistant .tools button", "Before\n\n```python\nprint(1)\n```\n")):
        page.browser.script("window.copied = null; navigator.clipboard.writeText = async t => { window.copied = t; }")
        page.browser.press(css)
        assert until("a copy", lambda: page.browser.script("return window.copied")) == text
        # over plain HTTP from another machine there is no clipboard object
        page.browser.script("""window.copied = null; navigator.clipboard.writeText = async () => { throw 0; };
            document.addEventListener('copy', () => { window.copied = document.activeElement.value; }, { once: true })""")
        page.browser.press(css)
        assert until("a copy", lambda: page.browser.script("return window.copied")) == text


def test_files(page):
    page.load()
    drop = """const data = new DataTransfer(); for (const [name, bytes] of arguments[0])
        data.items.add(new File([new Uint8Array(bytes)], name));
        document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }))"""
    page.browser.script(drop, [["notes.txt", list("fünf ```x```\n".encode())], ["a.bin", [0, 255, 7]]])
    until("the text file", lambda: page.browser.script("return attached.innerText").strip() == "notes.txt")
    until("a refusal in words", lambda: "a.bin is no text file" in page.browser.script("return toasts.innerText"))
    page.ask("What is in it?")
    assert page.sent()["messages"][0]["content"] == "What is in it?\n\nFile notes.txt:\n````\nfünf ```x```\n````"
    assert page.has(".user details.file") == 1 and page.browser.script("return attached.innerText") == ""


def test_the_box_grows(page):
    page.load()
    height = "return text.getBoundingClientRect().height"
    one = page.browser.script(height)
    page.browser.type("#text", "a" + (SHIFT + ENTER + "\ue000") * 4 + "b")
    five = page.browser.script(height)
    assert five > one * 2.5, (one, five)
    page.browser.type("#text", ((SHIFT + ENTER + "\ue000") * 40))
    assert page.browser.script(height) <= page.browser.script("return innerHeight * 0.41")
    page.send("")
    page.finish()
    assert page.browser.script(height) == one


def test_tools(page):
    page.load()
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "the weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
    assert "not JSON" in page.set("tools", "[{")
    page.set("tools", json.dumps(tools))
    page.ask("What is the weather in Paris?")
    assert page.has(".call") == 1 and "get_weather" in page.browser.script("return document.querySelector('.call').innerText")
    assert "Paris" in page.browser.script("return document.querySelector('.call pre').textContent")
    page.browser.type(".call textarea", '{"temp_c": 17, "sky": "rainy"}')
    page.picture("tools")
    page.browser.click(".call .result button")
    until("the answer", lambda: page.count() == 4)
    page.finish()
    roles = [m["role"] for m in page.sent()["messages"]]
    assert roles == ["user", "assistant", "tool"] and "17" in page.last(), (roles, page.last())
    page.set("tools", "")


# Settings, errors, keys

def test_settings(page):
    page.load()
    page.browser.click("#gear")
    hints = page.browser.script("return [...document.querySelectorAll('#settings input')].map(e => e.placeholder)")
    assert any(h == "0 (the server's default)" for h in hints) and any("context 4096" in h for h in hints), hints
    page.browser.keys(ESCAPE)
    page.set("system", "You count grains.")
    page.set("temperature", "0,7")
    page.set("max_tokens", "7")
    page.reload()
    page.ask("What is 4 + 4?")
    body = page.sent()
    assert body["messages"][0] == {"role": "system", "content": "You count grains."}, body
    assert (body["temperature"], body["max_tokens"]) == (0.7, 7), body
    assert "“warm” is not a number" in page.set("temperature", "warm")
    assert "between 0 and 1" in page.set("top_p", "3")
    assert "not a whole number" in page.set("max_tokens", "1,5")
    page.ask("And 5 + 5?")
    body = page.sent()
    assert (body["temperature"], body["max_tokens"], "top_p" in body) == (0.7, 7, False), body
    assert "Cut off" in page.note()
    for name in ("system", "temperature", "max_tokens"):
        page.set(name, "")
    page.ask("And 6 + 6?")
    assert not {"temperature", "max_tokens"} & set(page.sent()), page.sent()


def test_errors_in_plain_words(page):
    page.load()
    page.model_says("Half of", more=[[5, None]])
    page.send("Break")
    page.finish()
    assert page.last() == "Half of" and "connection broke" in page.note() and "Try again" in page.note(), page.note()
    page.model_says("Whole.")
    page.browser.click(".retry")
    until("a whole answer", lambda: page.last() == "Whole.")
    page.watch({"temperature": "x"})
    page.send("Refuse")
    page.finish()
    assert "did not accept this request" in page.note() and "temperature" in page.note(), page.note()
    page.browser.script("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.browser.click(".retry")
    until("words", lambda: "cannot be reached" in page.note())
    assert "Failed to fetch" not in page.browser.script("return document.body.innerText")
    page.picture("error")
    page.browser.problems()  # the refusal is one


def test_a_server_that_goes_away_and_comes_back(page):
    page.load()
    page.browser.script("window.fetch = () => Promise.reject(new TypeError('x')); gear.click();"
                        "const k = document.getElementById('set-key'); k.value = 'a'; k.dispatchEvent(new Event('change'))")
    until("a notice", lambda: "cannot be reached" in page.browser.script("return notice.innerText"))
    page.watch()
    until("no notice", lambda: page.browser.script("return notice.hidden"))
    page.browser.keys(ESCAPE)
    page.set("key", "")


def test_key(page):
    server = Server(page.server.binary, "--api-key", "secret")
    try:
        page.browser.open(server.url)
        locked = Page(page.browser, server)
        until("the question for a key", lambda: "needs an API key" in page.browser.script("return notice.innerText"))
        locked.watch()
        locked.ask("Hello?")
        assert "needs an API key" in locked.note(), locked.note()
        page.browser.click(".note button")
        page.browser.replace("#set-key", "secret")
        page.browser.keys(ESCAPE)
        until("no notice", lambda: page.browser.script("return notice.hidden"))
        page.browser.click(".retry")
        until("an answer", lambda: "tokens at" in locked.stats())
        page.browser.problems()  # the refusals are some
    finally:
        server.close()


def test_shortcuts(page):
    page.load()
    page.ask("What is 8 + 8?")
    page.browser.keys(CONTROL, "k")
    assert page.browser.script("return document.activeElement.id") == "search"
    page.browser.script("document.activeElement.blur()")
    page.browser.keys("/")
    assert page.browser.script("return document.activeElement.id") == "text"
    page.browser.script("document.activeElement.blur()")
    page.browser.keys("?")
    rows = page.browser.script("return [...document.querySelectorAll('#keys tr')].map(r => r.innerText)")
    assert len(rows) > 10 and any("stop the answer" in r for r in rows), rows
    page.browser.keys(ESCAPE)
    page.browser.keys(ALT, "r")
    until("a second version", lambda: "2/2" in page.browser.script("return turns.innerText"))
    page.finish()
    page.browser.keys(CONTROL, SHIFT, "O")
    until("a new conversation", lambda: page.count() == 0)
    page.browser.keys(CONTROL, "b")
    assert page.browser.script("return sidebar.getBoundingClientRect().width") == 0
    page.browser.keys(CONTROL, "b")


# Markdown

MARKDOWN = """# Heading

*italic* **bold** ~~gone~~ [link](https://example.com/a?b=1&c=2) and $5 or $10
next line

> a quote

1. one
   - nested

     ```python
     def f(): return "x"  # inside a list
     ```
2. two
- [x] done

| a | b |
|---|--:|
| 1 | 2 |

$$\\int_0^1 x^2\\,dx = \\frac13$$

Euler: \\(e^{i\\pi} + 1 = 0\\), $a^2$.

---

| wide | """ + " | ".join(f"column {i}" for i in range(20)) + " |\n|" + "---|" * 21 + "\n| 1 |" + " 2 |" * 20 + """

```cpp
template <typename T> T sum(const std::vector<T>& v);  // a comment that is so long that it must be scrolled sideways
```
"""


def test_markdown(page):
    page.load()
    page.model_says(MARKDOWN, pieces=40)
    page.ask("Everything")
    until("colours", lambda: page.has(".assistant .hljs-keyword") >= 2)
    until("formulas", lambda: page.has(".assistant .katex") == 3 and page.has(".assistant .katex-display") == 1)
    for css, count in (("h3", 1), ("em", 1), ("strong", 1), ("del", 1), ("blockquote p", 1), ("ol > li", 2), ("hr", 1),
                       ("ol > li > ul > li", 1), ("ol > li ul > li .codebox", 1), ("input:checked", 1), ("table", 2),
                       ("td[align=right]", 1), ("a[href='https://example.com/a?b=1&c=2'][rel~=noopener][target=_blank]", 1)):
        assert page.has(".assistant .body " + css) == count, (css, page.has(".assistant .body " + css))
    assert "$5 or $10\nnext line" in page.last(), page.last()
    assert page.browser.script("return document.fonts.check('12px KaTeX_Main')")


def test_markdown_while_it_grows(page):
    """Blocks that are complete keep their elements, so that a selection holds."""
    page.load()
    page.model_says("First **paragraph**.\n\n" + LONG, pieces=40, ms=20)
    page.send("Write")
    until("two blocks", lambda: page.has(".assistant .block") >= 3)
    page.browser.script("window.kept = document.querySelector('.assistant .block')")
    page.finish()
    assert page.browser.script("return window.kept === document.querySelector('.assistant .block')")
    assert page.has(".assistant .block") == 61


ATTACK = ("<img src=x onerror=window.pwned=1><script>window.pwned=1</script><svg onload=window.pwned=1>\n"
          "[click](javascript:window.pwned=1) [data](data:text/html,x) ![img](https://evil.example/track.png)\n"
          "**<b onclick=window.pwned=1>bold</b>** `<i>code</i>` <sub>ok</sub> <br style=x>\n\n"
          "<a href='javascript:window.pwned=1' id=text name=log>x</a><form action=/x><input autofocus></form>\n\n"
          "```html\"><img/src=x/onerror=window.pwned=1>\n<iframe src='javascript:parent.pwned=1'></iframe>\n```\n# <u>head</u>\n- <s>item</s>\n\n"
          "$\\href{javascript:window.pwned=1}{x}$ $\\includegraphics{https://evil.example/x.png}$ $\\htmlStyle{color:red}{x}$ "
          "$\\def\\a{\\a\\a}\\a$\n\n[x]: javascript:window.pwned=1\n[x]\n\n" + "> " * 300 + "deep")


def test_markup_cannot_run(page):
    """The model really says it, because the schema lets it say nothing else; then with line breaks, then a person does."""
    page.load({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": ATTACK[:300]}}}})
    page.set("think", "off")
    said = page.ask("Attack!")
    assert "<script>window.pwned=1</script>" in said, said
    page.model_says(ATTACK, pieces=90)
    page.ask(ATTACK[:150].replace("\n", " "))
    time.sleep(0.5)
    found = page.browser.script("""return [window.pwned ?? null,
        document.querySelectorAll('#turns :is(img, script, iframe, form, object, embed, style, link)').length,
        document.querySelectorAll('#turns [href^=javascript], #turns [href^=data], #turns [onerror], #turns [onclick]').length,
        [...document.querySelectorAll('#turns .body [id], #turns .body [name]')].length,
        document.querySelectorAll('#turns .assistant:last-child pre code').length,
        document.querySelectorAll('#turns .assistant:last-child sub').length]""")
    assert found == [None, 0, 0, 0, 1, 1], found
    assert page.has(".assistant:last-child a[href='https://evil.example/track.png']") == 1, "an image is a link"
    page.browser.problems()  # the policy refuses the colour of KaTeX's errors


# For everybody, everywhere

CONTRAST = """
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); const s = c.startsWith('color(') ? 255 : 1;
  return [m[0] * s, m[1] * s, m[2] * s, m[3] ?? 1]; };
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3]));
const back = e => { const layers = []; for (; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]); };
const bad = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || e.closest('[hidden], .unseen, .skip, .katex, svg, :disabled') || !e.checkVisibility({ opacityProperty: true })) continue;
  const under = back(e), ink = over(parse(getComputedStyle(e).color), under);
  const [a, b] = [light(under), light(ink)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) bad.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return bad;"""

UNNAMED = """
const named = e => e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim() || e.getAttribute('aria-labelledby');
return [...document.querySelectorAll('button, input, textarea, select, a, dialog, nav, form, progress')]
  .filter(e => !e.hidden && !e.closest('[hidden]') && e.type !== 'hidden' && !named(e) && e.checkVisibility()).map(e => e.outerHTML.slice(0, 120))"""


def test_contrast_and_labels(page):
    page.load()
    page.browser.script("const s = document.createElement('style'); document.body.append(s)")
    page.model_says(MARKDOWN, reasoning="Let me think about it.")
    page.ask("Everything")
    page.model_says("Half", more=[[5, None]])
    page.send("An error")
    page.finish()
    until("colours", lambda: page.has(".hljs-comment"))
    try:
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            time.sleep(0.4)  # transitions
            for where in (None, "#gear", "#help"):
                if where:
                    page.browser.click(where)
                bad = page.browser.script(CONTRAST)
                assert not bad, (scheme, where, bad)
                assert page.browser.script(UNNAMED) == [], page.browser.script(UNNAMED)
                if where:
                    page.picture(f"desktop-{scheme}-{where[1:]}")
                    page.browser.keys(ESCAPE)
            page.browser.script("log.scrollTop = 0")
            page.picture(f"desktop-{scheme}")
            page.browser.script("log.scrollTop = 600")
            page.picture(f"desktop-{scheme}-below")
            page.browser.script("log.scrollTop = log.scrollHeight")
            page.picture(f"desktop-{scheme}-end")
    finally:
        page.scheme(None)
    page.browser.problems()  # the policy refuses the style element above: it works


def test_the_live_region_is_quiet(page):
    """It is told when an answer begins and ends, not each time it grows; the messages are no live region."""
    page.load()
    page.browser.script("""window.told = []; new MutationObserver(() => window.told.push(document.getElementById('status').textContent))
        .observe(document.getElementById('status'), { childList: true, characterData: true, subtree: true })""")
    page.model_says(LONG, pieces=60, ms=5)
    page.ask("Write")
    assert page.browser.script("return window.told") == ["Answering", "The answer is complete"]
    assert page.has("#log[aria-live], #log [aria-live]") == 0


def test_theme(page):
    page.load()
    back = "return getComputedStyle(document.body).backgroundColor"
    page.scheme("light")
    light = page.browser.script(back)
    page.set("theme", "dark")
    dark = page.browser.script(back)
    assert light == "rgb(255, 255, 255)" and dark != light, (light, dark)
    page.reload()
    assert page.browser.script(back) == dark
    page.set("theme", "")
    page.scheme(None)


def test_phone(page):
    page.phone()
    try:
        page.load()
        page.browser.script("window.words = 'word'.repeat(100)")
        page.model_says(MARKDOWN + "\n" + "word" * 100)
        page.ask("x" * 300)
        until("formulas", lambda: page.has(".katex") == 3)
        widths = page.browser.script("return [document.documentElement.scrollWidth, log.scrollWidth, innerWidth]")
        assert max(widths) == 360, widths
        for name in ("#show", "#send", "#text", "#gear", "#attach", ".assistant .tools"):
            left, right = page.browser.script(
                "const r = document.querySelector(arguments[0]).getBoundingClientRect(); return [r.left, r.right]", name)
            assert 0 <= left < right <= 360, (name, left, right)
        for scheme in ("light", "dark"):
            page.scheme(scheme)
            page.browser.script("log.scrollTop = 0")
            time.sleep(0.3)
            page.picture(f"phone-{scheme}")
            page.browser.click("#show")
            time.sleep(0.3)
            assert page.browser.script("return sidebar.getBoundingClientRect().left") == 0
            page.picture(f"phone-{scheme}-list")
            page.browser.press("#shade")
            time.sleep(0.3)
            assert page.browser.script("return sidebar.getBoundingClientRect().right") <= 0
        page.browser.click("#gear")
        page.picture("phone-settings")
        assert page.browser.script("return document.querySelector('#settings').scrollWidth") <= 360
        page.browser.keys(ESCAPE)
    finally:
        page.phone(False)
        page.scheme(None)


def test_nothing_from_elsewhere(page):
    page.load()
    page.model_says(MARKDOWN)
    page.ask("Everything")
    until("formulas", lambda: page.has(".katex") == 3)
    names = page.browser.script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert len(names) > 10 and all(name.startswith(page.server.url) for name in names), names


def main():
    missing = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
    if missing:
        print(f"SKIPPED: no {' and no '.join(missing)} on the PATH; the web page was not tested")
        return 0
    wanted = sys.argv[2:]
    tests = [test for name, test in globals().items() if name.startswith("test_") and (not wanted or name in wanted)]
    failed = 0
    with contextlib.closing(Server(sys.argv[1])) as server, contextlib.closing(Browser()) as browser:
        page = Page(browser, server)
        page.folder = browser.profile
        for test in tests:
            try:
                test(page)
                problems = browser.problems()
                assert not problems, problems
                print("ok     ", test.__name__, flush=True)
            except (AssertionError, RuntimeError, IndexError, KeyError, StopIteration) as error:
                failed += 1
                print("FAILED ", test.__name__, error, flush=True)
    print(f"test cases: {len(tests)} | {len(tests) - failed} passed | {failed} failed")
    return failed > 0


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C.UTF-8")
    sys.exit(main())
