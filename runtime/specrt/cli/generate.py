"""`specrt generate`: completes one prompt, once or several times, or all prompts of a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrt.bundle import DEFAULT_BUNDLE, missing
from specrt.cli.cache import bundle_argument
from specrt.cli.options import (
    API_KEY,
    InputFile,
    TextMemoryOptions,
    as_model_samples,
    completion_options,
    dimmed,
    graphs_text,
    logprob_options,
    print_notices,
    read_params,
    require_json,
    text_memory_options,
)
from specrt.cli.statistics import summary
from specrt.completion import Completion, Stream
from specrt.engine.protocol import CudaGraphs
from specrt.errors import BundleError, RequestError, SpecrtError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import Gamma, SamplingParams
from specrt.speculation.pool import Models
from specrt.text.prompt_file import PromptRecord, decode_utf8, read_prompts, read_text

if TYPE_CHECKING:
    from specrt.cli.comparison import PlainComparison


@dataclass(frozen=True)
class FilePrompts:
    """The prompts of a file, and the function that encodes them; the tokenizer's when None."""

    prompts: Sequence[PromptRecord]
    encode: Callable[[str], list[int]] | None = None


Source = str | list[int] | FilePrompts


@click.command("generate", context_settings={"allow_extra_args": True})
@bundle_argument
@click.option("--prompt", "-p", help="Text to complete; - is standard input.")
@click.option("--prompt-file", type=InputFile(), help="File with the text; - is standard input.")
@click.option("--prompt-ids", help="Token ids to complete, as 1,2,3.")
@click.option(
    "--prompts",
    type=InputFile(),
    help='JSONL file of prompts, as {"prompt": "TEXT"}; prints one JSON object a line, in order.',
)
@click.option("--n", default=1, show_default=True, help="Completions of each prompt.")
@click.option("--chat", is_flag=True, help="Treat the prompt as a user's message to a chat model.")
@click.option(
    "--no-parse-special",
    is_flag=True,
    help="Treat the texts of control tokens in the prompt as text like any other.",
)
@completion_options
@logprob_options
@click.option(
    "--compare", is_flag=True, help="Decode plainly, too, in turns, and say what drafting gained."
)
@click.option(
    "--remote",
    metavar="URL",
    help="Draft here and verify there: ws://HOST:8080 of `specrt serve --verify`. BUNDLE's target "
    f"is not opened. A key is read from {API_KEY}.",
)
@text_memory_options
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
    no_parse_special: bool,
    no_text_memory: bool,
    text_memory_file: Path | None,
    gamma: Gamma | None,
    drafter: str | None,
    threads: int | None,
    memory: int | None,
    remote: str | None,
    compare: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Complete a prompt with the engines of BUNDLE.

    The prompt comes from --prompt, --prompt-file, --prompt-ids or standard input; of an
    encoder-decoder, such as T5 or Marian, it is the source of the text. Text goes to standard
    output as it is generated, after its prompt where that is a terminal; one line of statistics
    goes to standard error. With --n or --prompts the exit status is 1 where a completion failed;
    the others go on.
    """
    if extra := click.get_current_context().args:
        raise RequestError(f"{extra[0]!r} is one argument too many; give a text as --prompt TEXT")
    params = read_params(options)
    require_json(params, as_json or prompts is not None)
    if compare:
        from specrt.cli.comparison import compare_with_plain, refuse_comparison  # slow to import

        several = {"--n": params.n > 1, "--prompts": prompts, "--remote": remote}
        refuse_comparison(params, gamma, several)
    if prompt in (None, "-") and all(g is None for g in (prompt_file, prompt_ids, prompts)):
        _check_place(bundle)
    source = read_source(prompt, prompt_file, prompt_ids, prompts)
    _check_reading(source, chat=chat, plain=no_parse_special)
    texts = TextMemoryOptions(text_memory_file, off=no_text_memory)
    with _opened(bundle, remote, memory, threads, owns_process, texts) as generator:
        print_notices(generator.notices)
        params = as_model_samples(params, options, generator.models)
        generator.reader.require_text()
        if chat:
            generator.reader.require_continuing("it holds no conversations; leave --chat out")
        echoed = "" if chat or as_json or not sys.stdout.isatty() else _echo(source, generator)
        source = _read_as(source, generator, bundle, chat=chat, plain=no_parse_special)
        if isinstance(source, FilePrompts):
            return complete_file(generator, source, params, gamma, drafter)
        if params.n > 1:
            return complete_several(generator, source, params, gamma, drafter, as_json)
        stream = generator.stream(source, params, gamma=gamma, drafter=drafter)
        print(echoed, end="", flush=True)
        interrupted = follow(stream, show=not as_json)
        note_full_context(generator, [stream.completion], params)
        measured = partial(compare_with_plain, generator, bundle, params) if compare else None
        report(stream.completion, generator.models, as_json, measured)
    return 130 if interrupted else 0


def _check_reading(source: Source, *, chat: bool, plain: bool) -> None:
    """Refuse ways to read a prompt that do not suit it, or each other."""
    if isinstance(source, list) and (chat or plain):
        raise RequestError(
            "--chat and --no-parse-special need a text prompt, and --prompt-ids was given; leave "
            "one of them out"
        )
    if chat and plain:
        raise RequestError(
            "--no-parse-special was given with --chat, whose messages are text whatever they hold; "
            "leave it out"
        )


def _read_as(
    source: Source, generator: Generator, bundle: Path, *, chat: bool, plain: bool
) -> Source:
    """Return prompts with another way to encode them, where they are messages or plain text."""
    if chat:
        return _encoded(source, _chat_encoder(bundle, generator))
    if source == "" and generator.reader.continues:
        start = generator.tokenizer.encode("")
        print(f"note: the prompt is empty: the text begins after token {start[0]}", file=sys.stderr)
    elif plain:
        return _encoded(source, partial(generator.reader.tokens, parse_special=False))
    return source


def _echo(source: Source, generator: Generator) -> str:
    """Return what shows a prompt where its text goes on: before it, or above it of a source."""
    if isinstance(source, FilePrompts):
        return ""
    text = source if isinstance(source, str) else generator.tokenizer.decode(source)
    return dimmed(text) + ("" if generator.reader.continues else "\n")


def _opened(
    bundle: Path, remote: str | None, memory: int | None, threads: int | None, owns_process: bool,
    texts: TextMemoryOptions,
) -> Generator:  # fmt: skip
    """Open a bundle, or its draft for a target on a server."""
    remembered = texts.of_load()
    if texts.file is not None and remote is not None:
        raise RequestError("--text-memory-file and --remote were given; leave one of them out")
    most = memory * 10**6 if memory is not None else None
    if remote is None:
        return load(
            bundle, threads=threads, owns_process=owns_process, memory_bytes=most,
            **remembered,
        )  # fmt: skip
    from specrt.remote.link import LinkOptions
    from specrt.remote.remote_target import connect

    if memory is not None:
        raise RequestError(
            "--memory was given with --remote, whose target is the server's; leave one of them out"
        )
    link = LinkOptions(api_key=os.environ.get(API_KEY))
    return connect(remote, bundle, threads=threads, owns_process=owns_process, link=link)


Encode = Callable[[str], list[int]]


def _encoded(source: Source, encode: Encode) -> Source:
    """Return prompts with another way to encode them."""
    if isinstance(source, FilePrompts):
        return FilePrompts(source.prompts, encode)
    return encode(source) if isinstance(source, str) else source


def _chat_encoder(bundle: Path, generator: Generator) -> Encode:
    """Return what encodes a user's message, rendered by the bundle's chat template."""
    from specrt.text.chat_template import read_template

    template = read_template(bundle)
    read = generator.reader.tokens
    return lambda text: read(template.render([{"role": "user", "content": text}]))


def _check_place(bundle: Path) -> None:
    """Refuse a prompt given where the bundle belongs."""
    if bundle != DEFAULT_BUNDLE and not bundle.exists():
        raise BundleError(
            f"{bundle} does not exist; put --prompt before it where it is the text to complete; "
            f"{missing(bundle)}"
        )


def read_source(
    text: str | None, file: Path | None, ids: str | None, prompts: Path | None = None
) -> Source:
    """Return the prompts of a file, or one prompt; without an option standard input's."""
    if sum(source is not None for source in (text, file, ids, prompts)) > 1:
        raise RequestError(
            "give one of --prompt, --prompt-file, --prompt-ids and --prompts, not several"
        )
    return (
        FilePrompts(read_prompts(prompts)) if prompts is not None else read_prompt(text, file, ids)
    )


def read_prompt(text: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    """Return the prompt of an option, else of standard input."""
    if text not in (None, "-"):
        return text
    if file is not None:
        return read_text(file)
    if ids is not None:
        return _parse_ids(ids)
    if text is None and sys.stdin.isatty():
        raise RequestError("no prompt; give --prompt TEXT, --prompt-file F, or text on stdin")
    return decode_utf8(sys.stdin.buffer.read(), "standard input")


def _parse_ids(ids: str) -> list[int]:
    try:
        return [int(part) for part in ids.split(",")]
    except ValueError:
        raise RequestError(f"--prompt-ids is {ids!r}; expected numbers, as 1,2,3") from None


def follow(stream: Stream, show: bool) -> bool:
    """Print chunks as they arrive; return whether Ctrl-C ended the stream."""
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


def note_full_context(
    generator: Generator, completions: Sequence[Completion], params: SamplingParams
) -> None:
    """Say on standard error which completions had no room for --max-tokens."""
    most, context = params.max_tokens, generator.models.target.max_length
    cut = [c for c in completions if c.finish_reason == "length" and len(c.token_ids) < most]
    if cut:
        many = f", as {len(cut)} of {len(completions)} do" if len(completions) > 1 else ""
        whose, remedy = "it", "build"
        if generator.reader.continues:
            whose, remedy = "with its prompt it", "shorten the prompt, or build"
        print(
            f"note: the text ends after {len(cut[0].token_ids)} tokens{many}, not {most}: {whose} "
            f"fills the context of {context}; {remedy} with a larger `max_length`",
            file=sys.stderr,
        )


def _end_line(stream: Stream, show: bool) -> None:
    if show and stream.completion.token_ids:
        sys.stdout.write("\n")
        sys.stdout.flush()


Measured = Callable[[Completion], "PlainComparison | None"]
"""Compares a completion with plain decoding."""


def report(
    completion: Completion, models: Models, as_json: bool, measured: Measured | None
) -> None:
    """Print the JSON object to stdout, or the line of statistics to stderr; and a comparison."""
    if not as_json:
        print(summary(completion, models), file=sys.stderr, flush=True)
    found = measured(completion) if measured and completion.finish_reason else None
    if as_json:
        comparison = {"comparison": asdict(found)} if found else {}
        _print_json({**completion.to_json(), **_graphs_json(models.cuda_graphs), **comparison})
    elif found:
        print(f"[{found}]", file=sys.stderr)


def _graphs_json(graphs: CudaGraphs | None) -> dict[str, Any]:
    """Return what was captured, an empty object where nothing captures."""
    return {} if graphs is None else {"cuda_graphs": asdict(graphs)}


def complete_several(
    generator: Generator, prompt: str | list[int], params: SamplingParams, gamma: Gamma | None,
    drafter: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Print n completions of a prompt, each under its number; return 1 where one failed.

    Raises: RequestError, CapacityError for a prompt that cannot be completed.
    """
    generator.stream(prompt, replace(params, n=1), gamma=gamma, drafter=drafter)  # runs nothing
    (completions,) = generator.generate_many([prompt], params, gamma=gamma, drafter=drafter)
    if as_json:
        entries = [_entry(completion) for completion in completions]
        _print_json({"completions": entries, **_graphs_json(generator.models.cuda_graphs)})
    else:
        for completion in completions:
            _print_numbered(completion)
        _print_graphs(generator)
    note_full_context(generator, completions, params)
    return _status(completions)


def complete_file(
    generator: Generator, source: FilePrompts, params: SamplingParams, gamma: Gamma | None,
    drafter: str | None,
) -> int:  # fmt: skip
    """Print a JSON object for each prompt, in order; return 1 where one failed.

    A prompt that cannot be completed has an entry with its error, and the others go on.
    Raises: RequestError for options that no prompt could have.
    """
    encode = source.encode or generator.reader.tokens
    # It checks the options, and runs nothing.
    generator.stream([0], replace(params, n=1), gamma=gamma, drafter=drafter)
    encoded: dict[int, list[int]] = {}
    errors: dict[int, RequestError] = {}
    for number, prompt in enumerate(source.prompts):
        try:
            encoded[number] = encode(prompt.text)
        except RequestError as error:
            errors[number] = error
    results = generator.generate_each([*encoded.values()], params, gamma=gamma, drafter=drafter)
    status, finished = 0, list[Completion]()
    for number, prompt in enumerate(source.prompts):
        if number in errors:
            status = 1
            print(f"specrt: {prompt.place}: {errors[number]}", file=sys.stderr, flush=True)
            failure = {"finish_reason": "error", "error": str(errors[number])}
            _print_json({"prompt": prompt.text, **failure})
            continue
        completions = next(results)
        finished += completions
        entries = [_entry(completion) for completion in completions]
        result = entries[0] if params.n == 1 else {"completions": entries}
        _print_json({"prompt": prompt.text, **result})
        status |= _status(completions)
    _print_graphs(generator)
    note_full_context(generator, finished, params)
    return status


def _entry(completion: Completion) -> dict[str, Any]:
    error = {} if completion.error is None else {"error": completion.error}
    return {**completion.to_json(), **error}


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, ensure_ascii=False), flush=True)


def _print_numbered(completion: Completion) -> None:
    print(f"[{completion.index + 1}]\n{completion.text}", flush=True)
    if completion.error is not None:
        print(f"specrt: completion {completion.index + 1}: {completion.error}", file=sys.stderr)
    else:
        print(summary(completion), file=sys.stderr)


def _print_graphs(generator: Generator) -> None:
    graphs = generator.models.cuda_graphs
    if graphs is not None:
        print(f"[{graphs_text(graphs)}]", file=sys.stderr)


def _status(completions: Sequence[Completion]) -> int:
    return int(any(completion.error is not None for completion in completions))
