"""Tests of the web page: answers, conversations that are not lost, what a message can do."""
import contextlib
import json
import re
import tempfile
import time

from browser import ENTER, ESCAPE, SHIFT, UP, WATCH, Browser, Page, until

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


def test_continue(page):
    """An answer that was cut off goes on where it ends, in its words or in its thinking, in the same place."""
    whole = "The capital of France is Paris."
    thoughts = "return document.querySelector('.turn:last-child .thoughts').textContent"
    for think, limit in (("off", 3), ("on", 5), ("on", 17)):
        page.load({"max_tokens": limit})
        page.set("think", think)
        begun = page.ask("What is the capital of France?")
        thought = page.browser.script(thoughts)
        assert whole.startswith(begun) and begun != whole and "Cut off" in page.note(), (begun, page.note())
        assert (thought != "") == (think == "on") and (begun == "") == (limit == 5), (begun, thought)
        page.watch()
        page.browser.click(".proceed")
        until("the whole answer", lambda: page.last() == whole)
        page.finish()
        assert page.browser.script(thoughts).startswith(thought)
        assert page.count() == 2 and page.has(".proceed") == 0 and page.note() == "", page.note()
        body = page.sent()
        assert body["continue_final_message"] is True and body["messages"][-1]["role"] == "assistant", body
        page.reload()
        assert page.last() == whole and page.has(".proceed") == 0
    page.set("think", "off")


def test_continue_after_a_stop_and_a_broken_connection(page):
    page.load(ENDLESS)
    page.send("Tell me a story.")
    until("some text", lambda: len(page.last()) > 60)
    page.browser.keys(ESCAPE)
    page.finish()
    assert page.has(".proceed") == 1
    page.load()
    page.model_says("Half of", more=[[5, None]])
    page.send("Break")
    page.finish()
    page.model_says(" it.")
    page.browser.click(".proceed")
    until("both halves", lambda: page.last() == "Half of it.")
    page.finish()
    assert page.note() == "" and page.sent()["messages"][-1]["content"] == "Half of", (page.note(), page.sent())
    page.ask("More")
    assert page.has(".proceed") == 0


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


def test_delete_while_it_is_written(page):
    """The answer ends, and does not come back."""
    page.load(ENDLESS)
    page.send("A story that nobody wants")
    until("some text", lambda: len(page.last()) > 40)
    page.browser.press(".user .remove")
    until("nothing is left", lambda: page.count() == 0)
    until("the server to stop, too", lambda: page.server.running() == 0)
    time.sleep(0.8)  # longer than between two saves
    page.reload()
    assert page.count() == 0, page.texts()


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
    until("a refusal in words", lambda: "a.bin is neither a text file" in page.browser.script("return toasts.innerText"))
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
