"""Take the README's picture of the page, docs/page.png, of the itn pair's answer in Chromium.

`python tools/picture.py` needs Debian's chromium and requirements/serve.txt and test.txt.
The pair answers three times, plain decoding after each; the picture shows the third.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "benchmarks" / "prompts" / "itn.jsonl"
SPECRT = (sys.executable, "-m", "specrt")
WIDTH = 1000
PATIENCE_MS = 60_000


@contextmanager
def serving() -> Iterator[str]:
    """Serve the pair, built if need be, and yield the page's address."""
    build = [*SPECRT, "build", "engines/itn/recipe.toml", "--if-stale"]
    subprocess.run(build, cwd=ROOT, check=True)
    serve = [*SPECRT, "serve", "engines/build/itn", "--port", "0"]
    with subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            told = (re.search(r"page: (\S+)\)", line) for line in server.stderr or ())
            yield next(found[1] for found in told if found)
        finally:
            server.terminate()


def ask(browser: Browser, address: str, prompt: str) -> Page:
    """Return the page with an answer, and that of plain decoding, on it."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 500}, device_scale_factor=1.5)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(address)
    expect(page.locator("#about")).to_contain_text("itn")
    gamma = page.get_by_label("Gamma")
    gamma.fill(gamma.get_attribute("max") or "")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Compare with plain").check()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    for again in range(3):
        expect(page.locator(".verdict")).to_contain_text("The same text", timeout=PATIENCE_MS)
        if again < 2:
            page.locator(".verdict").evaluate("(verdict) => verdict.remove()")
            page.get_by_role("button", name="Regenerate").click()
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.focus("#prompt")
    page.mouse.move(0, 0)
    return page


def main() -> None:
    """Take the picture."""
    prompt = json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[0])["prompt"]
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-lcd-text"]
        )
        page = ask(browser, address, prompt)
        page.screenshot(path=ROOT / "docs" / "page.png")
        print(page.locator(".verdict strong").text_content())
        browser.close()


if __name__ == "__main__":
    main()
