"""The page at `/`, in a real browser, against a server whose answers the tests write."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serve.support import Live
from shared import REPOSITORY
from support.page_server import (
    PIECES,
    PageServer,
    Script,
    Step,
    answer,
    closing,
    content,
    event,
    refusal,
    rounds,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
if CHROMIUM is None:
    pytest.skip("needs Debian's chromium: apt-get install chromium", allow_module_level=True)
pytest.importorskip("playwright.sync_api", reason="needs playwright: requirements/test.txt")

from playwright.sync_api import expect, sync_playwright  # noqa: E402

PAGE = REPOSITORY / "runtime" / "specrt" / "serve" / "page.html"
QUIET = "--disable-gpu --no-first-run --disable-background-networking --disable-component-update"
TEXT = "".join(PIECES)
PATIENCE_MS = 60_000
"""How long a machine may be busy with other things; what is right comes at once."""

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = ["--no-sandbox", "--disable-sync", *QUIET.split()]
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=flags, timeout=PATIENCE_MS
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(PAGE) as opened:
        yield opened
        opened.shutdown()


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """Errors of the page's script, and what its policy refused; none are left at the end."""
    heard: list[str] = []
    yield heard
    assert heard == []


@pytest.fixture
def open_page(browser: Browser, server: PageServer, complaints: list[str]) -> Iterator[Open]:
    """Opens the page in a browser's profile of its own."""
    contexts = []

    def note(said: str) -> None:
        if "Security Policy" in said:
            complaints.append(said)

    def opened(
        script: Script | None = None, mode: str = "", key: str = "", url: str = "", **view: Any
    ) -> Page:
        server.renew(mode=mode, key=key, script=script)
        context = browser.new_context(**view)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: note(said.text))
        page.goto(url or server.url)
        if not key:
            expect(page.locator("#about")).to_contain_text("codelet")
        return page

    yield opened
    for context in contexts:
        context.close()


def ask(page: Page, prompt: str = "x") -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def answered(page: Page, count: int = 1) -> None:
    expect(page.locator("article[aria-busy=false]")).to_have_count(count)
    expect(page.locator("#go")).to_have_text("Send")


def texts(page: Page) -> list[str]:
    return page.locator(".text").all_text_contents()


def kept(page: Page) -> str:
    return "".join(page.locator(".text .kept").all_text_contents())


def figures(page: Page) -> dict[str, str]:
    names, values = (page.locator(f".figures {at}").all_inner_texts() for at in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def cut_after(pieces: list[str], *then: Step) -> Script:
    """Return a script that streams tokens, waits until they are read, and does `then`."""

    def script(request: dict[str, Any]) -> Iterator[Step]:
        yield from (event(content(request, spans, drafted)) for drafted, spans in rounds(pieces))
        yield 0.3
        yield from then

    return script


def forever(request: dict[str, Any]) -> Iterator[Step]:
    while True:
        yield event(content(request, [("more", True), (" and", False)], 2))
        yield 0.02


def test_drafted_and_accepted_text_is_marked_and_the_rest_is_not(
    open_page: Open, server: PageServer
) -> None:
    page = open_page()
    ask(page, "# x\n")
    answered(page)
    assert texts(page) == ["# x\n" + TEXT]
    spans = [span for _, spans in rounds(PIECES) for span in spans]
    marked = "".join(text for text, accepted in spans if accepted)
    assert "".join(kept(page).split()) == "".join(marked.split()) != "".join(TEXT.split())
    style = "(all) => { const s = getComputedStyle(all); return s.textDecorationLine + s.color; }"
    drawn, around = (page.locator(at).first.evaluate(style) for at in (".text .kept", ".text"))
    assert drawn.startswith("underline")
    assert drawn[9:] != around.removeprefix("none")
    path, request = server.requests[0]
    assert path == "/v1/completions"
    assert request["prompt"] == "# x\n"
    assert request["stream"] is True
    assert request["gamma"] == "auto"
    assert request["drafter"] == "cascade"
    assert request["stream_options"] == {"include_usage": True, "include_speculation": True}
    assert figures(page) == {
        "tokens/s": "412", "tokens per round": "1.21", "acceptance rate": "0.71",
        "gamma, mean": "4.0", "to the first token": "6 ms", "tokens": str(len(PIECES)),
    }  # fmt: skip
    expect(page.locator("#status")).to_contain_text("412 tokens per second")


def test_rounds_are_drawn_as_they_come_and_stop_keeps_the_text(
    open_page: Open, server: PageServer
) -> None:
    page = open_page(forever)
    for count, stop in enumerate(
        (lambda: page.keyboard.press("Escape"), lambda: page.click("#go"))
    ):
        server.gone.clear()
        ask(page)
        expect(page.locator(".text").last).to_contain_text("more and")
        expect(page.locator(".rounds figcaption").last).to_contain_text(
            "gamma 2, 1 accepted, model"
        )
        page.locator(".rounds").last.locator(".drafted").nth(3).wait_for(state="attached")
        drafted, accepted = (
            float(page.locator(f".rounds .{kind}").first.get_attribute("height") or "")
            for kind in ("drafted", "accepted")
        )
        assert 0 < accepted < drafted
        expect(page.locator("#go")).to_have_text("Stop")
        stop()
        answered(page, count + 1)
        expect(page.locator(".note").last).to_have_text("stopped")
        assert server.gone.wait(PATIENCE_MS / 1000)
        before = texts(page)
        page.wait_for_timeout(100)
        assert before == texts(page)
        assert before[-1].startswith("xmore and")
    expect(page.locator(".error")).to_have_count(0)


def test_a_chat_sends_what_was_said_before(open_page: Open, server: PageServer) -> None:
    page = open_page(mode="chat")
    page.get_by_label("System prompt").fill("Be brief.")
    for count, question in enumerate(("one", "two"), 1):
        ask(page, question)
        answered(page, count)
    path, request = server.requests[1]
    assert path == "/v1/chat/completions"
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "two"},
    ]
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Keep it").click()
    expect(page.locator("article")).to_have_count(2)
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Drop it").click()
    expect(page.locator("article")).to_have_count(0)
    ask(page, "three")
    answered(page)
    assert said(server) == ["Be brief.", "three"]


def said(server: PageServer) -> list[str]:
    """Return what the last request says, message by message."""
    return [message["content"] for message in server.requests[-1][1]["messages"]]


FAILURES: list[tuple[list[Step], str]] = [
    ([None], "The connection to the server was lost. What came until then is above."),
    ([], "The connection ended before the answer did."),
    ([event(refusal("the engine failed"))], "the engine failed"),
    ([b"data: {\n\n"], "The server sent what is not JSON."),
]


def test_what_came_before_a_failure_stays(open_page: Open, server: PageServer) -> None:
    page = open_page()
    for count, (then, told) in enumerate(FAILURES, 1):
        server.script = cut_after(PIECES[:8], *then)
        ask(page)
        expect(page.get_by_role("alert").last).to_contain_text(told)
        answered(page, count)
        assert texts(page) == ["x" + "".join(PIECES[:8])] * count
        expect(page.locator(".note").last).to_have_text("not finished")
        expect(page.locator("#prompt")).to_have_value("")


def test_the_real_server_is_understood(open_page: Open, real: Live) -> None:
    page = open_page(url=real.url)
    page.get_by_label("Compare with plain").check()
    page.get_by_label("Max tokens").fill("48")
    page.get_by_label("Seed").fill("3")
    ask(page, "def fibonacci(n):")
    answered(page, 2)
    expect(page.locator(".verdict")).to_contain_text("The same text, ")
    first, second = texts(page)
    assert first == second
    assert 0 < len(kept(page)) < len(first)
    assert page.locator("article").last.locator(".kept").count() == 0
    expect(page.locator(".note").first).to_have_text("cut at max tokens, seed 3")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Drafter").select_option("ngram")
    page.get_by_label("Gamma").fill("3")
    ask(page, "again")
    answered(page, 4)
    expect(page.locator(".verdict").last).to_contain_text("The same text, ")
    ask(page, "long " * 3000)
    expect(page.get_by_role("alert")).to_contain_text("(400): the prompt has")


def test_html_stays_text(open_page: Open, server: PageServer) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>&amp;"
    page = open_page(answer([evil, evil]), mode="chat")
    ask(page, evil)
    answered(page)
    assert texts(page) == [evil * 2]
    assert page.locator(".prompt").text_content() == evil
    server.refused = (400, refusal(evil))
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text(evil)
    assert page.locator("img, b:not(#legend b), #turns :is(script, a)").count() == 0
    assert page.title() == "codelet, specrt"
    assert set(server.paths) == {"/", "/v1/models"}


OUTLINE = """(box) => {
  const outline = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    const inner = [...node.childNodes].map(outline).join(""), tag = node.localName;
    const bare = node.matches(".text, .kept, button, .text > * > span, pre > div");
    return bare ? inner : `<${tag}>${inner}</${tag}>`;
  };
  return outline(box);
}"""
"""The elements and texts of an answer, whatever of it was drafted."""

MARKDOWN = {
    "# A *b*\n\ntwo  \nlines": "<h4>A <em>b</em></h4><p>two  </p><p>lines</p>",
    "**a `*b*` c** __init__ 2 * 3": "<p><strong>a <code>*b*</code> c</strong> __init__ 2 * 3</p>",
    r"\*a\* and _b_, snake_case_name": "<p>*a* and <i>b</i>, snake_case_name</p>",
    "- a\n  - b\n\n3) c\n---": "<ul><li>a</li><li>b</li></ul><ol><li>c</li></ol><hr></hr>",
    "> a\n> **b": "<blockquote><p>a</p><p>**b</p></blockquote>",
    "| a | b |\n|---|:-:|\n| `c` | d |": "<table><tr><th> a </th><th> b </th></tr><tr></tr>"
    "<tr><td> <code>c</code> </td><td> d </td></tr></table>",
    "```py\n**x** = 1\n\n```\nafter": "<figure><figcaption>pyCopy</figcaption><pre>**x** = 1\n\n"
    "</pre></figure><p>after</p>",
    " ~~~\n ```\nnever closed": "<figure><figcaption>Copy</figcaption><pre>```\n"
    "never closed</pre></figure>",
    "[a](https://b.c) [e](javascript:f()) ![g](data:h) [i](//j)": "<p><a>a</a> "
    "[e](javascript:f()) ![g](data:h) [i](//j)</p>",
    "*`*`*" * 3 + "[[a](http://b)](http://c) \\": None,
    "word " * 500: None,
    "x" * 2500: None,
    "*" * 200 + "`" * 201 + "[" * 200 + "|" * 200: None,
    "מודל קטן **מציע**, \U0001f468\u200d\U0001f469\u200d\U0001f467 decides": None,
}
"""Markdown, and its outline where that is worth writing down."""


def test_markdown_is_drawn_token_by_token(open_page: Open, server: PageServer) -> None:
    page = open_page(mode="chat")
    for source, outline in MARKDOWN.items():
        drawn = []
        cut = re.findall(r"(?s).{1,3}", source)
        for pieces in [cut] if outline else [[source], cut]:
            server.script = answer(pieces)
            page.get_by_role("button", name="New").click()
            if page.get_by_role("button", name="Drop it").is_visible():
                page.get_by_role("button", name="Drop it").click()
            ask(page)
            answered(page)
            drawn.append(page.locator(".text").evaluate(OUTLINE))
        assert {*drawn} == {outline or drawn[0]}
        for link in page.locator(".text a").all():
            assert re.match("https?://", link.get_attribute("href") or "")
            assert link.get_attribute("rel") == "noopener noreferrer"


def test_events_may_be_cut_at_any_byte(open_page: Open) -> None:
    line_end = b"\r\n"
    pieces = ["für ", "日本", "語 ", "\U0001f600", "\n\n", "ende "]

    def script(request: dict[str, Any]) -> Iterator[Step]:
        made = rounds(pieces)
        events = [event(content(request, spans, drafted)) for drafted, spans in made]
        whole = b"".join([b": a comment\n\nevent: message\n", *events, *closing(request, made, 9)])
        whole = whole.replace(b', "metrics"', b',\ndata: "metrics"').replace(b"\n", line_end)
        for byte in whole:
            yield bytes([byte])
            if byte > 127 or byte in line_end:
                yield 0.012  # so that the browser reads them apart

    page = open_page(script, mode="chat")
    ask(page)
    answered(page)
    assert texts(page) == ["".join(pieces).replace("\n", "")]
    expect(page.locator(".error")).to_have_count(0)


def test_the_policy_admits_this_page_alone() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text, f"write sha256-{digest} for {tag}-src"
    addresses = set(re.findall(r"\w+://[^\s\"']+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=\"", text)
