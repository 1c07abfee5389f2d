"""`specrt generate`: complete one prompt, several times, or all prompts of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.options import ranking, read_params, require_json, sampled
from specrt.cli.terminal import summary
from specrt.completion import Completion, Stream
from specrt.errors import BundleError, RequestError, SpecrtError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import Gamma, SamplingParams
from specrt.text import Prompt, decode_utf8, read_prompts, read_text


@dataclass(frozen=True)
class FilePrompts:
    """The prompts of a file, and what turns each into tokens; the tokenizer where nothing does."""

    prompts: Sequence[Prompt]
    rendered: Callable[[str], list[int]] | None = None


Source = str | list[int] | FilePrompts


@click.command("generate")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--prompt", help="Text to complete.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the text.")
@click.option("--prompt-ids", help="Token ids to complete, as 1,2,3.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSONL file of prompts; prints a JSON object a line, in order.",
)
@click.option("--n", default=1, show_default=True, help="Completions of each prompt.")
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message to a chat model.")
@sampled
@ranking
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.pass_obj
def command(
    owns_process: bool,
    /,
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    prompts: Path | None,
    chat: bool,
    gamma: Gamma | None,
    drafter: str | None,
    threads: int | None,
    memory: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Complete a prompt with the engines of BUNDLE.

    The prompt comes from --prompt, --prompt-file, --prompt-ids or standard input. Text goes to
    standard output as it comes, one line of statistics to standard error. With --n or --prompts
    the exit status is 1 when a completion failed; the others go on.
    """
    params = read_params(options)
    require_json(params, as_json or prompts is not None)
    _check_place(bundle, prompt)
    source = read_source(prompt, prompt_file, prompt_ids, prompts)
    most = memory << 20 if memory is not None else None
    with load(bundle, threads=threads, owns_process=owns_process, memory_bytes=most) as generator:
        for notice in generator.notices:
            print(f"note: {notice}", file=sys.stderr)
        asked = _rendered(source, bundle, generator) if chat else source
        if isinstance(asked, FilePrompts):
            return complete_file(generator, asked, params, gamma, drafter)
        if params.n > 1:
            return complete_one(generator, asked, params, gamma, drafter, as_json)
        stream = generator.stream(asked, params, gamma=gamma, drafter=drafter)
        interrupted = follow(stream, show=not as_json)
    report(stream.completion, as_json)
    return 130 if interrupted else 0


def _rendered(source: Source, bundle: Path, generator: Generator) -> Source:
    """Return prompts as messages of a user, as the bundle's chat template writes them."""
    from specrt.text import read_template

    if isinstance(source, list):
        raise RequestError("--chat needs a text prompt, not --prompt-ids")
    template, tokenizer = read_template(bundle), generator.tokenizer

    def rendered(text: str) -> list[int]:
        written = template.render([{"role": "user", "content": text}])
        return tokenizer.encode(written, special=False)

    if isinstance(source, str):
        return rendered(source)
    return FilePrompts(source.prompts, rendered)


def _check_place(bundle: Path, prompt: str | None) -> None:
    """Refuse a text in the place of a bundle."""
    if prompt is None and not bundle.exists():
        raise BundleError(
            f"{bundle} does not exist; build one with `make engines` or `specrt build RECIPE`, or "
            "put --prompt before it if it is the text to complete"
        )


def read_source(
    text: str | None, file: Path | None, ids: str | None, prompts: Path | None = None
) -> Source:
    """Return the prompts of a file, or the one prompt that was given; standard input when none."""
    given = (text, file, ids, prompts)
    if sum(source is not None for source in given) > 1:
        raise RequestError(
            "give one of --prompt, --prompt-file, --prompt-ids and --prompts, not several"
        )
    return (
        FilePrompts(read_prompts(prompts)) if prompts is not None else read_prompt(text, file, ids)
    )


def read_prompt(text: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    """Return the one prompt that was given; standard input when none was."""
    if text is not None:
        return text
    if file is not None:
        return read_text(file)
    if ids is not None:
        return _parse_ids(ids)
    if sys.stdin.isatty():
        raise RequestError("no prompt; give --prompt TEXT, --prompt-file F, or text on stdin")
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


def _parse_ids(ids: str) -> list[int]:
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise RequestError(f"--prompt-ids is {ids!r}; expected numbers, as 1,2,3") from None


def follow(stream: Stream, show: bool) -> bool:
    """Print chunks as they come; return whether Ctrl-C ended it."""
    interrupted = False
    try:
        for chunk in stream:
            if show and chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    except SpecrtError:
        _end_line(stream, show)
        raise
    _end_line(stream, show)
    return interrupted


def _end_line(stream: Stream, show: bool) -> None:
    if show and stream.completion.token_ids:
        sys.stdout.write("\n")
        sys.stdout.flush()


def report(completion: Completion, as_json: bool) -> None:
    """Print the JSON object to stdout, or the line of statistics to stderr."""
    if as_json:
        print(json.dumps(completion.to_json(), ensure_ascii=False))
        return
    print(summary(completion), file=sys.stderr)


def complete_one(
    generator: Generator, prompt: str | list[int], params: SamplingParams, gamma: Gamma | None,
    drafter: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Print n completions of a prompt, each under its number; return 1 where one failed."""
    (done,) = generator.generate_many([prompt], params, gamma=gamma, drafter=drafter)
    if as_json:
        _print_json({"completions": [_entry(completion) for completion in done]})
    else:
        for completion in done:
            _show(completion)
    return _status(done)


def complete_file(
    generator: Generator, source: FilePrompts, params: SamplingParams, gamma: Gamma | None,
    drafter: str | None,
) -> int:  # fmt: skip
    """Print a JSON object for each prompt, in order, once it is complete; return 1 on failures.

    Raises: RequestError before any work, naming the line of a prompt that cannot be completed.
    """
    encode = source.rendered or generator.tokenizer.encode
    asked = []
    for prompt in source.prompts:
        try:
            asked.append(encode(prompt.text))
            generator.stream(asked[-1], replace(params, n=1), gamma=gamma, drafter=drafter)
        except RequestError as error:
            raise RequestError(f"{prompt.place}: {error}") from None
    status = 0
    found = generator.generate_each(asked, params, gamma=gamma, drafter=drafter)
    for prompt, done in zip(source.prompts, found, strict=True):
        entries = [_entry(completion) for completion in done]
        told = entries[0] if params.n == 1 else {"completions": entries}
        _print_json({"prompt": prompt.text, **told})
        status |= _status(done)
    return status


def _entry(completion: Completion) -> dict[str, Any]:
    failed = {} if completion.error is None else {"error": completion.error}
    return {**completion.to_json(), **failed}


def _print_json(told: dict[str, Any]) -> None:
    print(json.dumps(told, ensure_ascii=False), flush=True)


def _show(completion: Completion) -> None:
    print(f"[{completion.index + 1}]\n{completion.text}", flush=True)
    if completion.error is not None:
        print(f"specrt: completion {completion.index + 1}: {completion.error}", file=sys.stderr)
    else:
        print(summary(completion), file=sys.stderr)


def _status(done: Sequence[Completion]) -> int:
    return int(any(completion.error is not None for completion in done))
