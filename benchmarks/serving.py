"""Measure a server: what HTTP costs, what one machine carries, what a hop before it adds.

    python benchmarks/serving.py overhead BUNDLE      # against the Python interface, in turns
    python benchmarks/serving.py many BUNDLE          # eight clients against generate_many
    python benchmarks/serving.py clients URL          # 1 to 16 clients, drafting on and off
    python benchmarks/serving.py hop URL URL          # the second one against the first, in turns
    python benchmarks/serving.py affinity URL         # shared prefixes: how often one replica

The client is a few lines over a socket, because one that costs as much as the server would be
measured with it. Every request is greedy and runs past the end tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

import specrt
from specrt.generator import Generator
from specrt.params import SamplingParams

PROMPTS = Path(__file__).parent / "prompts" / "code.jsonl"
REPLICA = "x-specrt-replica"
REST_S = 0.2
"""Between the two of a pair: threads that wait for their next pass keep a core for a while."""


@dataclass
class Timing:
    """One request: when its chunks came, in seconds after it was sent."""

    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    replica: str = ""
    error: str = ""

    @property
    def tokens(self) -> int:
        """How many were made."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def cached(self) -> int:
        """How many tokens of the prompt were held already."""
        return int(self.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))

    @property
    def itl_s(self) -> float:
        """The mean time between tokens."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.tokens - 1, 1)


async def request(url: str, prompt: str, tokens: int, **more: Any) -> Timing:
    """Send a streamed request, and note when its chunks arrive."""
    parts = urlsplit(url)
    body = {
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json"
        f"\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    timing, began = Timing(), perf_counter()
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            if name.lower() == REPLICA:
                timing.replica = value.strip()
        if b" 200 " not in status:
            timing.error = status.decode().strip()
        async for line in reader:
            if line.startswith(b"data: {"):
                _note(timing, line, perf_counter() - began)
    finally:
        writer.close()
    return timing


def _note(timing: Timing, line: bytes, seconds: float) -> None:
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        timing.error = event["error"]["message"]
    if event.get("usage"):
        timing.usage = event["usage"]
    elif event.get("choices") and event["choices"][0]["finish_reason"] is None:
        timing.arrivals.append(seconds)


async def load(
    url: str, prompts: Sequence[str], clients: int, tokens: int, **more: Any
) -> tuple[list[Timing], float]:
    """Let so many clients work a list of prompts off; return the timings and the seconds taken."""
    left, timings = iter(prompts), []

    async def client() -> None:
        for prompt in left:
            timings.append(await request(url, prompt, tokens, **more))

    began = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = perf_counter() - began
    failed = [one.error for one in timings if one.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(timings)} requests failed: {failed[0]}")
    return timings, took


def code_prompts(count: int) -> list[str]:
    """Return so many prompts of the code set, from the first on again where they run out."""
    lines = cycle(PROMPTS.read_text(encoding="utf-8").splitlines())
    return [json.loads(next(lines))["prompt"] for _ in range(count)]


@contextmanager
def served(bundle: Path, threads: int | None) -> Iterator[str]:
    """Serve a bundle in a process of its own; yield the address."""
    command = [sys.executable, "-m", "specrt", "serve", str(bundle), "--port", "0"]
    command += [] if threads is None else ["--threads", str(threads)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "serving" in line:
                yield line.split(" at ")[1].split("/v1")[0]
                return
        raise SystemExit(f"the server did not start: {process.wait()}")
    finally:
        process.terminate()
        process.wait(60)


def overhead(given: argparse.Namespace) -> None:
    """Measure one client against `Generator.stream`: tokens per second, and the first byte."""
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, temperature=0.0)
    prompts = code_prompts(given.repeats)
    ratios, delays, rows = [], [], []
    with served(given.bundle, given.threads) as url, _opened(given) as generator:
        asyncio.run(load(url, prompts[:2], 1, given.tokens))
        for prompt in prompts[:2]:
            generator.generate(prompt, params)
        for turn, prompt in enumerate(prompts):
            # Neither holds a prompt when it comes, as it is another one each time.
            sleep(REST_S)
            if turn % 2:
                timing = asyncio.run(request(url, prompt, given.tokens))
                sleep(REST_S)
            first, rate = _streamed(generator, prompt, params)
            if not turn % 2:
                sleep(REST_S)
                timing = asyncio.run(request(url, prompt, given.tokens))
            there = timing.tokens / timing.arrivals[-1]
            rows.append((rate, there, first * 1e3, timing.arrivals[0] * 1e3))
            ratios.append(there / rate)
            delays.append((timing.arrivals[0] - first) * 1e3)
    for name, column in zip(("python tokens/s", "http tokens/s", "python first ms",
                             "http first ms"), zip(*rows, strict=True), strict=True):  # fmt: skip
        print(f"{name:16} {median(column):8.2f}")
    print(f"tokens per second, http over python: {_spread(ratios)}")
    print(f"first byte later by, ms:             {_spread(delays)}")


def many(given: argparse.Namespace) -> None:
    """Measure several clients at once against `generate_many`."""
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True, temperature=0.0)
    prompts, ratios = code_prompts(given.clients), []
    with served(given.bundle, given.threads) as url, _opened(given) as generator:
        asyncio.run(load(url, prompts, given.clients, 4))
        [*generator.generate_many(prompts, SamplingParams(max_tokens=4))]
        for _ in range(given.repeats):
            began = perf_counter()
            made = [c for one in generator.generate_many(prompts, params) for c in one]
            here = sum(len(one.token_ids) for one in made) / (perf_counter() - began)
            timings, took = asyncio.run(load(url, prompts, given.clients, given.tokens))
            there = sum(one.tokens for one in timings) / took
            print(f"generate_many {here:8.1f} tokens/s, {given.clients} clients {there:8.1f}")
            ratios.append(there / here)
    print(f"clients over generate_many: {_spread(ratios)}")


def clients(given: argparse.Namespace) -> None:
    """Measure more and more clients, drafting on and off in turns."""
    print("| clients | gamma | tokens/s | TTFT p50 | TTFT p95 | ITL p50 | ITL p95 |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    asyncio.run(load(given.url, code_prompts(2), 2, 8))
    for count in given.clients:
        for gamma in (0, "auto"):
            # Another beginning each time: what was read before is of no use.
            code = code_prompts(max(2 * count, given.least))
            prompts = [f"# {gamma} {count} {n}\n{prompt}" for n, prompt in enumerate(code)]
            timings, took = asyncio.run(load(given.url, prompts, count, given.tokens, gamma=gamma))
            rate = sum(one.tokens for one in timings) / took
            first = _percentiles([1e3 * one.arrivals[0] for one in timings])
            gaps = _percentiles([1e3 * one.itl_s for one in timings])
            print(
                f"| {count} | {gamma} | {rate:.1f} | {first[0]:.0f} ms | {first[1]:.0f} ms "
                f"| {gaps[0]:.1f} ms | {gaps[1]:.1f} ms |", flush=True
            )  # fmt: skip


def hop(given: argparse.Namespace) -> None:
    """Measure the second address against the first: the first token, and a chunk."""
    firsts, chunks, lasts = [], [], []
    prompt = code_prompts(1)[0]

    async def timed(url: str) -> Timing:
        return await request(url, prompt, given.tokens, gamma=0)

    for url in given.urls:
        asyncio.run(timed(url))
    for _ in range(given.repeats):
        near, far = (asyncio.run(timed(url)) for url in given.urls)
        firsts.append(1e3 * (far.arrivals[0] - near.arrivals[0]))
        chunks.append(1e3 * (far.itl_s - near.itl_s))
        lasts.append(1e3 * near.arrivals[0])
    print(f"first token of the nearer one, ms: {_spread(lasts)}")
    print(f"first token later by, ms:          {_spread(firsts)}")
    print(f"a token later by, ms:              {_spread(chunks)}")


def affinity(given: argparse.Namespace) -> None:
    """Send groups of requests with one prefix each; count those that go where the group went."""
    text = "".join(code_prompts(16))
    size = given.prefix_chars
    prefixes = [f"# file {n}\n{text[n * 100 : n * 100 + size]}" for n in range(given.groups)]
    prompts = [
        f"{prefix}\n\ndef part_{turn}(" for turn in range(given.turns) for prefix in prefixes
    ]
    sent: list[tuple[int, Timing]] = []

    async def run() -> None:
        left = iter(enumerate(prompts))

        async def client() -> None:
            for number, prompt in left:
                timing = await request(given.url, prompt, given.tokens)
                sent.append((number, timing))

        await asyncio.gather(*(client() for _ in range(given.clients)))

    asyncio.run(run())
    last: dict[int, str] = {}
    hits = total = 0
    for number, timing in sorted(sent, key=lambda one: one[0]):
        group = number % given.groups
        if group in last:
            total += 1
            hits += last[group] == timing.replica
        last[group] = timing.replica
    read = sum(one.usage["prompt_tokens"] for _, one in sent)
    cached = sum(one.cached for _, one in sent)
    replicas = sorted({one.replica for _, one in sent})
    shares = [sum(one.replica == name for _, one in sent) for name in replicas]
    print(f"requests a replica: {shares}")
    print(f"same replica as the prefix had before: {hits} of {total}, {hits / total:.3f}")
    print(f"prompt tokens held already: {cached} of {read}, {cached / read:.3f}")


def _opened(given: argparse.Namespace) -> Generator:
    return specrt.load(given.bundle, threads=given.threads, text_memory_bytes=0)


def _streamed(generator: Generator, prompt: str, params: SamplingParams) -> tuple[float, float]:
    """Return the seconds to the first chunk, and the tokens per second of the whole."""
    began, first, tokens = perf_counter(), 0.0, 0
    for chunk in generator.stream(prompt, params):
        first = first or perf_counter() - began
        tokens += len(chunk.token_ids)
    return first, tokens / (perf_counter() - began)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[94]


def _spread(values: Sequence[float]) -> str:
    cuts = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{cuts[1]:.3f} (quartiles {cuts[0]:.3f} to {cuts[2]:.3f}, {len(values)} pairs)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(work: Callable[[argparse.Namespace], None], tokens: int) -> argparse.ArgumentParser:
        made = commands.add_parser(work.__name__, help=(work.__doc__ or "").split("\n")[0])
        made.set_defaults(work=work)
        made.add_argument("--tokens", type=int, default=tokens, help="Of each completion.")
        return made

    for work, repeats in ((overhead, 16), (many, 5)):
        made = command(work, 64)
        made.add_argument("bundle", type=Path)
        made.add_argument("--threads", type=int)
        made.add_argument("--repeats", type=int, default=repeats)
        if work is many:
            made.add_argument("--clients", type=int, default=8)
    made = command(clients, 48)
    made.add_argument("url")
    made.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    made.add_argument("--least", type=int, default=4, help="Requests of the fewest clients.")
    made = command(hop, 32)
    made.add_argument("urls", nargs=2, metavar="URL")
    made.add_argument("--repeats", type=int, default=40)
    made = command(affinity, 16)
    made.add_argument("url")
    made.add_argument("--groups", type=int, default=8)
    made.add_argument("--turns", type=int, default=12)
    made.add_argument("--clients", type=int, default=2)
    made.add_argument("--prefix-chars", type=int, default=600)
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()
