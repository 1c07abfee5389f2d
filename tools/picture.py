"""Take the README's picture of the page, docs/page.png, of the itn pair's answer in Chromium.

`python tools/picture.py` needs Debian's chromium and requirements/serve.txt and test.txt.
The pair answers nine times, plain decoding after each. The picture shows the answer whose ratio of
the two speeds is the median, so nobody picks it; all nine ratios are printed. Use a quiet machine.
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
PATIENCE_MS = 60_000
ANSWERS = 9


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


def asked(browser: Browser, address: str, prompt: str) -> Page:
    """Return the page with an answer, and that of plain decoding, on it."""
    page = browser.new_page(viewport={"width": 1000, "height": 500}, device_scale_factor=1.2)
    page.set_default_timeout(PATIENCE_MS)
    page.goto(address)
    expect(page.locator("#about")).to_contain_text("itn")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Compare with plain").check()
    page.set_viewport_size({"width": 900, "height": 500})  # without the settings
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    return page


def answers(page: Page) -> Iterator[tuple[float, bytes]]:
    """Yield the ratio that each answer shows, and its picture."""
    verdict = page.locator(".verdict")
    for count in range(ANSWERS):
        if count:
            page.get_by_role("button", name="Regenerate").click()
        expect(verdict).to_contain_text("The same text", timeout=PATIENCE_MS)
        page.set_viewport_size({"width": 900, "height": 500})
        height = page.evaluate("document.documentElement.scrollHeight")
        page.set_viewport_size({"width": 900, "height": height})
        page.focus("#prompt")
        page.mouse.move(0, 0)
        ratio = re.search(r"[\d.]+ times", verdict.text_content() or "")
        assert ratio is not None
        yield float(ratio[0].split()[0]), page.screenshot()
        verdict.evaluate("(verdict) => verdict.remove()")


def main() -> None:
    """Take the picture."""
    prompt = json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[0])["prompt"]
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-lcd-text"]
        )
        found = sorted(answers(asked(browser, address, prompt)))
        (ROOT / "docs" / "page.png").write_bytes(found[ANSWERS // 2][1])
        print("times plain:", *(ratio for ratio, _ in found))
        browser.close()


if __name__ == "__main__":
    main()
