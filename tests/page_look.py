"""Tests of the web page: settings, errors, keys, Markdown, and that everybody can read it everywhere."""
import time

from browser import ALT, CONTROL, ESCAPE, SHIFT, Page, Server, until
from page_chat import LONG


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
