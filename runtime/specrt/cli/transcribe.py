"""`specrt transcribe`: writes down what is said in a WAV file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import click

from specrt.cli.cache import bundle_argument
from specrt.cli.options import GammaType, InputFile, print_notices, progress
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import Gamma
from specrt.speculation.drafters import DRAFTERS
from specrt.speech.subtitles import line_text, srt_text, vtt_text
from specrt.speech.transcription import (
    Recording,
    Transcriber,
    Transcription,
    TranscriptionOptions,
    context_of,
    run,
)
from specrt.speech.wav import read_wav
from specrt.speech.whisper_config import TRANSCRIBE, read_whisper_config


@click.command("transcribe")
@click.argument("file", type=InputFile(), metavar="FILE.wav")
@bundle_argument
@click.option(
    "--language", metavar="CODE", help="Language of the speech, as en.  [default: detected]"
)
@click.option(
    "--task", default=TRANSCRIBE, show_default=True, help="transcribe, or translate into English."
)
@click.option("--timestamps", is_flag=True, help="Say when each segment begins and ends.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object, as OpenAI's.")
@click.option("--srt", "form", flag_value="srt", help="Print SubRip subtitles.")
@click.option("--vtt", "form", flag_value="vtt", help="Print WebVTT subtitles.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option(
    "--no-speech-threshold",
    default=TranscriptionOptions.no_speech_threshold,
    show_default=True,
    help="Leave out a window where silence is more probable than this, and its text improbable.",
)
@click.option(
    "--gamma",
    type=GammaType(),
    help="Tokens drafted per round: a number, 0 for plain decoding, or auto.  [default: the "
    "bundle's, or auto]",
)
@click.option(
    "--drafter",
    type=click.Choice(list(DRAFTERS)),
    help="What drafts: see `specrt generate --help`.  [default: the bundle's]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option(
    "--memory",
    type=click.IntRange(min=1),
    help="MB for weights and caches; without room for it the draft model is not loaded.",
)
@click.pass_obj
def command(
    owns_process: bool,
    /,
    file: Path,
    bundle: Path,
    language: str | None,
    task: str,
    timestamps: bool,
    form: str | None,
    temperature: float,
    seed: int | None,
    no_speech_threshold: float,
    gamma: Gamma | None,
    drafter: str | None,
    threads: int | None,
    memory: int | None,
) -> int:
    """Write down what is said in FILE.wav with the engines of BUNDLE, a Whisper model.

    The file has one channel of 16,000 samples a second; - is standard input. The text goes to
    standard output at the end, one line of statistics to standard error. Ctrl-C prints what is
    done; a recording without speech has the exit status 2.
    """
    options = TranscriptionOptions(
        language=language,
        task=task,
        timestamps=timestamps or form in ("srt", "vtt"),
        temperature=temperature,
        seed=seed,
        no_speech_threshold=no_speech_threshold,
        logprobs=form == "json",
    )
    config = read_whisper_config(bundle)
    config.check(language, task)
    recording = Recording(read_wav(file, config.log_mel.sampling_rate), config.log_mel)
    if recording.silent:
        raise _no_speech(file, recording.duration)
    with load(
        bundle,
        threads=threads,
        owns_process=owns_process,
        memory_bytes=memory * 10**6 if memory is not None else None,
        text_memory_bytes=0,
    ) as generator:
        print_notices(generator.notices)
        began = monotonic()
        context = context_of(generator)
        work = Transcriber(recording, config, generator.tokenizer, context, options)
        interrupted = follow(work, generator, recording.duration, gamma=gamma, drafter=drafter)
    done, seconds = work.result(), monotonic() - began
    if not done.segments and not interrupted:
        raise _no_speech(file, recording.duration)
    report(done, seconds, work.seconds, form, timestamps=timestamps)
    return 130 if interrupted else 0


def _no_speech(file: Path, duration: float) -> RequestError:
    return RequestError(f"{file} has no speech in its {duration:.1f} s; nothing to write down")


def follow(work: Transcriber, generator: Generator, duration: float, **drafting: Any) -> bool:
    """Decode all windows under a bar of seconds; return whether Ctrl-C ended it."""
    with progress("transcribe", steady=True) as show:
        show(0.0, f"of {duration:.0f} s")
        try:
            run(
                work,
                generator,
                lambda seconds: show(seconds / duration, f"of {duration:.0f} s"),
                **drafting,
            )
        except KeyboardInterrupt:
            return True
    return False


def report(
    done: Transcription, seconds: float, heard: float, form: str | None, *, timestamps: bool
) -> None:
    """Print a transcription, and how long `heard` seconds of the recording took."""
    factor = seconds / heard if heard else 0.0
    if form == "json":
        counts = done.speculation.to_json() if done.speculation else None
        more = {"real_time_factor": round(factor, 4), "tokens": done.tokens, "speculation": counts}
        print(json.dumps({**done.to_json(), **more}, ensure_ascii=False))
        return
    if form is not None:
        print({"srt": srt_text, "vtt": vtt_text}[form](done.segments), end="")
    elif timestamps:
        print(*map(line_text, done.segments), sep="\n")
    else:
        print(done.text)
    parts = [
        f"{heard:.1f} s of audio, real-time factor {factor:.3f}",
        f"{done.tokens} tokens in {done.windows} windows",
        str(done.speculation or ""),
        f"language {done.language}" if done.language else "",
    ]
    print(f"[{' | '.join(filter(None, parts))}]", file=sys.stderr)
