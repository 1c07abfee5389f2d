"""What a link to a server that verifies adds to a round, on this machine's loopback.

    python benchmarks/remote.py engines/build/codelet --gammas 2,4
    python benchmarks/remote.py engines/build/codelet --gammas 4 --round-trips 0,5,20,50,100
    python benchmarks/remote.py engines/build/codelet-200M-int8-rows --gammas 4 --devices 8

The server is a process of its own with the whole bundle; the device drafts in this one. For each
gamma, medians over the rounds of the best of `--repeats` completions: what verifying takes where
the target is in this process; what it takes over the link; how much of that is the server's; and
the bytes of frames each way. WebSocket adds 6 bytes up and 2 down, TCP and IP 40 each.
With `--round-trips`, in milliseconds, a proxy delays what passes, and the time of a round is held
to gamma t_d + RTT + t_v, next to the tokens per second of that gamma, and of `auto` and gamma 0,
medians of 7 texts each, in turns.
With `--devices`, so many devices (threads of one process) have a text each at once: tokens per
second of all, and passes of the server's target for a token, next to those of the server's own
draft without a link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from urllib.request import urlopen

import specrt
from specrt.completion import Completion
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.remote.frames import PATH, ProposalFrame, VerdictFrame
from specrt.remote.remote_target import RemoteTarget

TOKENS = 100
"""Of each text of many devices."""

PROMPT = "def fibonacci(n):\n"


class Row(NamedTuple):
    """Medians over the rounds of one completion, in microseconds and bytes."""

    verify_us: float
    server_us: float
    up_bytes: float
    down_bytes: float
    tokens_per_second: float


def serve(bundle: Path, file: int) -> None:
    """Serve a bundle on a socket that is open already."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route, WebSocketRoute

    from specrt.serve.verify_sessions import VerifyEndpoint

    made = specrt.load(bundle, threads=1, text_memory_bytes=0)
    passes = _count_passes(made)

    def own(request: Request) -> JSONResponse:
        """Complete texts with the server's own draft; tell how many passes there were so far."""
        count, gamma = (int(request.query_params[name]) for name in ("texts", "gamma"))
        began, before = perf_counter(), passes[0]
        if count:
            made.generate_many([PROMPT], _sampled(0, n=count), gamma=gamma)
        return JSONResponse({"passes": [before, passes[0]], "seconds": perf_counter() - began})

    routes = [WebSocketRoute(PATH, VerifyEndpoint(made).endpoint), Route("/own", own)]
    application = Starlette(routes=routes)
    config = uvicorn.Config(
        application, log_level="error", lifespan="off", ws_per_message_deflate=False
    )
    uvicorn.Server(config).run([socket.socket(fileno=file)])


def _count_passes(made: Generator) -> list[int]:
    """Return a list of one number, which each pass of the target raises."""
    target: Any = made.models.target
    run, count = target.forward_rows, [0]

    def forward_rows(feeds: Any) -> Any:
        count[0] += 1
        return run(feeds)

    target.forward_rows = forward_rows
    return count


@contextmanager
def served(bundle: Path) -> Iterator[str]:
    """Serve a bundle in another process; yield the URL."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        file = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, __file__, str(bundle), "--serve", str(file)], pass_fds=[file]
        )
        try:
            yield f"ws://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def delayed(url: str, round_trip_ms: float) -> Iterator[str]:
    """Put a proxy in front of a server that delays what passes; yield its URL."""
    loop, to = asyncio.new_event_loop(), int(url.rpartition(":")[2])
    delay_s = round_trip_ms / 2e3

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                loop.call_later(delay_s, sink.write, data)
            loop.call_later(delay_s, sink.close)

        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(accept, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _end_others() -> None:
    """Cancel all tasks but this one, and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Frames:
    """The frames of one completion, noted as they pass."""

    def __init__(self) -> None:
        self.asked: list[ProposalFrame] = []
        self.told: list[VerdictFrame] = []
        ask, take = RemoteTarget._ask, RemoteTarget._take

        def noted_ask(target: RemoteTarget, propose: ProposalFrame) -> None:
            self.asked.append(propose)
            ask(target, propose)

        def noted_take(target: RemoteTarget, verdict: VerdictFrame) -> None:
            self.told.append(verdict)
            take(target, verdict)

        RemoteTarget._ask = noted_ask  # type: ignore[method-assign, assignment]
        RemoteTarget._take = noted_take  # type: ignore[method-assign, assignment]


def measured(made: Generator, frames: Frames, gamma: int) -> Row:
    """Complete the prompt once."""
    made.forget()
    frames.asked.clear()
    frames.told.clear()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    done: Completion = made.generate(PROMPT, params, gamma=gamma)
    verify = [round_.verify_ns / 1e3 for round_ in done.speculation.log]
    told = [verdict for verdict in frames.told if verdict.round]
    return Row(
        median(verify),
        median(v.verify_us for v in told) if told else 0.0,
        median(len(propose.pack()) for propose in frames.asked) if told else 0.0,
        median(len(verdict.pack()) for verdict in told) if told else 0.0,
        done.timings.tokens_per_second,
    )


def best(made: Generator, frames: Frames, gamma: int, repeats: int) -> Row:
    """Return the completion whose rounds were fastest."""
    return min(measured(made, frames, gamma) for _ in range(repeats))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--gammas", default="2,4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--round-trips")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.bundle, options.serve)
        return
    frames = Frames()
    gammas = [int(gamma) for gamma in options.gammas.split(",")]
    with served(options.bundle) as url:
        if options.devices is not None:
            many_devices(options.bundle, url, gammas[0], options.devices)
            return
        if options.round_trips is None:
            on_loopback(options.bundle, url, gammas, options.repeats, frames)
            return
        trips = [float(trip) for trip in options.round_trips.split(",")]
        over_delays(options.bundle, url, gammas[0], trips)


def on_loopback(bundle: Path, url: str, gammas: list[int], repeats: int, frames: Frames) -> None:
    """Print what the link adds to a round."""
    print(
        "| gamma | verify here, us | verify there, us | of it the server | added | bytes up, down |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    with (
        specrt.load(bundle, threads=1, text_memory_bytes=0) as local,
        specrt.connect(url, bundle, threads=1) as remote,
    ):
        for gamma in gammas:
            here = best(local, frames, gamma, repeats)
            there = best(remote, frames, gamma, repeats)
            print(
                f"| {gamma} | {here.verify_us:.0f} | {there.verify_us:.0f} | "
                f"{there.server_us:.0f} | {there.verify_us - here.verify_us:.0f} | "
                f"{there.up_bytes:.0f}, {there.down_bytes:.0f} |"
            )


def over_delays(bundle: Path, url: str, gamma: int, trips: list[float]) -> None:
    """Print what a round takes by the delay of the link, and by the formula."""
    print("| RTT, ms | round, ms | formula, ms | tokens/s: gamma | auto | gamma 0 |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    base_ms = 0.0
    for trip in trips:
        with delayed(url, trip) as slow, specrt.connect(slow, bundle, threads=1) as remote:
            done = remote.generate(PROMPT, params, gamma=gamma)
            log = [r for r in done.speculation.log if r.drafted == gamma]
            round_ms = median((r.draft_ns + r.verify_ns) / 1e6 for r in log)
            base_ms = base_ms or round_ms - trip
            rates = [done.timings.tokens_per_second]
            remote.generate(PROMPT, params, gamma="auto")  # it has then seen this link
            turns = [[_rate(remote, params, other) for other in ("auto", 0)] for _ in range(7)]
            rates += map(median, zip(*turns, strict=True))
            print(
                f"| {trip:g} | {round_ms:.1f} | {base_ms + trip:.1f} | "
                f"{rates[0]:.0f} | {rates[1]:.0f} | {rates[2]:.0f} |",
                flush=True,
            )


def _sampled(seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=seed, n=n)


def many_devices(bundle: Path, url: str, gamma: int, devices: int) -> None:
    """Print what a server gives to many devices at once, by who drafts: medians of three runs."""

    def own(texts: int) -> dict[str, Any]:
        address = f"{url.replace('ws', 'http')}/own?texts={texts}&gamma={gamma}"
        with urlopen(address) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    with ExitStack() as opened:
        made = [
            opened.enter_context(specrt.connect(url, bundle, threads=1)) for _ in range(devices)
        ]
        pool = opened.enter_context(ThreadPoolExecutor(devices))

        def linked(gamma: Gamma) -> tuple[float, float]:
            before, began = own(0)["passes"][1], perf_counter()
            list(
                pool.map(
                    lambda one: one[1].generate(PROMPT, _sampled(one[0]), gamma=gamma),
                    enumerate(made),
                )
            )
            return perf_counter() - began, own(0)["passes"][1] - before

        def alone() -> tuple[float, float]:
            told = own(devices)
            return told["seconds"], told["passes"][1] - told["passes"][0]

        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "the server alone (gamma 0)": lambda: linked(0),
            f"the devices, gamma {gamma}": lambda: linked(gamma),
            "the devices, `auto`": lambda: linked("auto"),
            f"the server, gamma {gamma}, without a link": alone,
        }
        print("| who drafts | tokens/s of all | target passes a token |")
        print("| --- | ---: | ---: |")
        runs = [{name: run() for name, run in ways.items()} for _ in range(4)][1:]
        for name in ways:
            seconds, passes = (median(run[name][i] for run in runs) for i in range(2))
            total = devices * TOKENS
            print(f"| {name} | {total / seconds:.0f} | {passes / total:.2f} |", flush=True)


def _rate(made: Generator, params: SamplingParams, gamma: Gamma) -> float:
    return made.generate(PROMPT, params, gamma=gamma).timings.tokens_per_second


if __name__ == "__main__":
    main()
