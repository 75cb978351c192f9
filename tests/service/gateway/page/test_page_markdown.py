"""Markdown of answers in a real browser: what is shown as markup, and that hostile text stays text."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from service.gateway.page.conftest import ANSWER, PATIENCE, Watched
from service.gateway.page.scripted import Script, ScriptedGateway

expect.set_options(timeout=PATIENCE)

LINK = 'title="https://e.org/a_(b)" rel="noopener noreferrer" target="_blank"'
SHOWN = {
    "# One\n###### Six *it*": "<h3>One</h3><h6>Six <em>it</em></h6>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "**b** __b__ *i* _i_": "<p><strong>b</strong> <strong>b</strong> <em>i</em> <em>i</em></p>",
    "***both*** **a *b**": "<p><strong><em>both</em></strong> <strong>a *b</strong></p>",
    "2 * 3 * 4, a_b_c, \\*x\\*": "<p>2 * 3 * 4, a_b_c, *x*</p>",
    "`a*b*` ``x`y`` `` ` `` `": "<p><code>a*b*</code> <code>x`y</code> <code>`</code> `</p>",
    "```py\n*a*\n\n <b>\n```\nx": "<pre><code>*a*\n\n &lt;b&gt;</code></pre><p>x</p>",
    "~~~\n```\n~~~": "<pre><code>```</code></pre>",
    "- a\n- b\n\n  c\n\nd": "<ul><li><p>a</p></li><li><p>b</p><p>c</p></li></ul><p>d</p>",
    "3. a\n   - b\n     ```\n     c\n     ```\n4. d": (
        '<ol start="3"><li><p>a</p><ul><li><p>b</p><pre><code>c</code></pre></li></ul></li><li><p>d</p></li></ol>'
    ),
    "text\n1986. was\n- a": "<p>text\n1986. was</p><ul><li><p>a</p></li></ul>",
    "- a\n1. b": '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>',
    "a\n---\nb": "<p>a</p><hr><p>b</p>",
    "[*t*](https://e.org/a_(b))": f'<p><a href="https://e.org/a_(b)" {LINK}><em>t</em></a></p>',
    '[t](<https://e.org/a_(b)> "title")': f'<p><a href="https://e.org/a_(b)" {LINK}>t</a></p>',
}
TEXT = (
    "[x](javascript:alert(1))",
    "[x](JavaScript:alert(1))",
    "[x](data:text/html,hi)",
    "[x](/headrace/overview)",
    "[x](//e.org)",
    "![x](https://e.org/x.png)",
    "<img src=https://e.org/x.png onerror=alert(1)>",
    "<script>alert(1)</script>",
    "<a href=javascript:alert(1)>x</a>",
    "&lt;b&gt;",
    "**open *mark `code [link](http://e.org",
)
HOSTILE = ("*a ", "**a _b ", "[", "![", "[a](", "~x", "_a_b", "<b>")
RENDER = """async (texts) => {
  const { showMarkdown } = await import("/page/markdown.js");
  return texts.map((text) => {
    const node = document.createElement("div");
    showMarkdown(node, text);
    return [node.innerHTML, node.textContent];
  });
}"""


@pytest.fixture
def render(page: Page, scripted: ScriptedGateway) -> Callable[..., list[tuple[str, str]]]:
    """Return markup and text of each Markdown."""
    page.goto(scripted.url)
    return lambda *texts: [(markup, text) for markup, text in page.evaluate(RENDER, list(texts))]


def test_markdown_is_shown_as_markup(render: Callable[..., list[tuple[str, str]]]) -> None:
    found = {source: markup for source, (markup, _) in zip(SHOWN, render(*SHOWN), strict=True)}
    assert found == SHOWN


def test_html_images_and_links_to_others_than_the_web_stay_text(
    render: Callable[..., list[tuple[str, str]]],
) -> None:
    for source, (markup, text) in zip(TEXT, render(*TEXT), strict=True):
        assert text == source
        assert re.findall(r"<(?!/?p>)", markup) == [], markup


def test_hostile_nesting_and_unclosed_marks_keep_their_text(render: Callable[..., list[tuple[str, str]]]) -> None:
    count = 20_000
    runs = [mark * count for mark in HOSTILE]
    runs.append(" ".join("`" * length for length in range(1, 300)))
    for source, (_, text) in zip(runs, render(*runs), strict=True):
        assert text == source.strip()
    deep = ["- " * count + "end", "\n".join("  " * depth + "- end" for depth in range(200))]
    for markup, text in render(*deep):
        assert markup.count("<ul>") == 8
        assert text.endswith("- end")


def test_the_time_for_hostile_text_grows_with_its_length(page: Page, scripted: ScriptedGateway) -> None:
    page.goto(scripted.url)
    ratios = page.evaluate(
        """async (runs) => {
          const { showMarkdown } = await import("/page/markdown.js");
          const took = (text) => {
            const began = performance.now();
            let [count, milliseconds] = [0, 0];
            while (milliseconds < 10) { // the clock counts in tenths of a millisecond
              showMarkdown(document.createElement("div"), text);
              [count, milliseconds] = [count + 1, performance.now() - began];
            }
            return milliseconds / count;
          };
          const best = (text) => Math.min(took(text), took(text), took(text));
          return runs.map((run) => [run, best(run.repeat(16000)) / best(run.repeat(500))]);
        }""",
        list(HOSTILE),
    )
    # 32 times the text takes 32 times as long, or 1000 times if the time is quadratic
    assert [(run, ratio) for run, ratio in ratios if ratio > 200] == []


def test_an_answer_in_parts_looks_at_its_end_as_if_it_had_come_at_once(page: Page, scripted: ScriptedGateway) -> None:
    page.goto(scripted.url)
    source = "\n\n".join([*SHOWN, "a\n``` b` c"])  # the last looks like a fence until its backtick comes
    in_parts, at_once, kept = page.evaluate(
        """async (text) => {
          const { showMarkdown } = await import("/page/markdown.js");
          const [parts, whole] = [document.createElement("div"), document.createElement("div")];
          let first;
          for (let end = 1; end <= text.length; end += 1) {
            showMarkdown(parts, text.slice(0, end));
            if (end === 20) first = parts.firstChild;
          }
          showMarkdown(whole, text);
          return [parts.innerHTML, whole.innerHTML, parts.firstChild === first];
        }""",
        source,
    )
    assert in_parts == at_once
    assert kept  # a block that is complete is not made again


def test_a_hostile_answer_streams_as_text_and_loads_nothing(
    watched: Watched, scripted: ScriptedGateway, script: Script
) -> None:
    page = watched.page
    hostile = "\n\n".join([*TEXT[:-1], "x" * 5000, "```js\n<script>document.title='owned'</script>"])
    script.tokens = [hostile[at : at + 7] for at in range(0, len(hostile), 7)]
    page.set_viewport_size({"width": 380, "height": 800})
    page.goto(scripted.url)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#play-state")).to_have_text("finished")
    expect(page.locator(f"{ANSWER} pre")).to_have_text("<script>document.title='owned'</script>")
    expect(page.locator(f"{ANSWER} p")).to_have_text([*TEXT[:-1], "x" * 5000])
    assert page.locator(f"{ANSWER} :is(a, img, script)").count() == 0
    assert page.title() == "Headrace"
    assert [url for url in watched.urls if not url.startswith(scripted.url)] == []
    assert page.evaluate("() => document.documentElement.scrollWidth") == 380
