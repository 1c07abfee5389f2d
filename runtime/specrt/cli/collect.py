"""`specrt collect`: lets a bundle's target write, and keeps what it wrote and how sure it was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from specrt.bundle import read_manifest
from specrt.cli.cache import bundle_argument
from specrt.cli.options import InputFile, print_notices, progress
from specrt.completion import Completion
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.text.prompt_file import PromptRecord, read_prompts
from specrt.traces import FORMAT, RANKED, TraceIndex, TraceText, TraceWriter

SHARD = 64
"""Prompts of a shard: what is written anew where the work was stopped."""


@click.command("collect")
@bundle_argument
@click.option("--prompts", type=InputFile(), required=True,
              help='JSONL file of prompts, as {"prompt": "TEXT", "domain": "NAME"}.')  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Folder of the traces; what is there already is gone on with.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N prompts.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True,
              help="Tokens of each answer.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="How the answers are sampled; 0 is greedy.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    prompts: Path,
    out: Path,
    limit: int | None,
    max_tokens: int,
    temperature: float,
    threads: int | None,
) -> None:
    """Let the target of BUNDLE answer prompts, and store traces for `specrt align`.

    They hold prompts and answers as token ids, not encrypted, and of each place of an answer the 64
    likeliest tokens with their log-probabilities: 400 bytes a token.
    """
    records = read_prompts(prompts)[:limit]
    manifest = read_manifest(bundle)
    with load(bundle, threads=threads, owns_process=owns_process, text_memory_bytes=0) as generator:
        print_notices(generator.notices)
        generator.reader.require_continuing("drafts of it are not aligned; leave collect out")
        vocabulary = manifest.target.geometry.vocab_size
        wanted = TraceIndex(
            FORMAT, generator.tokenizer.sha256, vocabulary, min(RANKED, vocabulary),
            manifest.source, manifest.name, temperature, max_tokens,
        )  # fmt: skip
        tokens = [_tokens(generator, record) for record in records]
        writer = TraceWriter(out, wanted)
        done = writer.done([record.text for record in records])
        with progress("collect", steady=True) as show:
            while done < len(records):
                end = min(done + SHARD, len(records))
                show(done / len(records), f"of {len(records)} prompts")
                part = range(done, end)
                params = [_params(wanted, number) for number in part]
                answers = generator.generate_each([tokens[n] for n in part], params)
                texts = []
                for number, answer in zip(part, answers, strict=True):
                    texts.append(_text(records[number], tokens[number], answer, wanted.ranked))
                    show((number + 1) / len(records), f"of {len(records)} prompts")
                writer.add([records[n].text for n in part], texts)
                done = end
    index = writer.index
    size = sum((out / shard.file).stat().st_size for shard in index.shards)
    print(f"{out}: {index.texts} answers, {index.tokens} tokens, {size / 1e6:.1f} MB")


def _tokens(generator: Generator, record: PromptRecord) -> list[int]:
    """Return the tokens of a prompt.

    Raises: RequestError naming its line.
    """
    try:
        return generator.reader.tokens(record.text)
    except RequestError as error:
        raise RequestError(f"{record.place}: {error}") from error


def _params(wanted: TraceIndex, number: int) -> SamplingParams:
    """Return how a prompt is answered: the same way whenever the work is taken up again."""
    return SamplingParams(
        max_tokens=wanted.max_tokens, temperature=wanted.temperature, seed=number,
        logprobs=wanted.ranked,
    )  # fmt: skip


def _text(
    record: PromptRecord, prompt: list[int], answers: Sequence[Completion], most: int
) -> TraceText:
    """Return what is kept of an answer.

    Raises: EngineError for one that failed.
    """
    (answer,) = answers
    if answer.error is not None or answer.logprobs is None:
        raise EngineError(f"{record.place}: {answer.error}")
    ranked = [
        sorted((found.rank, token, found.logprob) for token, found in entry.items())
        for entry in answer.logprobs
    ]
    # One more where the token is none of the likeliest.
    ids = np.array([[token for _, token, _ in row[:most]] for row in ranked], np.int32)
    logprobs = np.array([[logprob for _, _, logprob in row[:most]] for row in ranked])
    shape = len(ranked), most
    rest = np.maximum(0.0, 1.0 - np.exp(logprobs.reshape(shape)).sum(-1))
    return TraceText(
        np.array(prompt, np.int32), np.array(answer.token_ids, np.int32), ids.reshape(shape),
        logprobs.reshape(shape).astype(np.float16), rest.astype(np.float32), record.domain,
    )  # fmt: skip
