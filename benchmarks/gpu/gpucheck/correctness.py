"""What engines are held to: numbers, KV buffers, captured graphs, whole rounds, greedy text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpucheck.building import cpu_bundle, probe
from gpucheck.evidence import CheckError, Evidence, NotRunError
from gpucheck.inventory import TENSORRT, library_facts
from gpucheck.settings import HEAD, PROMPTS
from gpucheck.workbench import Workbench
from specrt.bench.lossless import compare, first_difference, plain_margin
from specrt.engine.protocol import Engine, Feed, Output, cuda_graphs, rows_of
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.engine.tensorrt.plan import NO_SUCH_GPU
from specrt.errors import SpecrtError
from specrt.generator import Generator
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.pool import Models
from specrt.text.prompt_file import read_prompts
from specrt_export.portable.graph import GraphRun

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]
Open = Callable[[bool], Engine]
"""Opens the engine to be checked; its passes are captured when the argument is true."""

TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-2, "int4": 1e-2, "fp8": 1e-2}
"""Largest error of a logit over the spread of its row, against fp32 on a CPU with the same stored
weights; integers and fp8 are multiplied with fp16 activations."""
GROWN = {"fp16": 2e-2, "int8": 8e-2, "fp8": 2e-1}
"""The same of grown targets against codelet. Their fp16 weights round twice; quantized ones are
compared with those they were made of, so this is what quantizing does."""
TIE = 0.1
"""Logits; what fp16 may move them by on codelet, whose scores spread over 28."""
MEMORY_SLACK = 32 << 20
REOPENINGS = 3

PIECE = 12
"""Tokens of the longest passes of a target with a head."""
SHAPES = ((60, 1), (1, 1), (1, 1), (5, 5), (9, 9), (5, 5), (2, 1), (64, 1), (1, 1), (9, 9))
"""(width, rows): prefills, and verification widths more than once, so that replays are among
them."""
Shapes = Sequence[tuple[int, int]]


class Pass(NamedTuple):
    """Copies of what a pass returned."""

    logits: Scores
    argmax: Ids


def random_text(engine: Any, count: int, seed: int = 0) -> Ids:
    """Return tokens [1, count] that the engine knows."""
    return np.random.default_rng(seed).integers(0, engine.geometry.vocab_size, (1, count))


def most_rows(engine: Any) -> int:
    """Return how many rows a pass may score; the plan of a draft scores one."""
    return int(engine.max_rows)


def feed(engine: Engine, tokens: Ids, start: int, rows: int | None = None) -> Pass:
    """Run a pass and copy its results, of as many rows as may be when None."""
    rows = min(tokens.shape[1], most_rows(engine)) if rows is None else rows
    output = engine.forward(tokens, start, rows)
    return Pass(np.array(output.logits), np.array(output.argmax))


def shapes_for(engine: Engine) -> list[tuple[int, int]]:
    """Return the shapes of passes that an engine takes, within its length."""
    shapes, used = [], 0
    for most, rows in SHAPES:
        width = min(most, engine.max_width)
        if used + width <= engine.max_length:
            shapes.append((width, min(rows, width, most_rows(engine))))
            used += width
    return shapes


def pieces(engine: Engine, shapes: Shapes) -> Iterator[tuple[Ids, int, int]]:
    """Yield the tokens of each pass over a random text, where they begin, and the scored rows."""
    tokens, at = random_text(engine, sum(width for width, _ in shapes)), 0
    for width, rows in shapes:
        yield tokens[:, at : at + width], at, rows
        at += width


def run_shapes(engine: Engine) -> list[Pass]:
    """Feed a text pass after pass; refuse scores that a device which computes nothing gives.

    Raises: CheckError.
    """
    passes = [feed(engine, *piece) for piece in pieces(engine, shapes_for(engine))]
    check_finite(passes)
    return passes


def check_finite(passes: Sequence[Pass]) -> None:
    """Refuse scores that are not numbers, all alike, or not those of the argmax.

    Raises: CheckError.
    """
    for number, one in enumerate(passes):
        if not np.isfinite(one.logits).all():
            raise CheckError(f"pass {number} gave scores that are not numbers")
        if float(np.ptp(one.logits)) <= 1e-3:
            raise CheckError(f"pass {number} gave scores that are all alike")
        if not np.array_equal(one.argmax, one.logits.argmax(-1)):
            raise CheckError(f"pass {number} gave an argmax that is not the first best score")


def check_equal(
    evidence: Evidence, passes: Sequence[Pass], expected: Sequence[Pass], what: str
) -> None:
    """Compare passes bit for bit.

    Raises: CheckError with how far apart they are.
    """
    pairs, same = list(zip(passes, expected, strict=True)), np.array_equal
    apart = max(float(np.abs(p.logits - e.logits).max()) for p, e in pairs)
    evidence.add(passes=len(pairs), largest_difference=apart)
    if not all(same(p.logits, e.logits) and same(p.argmax, e.argmax) for p, e in pairs):
        raise CheckError(f"{what} differ by up to {apart:.2e}")


def relative(scores: Scores, expected: Scores) -> float:
    """Return the largest error as a part of the spread of the scores."""
    return float(np.abs(scores - expected).max()) / (float(np.ptp(expected)) or 1.0)


def compared(
    engine: Engine, reference: GraphRun, shapes: Shapes
) -> Iterator[tuple[Pass, float, int]]:
    """Feed a text to both; yield each pass, its error, and how many argmaxes differ."""
    reference.reset(1, sum(width for width, _ in shapes))
    for tokens, at, rows in pieces(engine, shapes):
        one, width = feed(engine, tokens, at, rows), tokens.shape[1]
        expected, best = reference(tokens, [at], range(width - rows, width))
        yield one, relative(one.logits, expected), int((one.argmax != best).sum())


def check_logits(engine: Engine, reference: GraphRun, tolerance: float, evidence: Evidence) -> None:
    """Compare logits with a reference, pass by pass.

    Raises: CheckError above the tolerance.
    """
    shapes, by_shape = shapes_for(engine), dict[str, float]()
    passes, errors, differing = zip(*compared(engine, reference, shapes), strict=True)
    check_finite(passes)
    for (width, rows), error in zip(shapes, errors, strict=True):
        name = f"{width}x{rows}"
        by_shape[name] = max(by_shape.get(name, 0.0), error)
    evidence.add(
        tolerance=tolerance, largest_relative_error=max(errors), by_shape=by_shape,
        argmax_that_differ=sum(differing), rows=sum(rows for _, rows in shapes),
    )  # fmt: skip
    if not max(errors) <= tolerance:
        raise CheckError(
            f"logits are {max(errors):.1e} of their spread away from the reference; expected at "
            f"most {tolerance:.0e}"
        )


def check_limit(engine: Engine, reference: GraphRun, tolerance: float, evidence: Evidence) -> None:
    """Fill the buffers to the last position, in odd widths at the end.

    Raises: CheckError where scores are off.
    """
    length, step = engine.max_length, min(64, engine.max_width)
    widths = [width for width in (7, 5, 3, 2, 1) if width <= engine.max_width]
    whole, rest = divmod(length - sum(widths), step)
    shapes = [(step, 1)] * whole + [(rest, 1)] * (rest > 0)
    for number, width in enumerate(widths):
        rows = width if number % 2 == 0 else max(1, width // 2)
        shapes.append((width, min(rows, most_rows(engine))))
    worst = max(error for _, error, _ in compared(engine, reference, shapes))
    evidence.add(length=length, widths=widths, largest_relative_error=worst)
    if not worst <= tolerance:
        raise CheckError(f"scores up to the limit are {worst:.1e} of their spread off")


def check_replays(open_engine: Open, evidence: Evidence) -> None:
    """Compare passes that replay a CUDA graph with the same launched kernel by kernel."""
    with closing(open_engine(True)) as engine:
        replayed = run_shapes(engine)
    with closing(open_engine(False)) as engine:
        launched = run_shapes(engine)
    check_equal(evidence, replayed, launched, "replayed and launched passes")


def check_graphs(capturing: object, expected: int, what: str, evidence: Evidence) -> None:
    """Count the CUDA graphs that were captured.

    Raises: CheckError where fewer were than are expected, or none is expected.
    """
    graphs = cuda_graphs(capturing)
    captured, refusals = (graphs.captured, graphs.refusals) if graphs else (0, ())
    evidence.add(captured=captured, expected=expected, refusals=refusals)
    if refusals or not expected or captured < expected:
        raise CheckError(
            f"{captured} {what} were captured and {expected} expected: {'; '.join(refusals)}"
        )


def check_captures(engine: Any, evidence: Evidence) -> None:
    """Count the CUDA graphs that passes of several sizes were captured into."""
    run_shapes(engine)
    run_shapes(engine)  # the first run of a size may be what is captured
    sizes = {size for size in shapes_for(engine) if engine.captures(*size)}
    check_graphs(engine, len(sizes), "CUDA graphs", evidence)


def check_rollback(open_engine: Open, evidence: Evidence) -> None:
    """Compare passes over stale keys with the same in a fresh engine."""
    with closing(open_engine(True)) as engine, closing(open_engine(True)) as fresh:
        tokens, stale = random_text(engine, 40), random_text(engine, 40, seed=1)
        start = at = min(16, engine.max_width)
        for one in (engine, fresh):
            feed(one, tokens[:, :start], 0, 1)
        for first in (start, start + 4):
            feed(engine, stale[:, :9], first)
            feed(engine, stale[:, :1], first + 9)
        passes: list[Pass] = []
        expected: list[Pass] = []
        for width in (5, 1, 5, 9):
            piece = tokens[:, at : at + width]
            passes.append(feed(engine, piece, at))
            expected.append(feed(fresh, piece, at))
            at += width
        check_finite(expected)
        check_equal(evidence, passes, expected, "passes over stale keys and fresh ones")


def check_memory(open_engine: Open, free: Callable[[], int], evidence: Evidence) -> None:
    """Open, use and close an engine several times; the device must be as empty as after the first.

    The first time also loads what the process keeps: kernels, the library's own memory.
    Raises: CheckError where memory is not given back.
    """
    open_bytes, closed_bytes = [], []
    for _ in range(1 + REOPENINGS):
        with closing(open_engine(True)) as engine:
            run_shapes(engine)
            open_bytes.append(free())
        closed_bytes.append(free())
    evidence.add(free_while_open=open_bytes, free_after_close=closed_bytes, slack=MEMORY_SLACK)
    lost = closed_bytes[0] - min(closed_bytes)
    if lost > MEMORY_SLACK:
        raise CheckError(f"{lost} bytes were not given back in {REOPENINGS} openings")
    if not min(open_bytes) < closed_bytes[0]:
        raise CheckError("an open engine took no memory, so nothing was checked")


def check_rounds(target: Any, draft: Any, gammas: Sequence[int], evidence: Evidence) -> None:
    """Compare whole rounds with the same passes one by one, each twice: launched, then replayed.

    Raises: CheckError where tokens, confidences or scores differ, or a round does not fit.
    """
    rounds = CapturedRounds(target, draft)
    if not rounds.gammas:
        raise NotRunError("plans of this form have no whole rounds")
    tokens, start = random_text(draft, 24), min(20, target.max_width, draft.max_width)
    for engine in (target, draft):
        feed(engine, tokens[:, :start], 0, 1)
    count, apart = 0, 0.0
    for gamma in gammas:
        for pending in (1, 2, 1, 2):
            at = start - pending + 1
            given = tokens[0, at : start + 1].tolist()
            if not rounds.fits(gamma, pending, at, start):
                raise CheckError(f"no round of gamma {gamma} with {pending} pending tokens fits")
            drafted = rounds.run(given, at, given[-1], start, gamma)
            verify = np.array([[given[-1], *drafted.tokens]])
            scores = feed(target, verify, start)
            target.forget()
            singly, confidences = _draft_singly(draft, given, at, gamma)
            if singly != drafted.tokens:
                raise CheckError(
                    f"gamma {gamma}: a round drafted {drafted.tokens}, passes {singly}"
                )
            pairs = zip(confidences, drafted.confidences, strict=True)
            apart = max(apart, *(abs(a - b) for a, b in pairs))
            check_equal(
                evidence.part(f"gamma {gamma}"), [scores], [feed(target, verify, start)],
                f"gamma {gamma}: verify passes",
            )  # fmt: skip
            count += 1
        evidence.add(rounds=count, confidence_apart=apart)
    check_graphs(rounds, 2 * len(gammas), "rounds", evidence)
    if apart:
        raise CheckError(f"confidences differ by up to {apart:.1e}")


def _draft_singly(
    draft: Any, pending: list[int], start: int, gamma: int
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    confidences: list[float] = []
    for _ in range(gamma):
        output = draft.forward([pending], start, 1)
        start += len(pending)
        tokens.append(int(output.argmax.item()))
        confidence = output.confidence
        confidences.append(1.0 if confidence is None else float(confidence.item()))
        pending = [tokens[-1]]
    return tokens, confidences


def check_head(pair: Models, cpu: Models, tolerance: float, evidence: Evidence) -> None:
    """Feed a pair with a head, and the same pair on a CPU, alike; compare what the heads score.

    A prompt in pieces, then rounds of recursive passes of which none, some and all are kept.
    Raises: CheckError above the tolerance.
    """
    rng, worst = np.random.default_rng(0), 0.0
    vocabulary = pair.target.geometry.vocab_size
    text = rng.integers(0, vocabulary, 40).tolist()
    gamma, held, count = max({*pair.gammas} & {*cpu.gammas}), 0, 0
    pairs = [(rows_of(one.target), rows_of(one.draft)) for one in (pair, cpu) if one.draft]
    assert len(pairs) == 2, "both have a head"
    for kept in (0, *range(gamma + 1), 0):
        drafted = rng.integers(0, vocabulary, gamma).tolist()
        scores: list[list[Scores]] = [[], []]
        for (target, head), read in zip(pairs, scores, strict=True):
            for one in () if held else _feeds(text[:-1], 0):
                target.forward_rows([one])
            for one in _feeds(text[held:], held):
                (output,) = head.forward_rows([one])
            read.append(_scored(output))
            for at, token in enumerate(drafted[:-1], len(text)):
                (output,) = head.forward_rows([Feed(0, [token], at, 1, recursive=True)])
                read.append(_scored(output))
            target.forward_rows([Feed(0, [text[-1], *drafted], len(text) - 1, gamma + 1)])
        worst = max(worst, *(relative(a, b) for a, b in zip(*scores, strict=True)))
        count += len(scores[0])
        evidence.add(compared=count, largest_relative_error=worst, tolerance=tolerance)
        held = len(text)
        text += [*drafted[:kept], int(rng.integers(0, vocabulary))]
    if not worst <= tolerance:
        raise CheckError(
            f"the head's logits are {worst:.1e} of their spread away from those on the CPU; "
            f"expected at most {tolerance:.0e}"
        )


def _feeds(tokens: Sequence[int], start: int) -> list[Feed]:
    """Return what the first row is fed, pass by pass."""
    cuts = range(0, len(tokens), PIECE)
    return [Feed(0, tokens[cut : cut + PIECE], start + cut, 1) for cut in cuts]


def _scored(output: Output) -> Scores:
    """Return a copy of logits, 0 for entries that are not scored."""
    return np.where(np.isneginf(output.logits), np.float32(0), output.logits)


def run_checks(checks: Mapping[str, Callable[[Evidence], None]], evidence: Evidence) -> None:
    """Run every check whatever the others say.

    Raises: CheckError naming those that failed.
    """
    failed = []
    for name, check in checks.items():
        part, began = evidence.part(name), time.monotonic()
        part.add(passed=False)
        try:
            check(part)
            part.add(passed=True)
        except Exception as error:  # a library may raise anything; the next check is independent
            kind = "" if isinstance(error, CheckError) else f"{type(error).__name__}: "
            part.add(reason=f"{kind}{error}")
            failed.append(f"{name}: {kind}{error}")
        part.add(seconds=round(time.monotonic() - began, 2))
    if failed:
        raise CheckError("; ".join(failed))


# The steps.


def opens(bench: Workbench, backend: str, evidence: Evidence, way: str) -> None:
    """Build codelet's draft in one way, open it, and hold its numbers to fp32 on the CPU."""
    evidence.add(library_facts(backend))
    if lacks := evidence.facts.get("lacks"):
        raise NotRunError(lacks)
    try:
        built = probe(bench, backend, way, evidence.part("build"))
        with bench.engines(built) as (engine,):
            check_logits(engine, bench.reference("draft"), TOLERANCES["fp16"], evidence)
    except SpecrtError as error:  # one way of several
        reason = str(error)
        if NO_SUCH_GPU in reason:  # no other way will do
            gpu = bench.survey().gpus[0]
            reason = f"{backend} runs on no GPU of capability {gpu.capability}, as {gpu.name} has"
            evidence.add(lacks=reason)
        raise NotRunError(reason) from error


def logits(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Compare the logits of codelet's two models with fp32 on the CPU."""
    for role in ("draft", "target"):
        built = bench.codelet(backend, role)
        with bench.engines(built) as (engine,):
            tolerance = TOLERANCES[built.precision]
            check_logits(engine, bench.reference(role), tolerance, evidence.part(role))


def grown_logits(
    bench: Workbench, backend: str, evidence: Evidence, size: str, precision: str
) -> None:
    """Compare a grown target with codelet itself, whose outputs it has."""
    with bench.engines(bench.target(size, precision, backend)) as (engine,):
        check_logits(engine, bench.reference("target"), GROWN[precision], evidence)


def engine(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Run every check of codelet's target."""
    built = bench.codelet(backend, "target")
    with bench.device(backend) as device:

        def opened(capture: bool) -> Engine:
            return bench.open(built, device, capture=capture)

        def captures(part: Evidence) -> None:
            with closing(opened(True)) as engine:
                check_captures(engine, part)

        def limit(part: Evidence) -> None:
            with closing(opened(True)) as engine:
                check_limit(engine, bench.reference("target"), TOLERANCES[built.precision], part)

        checks: dict[str, Callable[[Evidence], None]] = {
            "rollback": lambda part: check_rollback(opened, part),
            "captures": captures,
            "replays": lambda part: check_replays(opened, part),
            "limit": limit,
        }
        if backend in TENSORRT:
            free = lambda: int(device.available()[0])  # noqa: E731
            checks["memory"] = lambda part: check_memory(opened, free, part)
        run_checks(checks, evidence)


def rounds(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Compare whole rounds of codelet with single passes."""
    models = [bench.codelet(backend, role) for role in ("target", "draft")]
    with bench.engines(*models) as (target, draft):
        check_rounds(target, draft, bench.settings.gammas, evidence)


def head(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Compare a random head of codelet's target with the same in fp32 on the CPU."""
    with bench.bundle(HEAD, backend) as generator, bench.loaded(cpu_bundle(bench, HEAD)) as cpu:
        check_head(generator.models, cpu.models, TOLERANCES["fp16"], evidence)


def verify(bench: Workbench, backend: str, evidence: Evidence, pair: str) -> None:
    """Compare greedy text at every gamma with plain decoding, and plain decoding with the CPU's."""
    settings = bench.settings
    prompts = [prompt.text for prompt in read_prompts(PROMPTS)[: settings.prompts]]
    with bench.bundle(pair, backend) as generator:
        evidence.add(
            notices=list(generator.notices), whole_rounds=generator.models.rounds is not None
        )
        gammas: list[Gamma] = [*settings.gammas, AUTO]
        for report in compare(generator, prompts, gammas, settings.tokens, TIE):
            evidence.add(report.to_json())
        cpu = evidence.part("cpu")
        compare_with_cpu(bench, generator, prompts, cpu)
    if unexplained := evidence.facts["unexplained"]:
        raise CheckError(f"{unexplained} divergences that rounding does not explain")
    if not evidence.facts["drafted"]:
        raise CheckError("nothing was drafted, so nothing was verified")
    if cpu.facts["unexplained"]:
        raise CheckError("text differs from fp32 on the CPU at margins that are not ties")


def compare_with_cpu(
    bench: Workbench, generator: Generator, prompts: Sequence[str], evidence: Evidence
) -> None:
    """Complete prompts on the CPU in fp32 too; where texts part, add the CPU's own margin."""
    params = SamplingParams(max_tokens=bench.settings.tokens, ignore_eos=True)
    texts = [generator.generate(p, params, gamma=0).token_ids for p in prompts]
    margins: list[float] = []
    with bench.loaded(cpu_bundle(bench, "codelet")) as cpu:
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
            expected = cpu.generate(prompt, params, gamma=0).token_ids
            at = first_difference(expected, text)
            if at is not None:
                ids = [*cpu.tokenizer.encode(prompt), *expected[:at]]
                margins.append(round(plain_margin(cpu, ids), 5))
            evidence.add(
                prompts=number, identical=number - len(margins), tolerance=TIE,
                margins_where_texts_part=margins, unexplained=sum(m > TIE for m in margins),
            )  # fmt: skip
