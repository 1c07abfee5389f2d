"""Transcription: windows of a recording become requests, and their tokens segments of text.

`Transcriber` runs nothing: it yields what is to be decoded and is sent the completions, so that one
algorithm serves a thread, an event loop and a test.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from collections.abc import Generator as Generates
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.completion import Completion, SpeculationStats
from specrt.errors import CapacityError, RequestError
from specrt.generator import Generator
from specrt.params import MOST_RANKED, GenerateOptions, SamplingParams, TimestampRules
from specrt.speech.log_mel import Features, LogMel
from specrt.speech.wav import Samples
from specrt.speech.whisper_config import STEP_FRAMES, STEP_S, TRANSCRIBE, WhisperConfig
from specrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class TranscriptionOptions:
    """How a recording is transcribed.

    Raises: RequestError for a value out of range.
    """

    language: str | None = None
    """Its code, as `en`; detected in the first window when None."""
    task: str = TRANSCRIBE
    """`transcribe`, or `translate` into English."""
    timestamps: bool = False
    """Whether the decoder says when each segment begins and ends. Then a window begins where the
    last whole segment ended; without, each begins where the one before it ends."""
    temperature: float = 0.0
    seed: int | None = None
    no_speech_threshold: float | None = 0.6
    """A window is left out where <|nospeech|> is more probable than this, and its text less than
    `logprob_threshold` says; None leaves out none."""
    logprob_threshold: float = -1.0
    """Mean log-probability of the tokens of a text, by the decoder's own scores."""
    logprobs: bool = False
    """Whether each segment tells that mean."""

    def __post_init__(self) -> None:
        """Check ranges; a model checks language and task."""
        SamplingParams(temperature=self.temperature, seed=self.seed)
        least = self.no_speech_threshold
        if least is not None and not _LEAST_THRESHOLD <= least <= 1:
            raise RequestError(
                f"no_speech_threshold is {least!r}; expected a probability from "
                f"{_LEAST_THRESHOLD} to 1"
            )


_LEAST_THRESHOLD = 0.05
"""What is more probable than this is among the `MOST_RANKED` likeliest tokens."""


@dataclass(frozen=True)
class TranscriptionSegment:
    """A part of a recording, and its text."""

    start: float
    """Seconds from the beginning of the recording, as is `end`."""
    end: float
    text: str
    tokens: tuple[int, ...]
    """Timestamps are among them."""
    seek: int
    """The frame at which its window begins."""
    temperature: float = 0.0
    avg_logprob: float | None = None
    """See `TranscriptionOptions.logprob_threshold`; of its whole window."""
    no_speech_prob: float = 0.0
    """Of <|nospeech|> in its window; 0 where it is not among the likeliest tokens, or not asked
    for."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over those that zlib makes of it.

        A text that goes in circles has more than 2.4.
        """
        text = self.text.encode(errors="replace")
        return len(text) / len(zlib.compress(text))

    def to_json(self, number: int) -> dict[str, Any]:
        """Return OpenAI's object of a segment."""
        return {
            "id": number,
            "seek": self.seek,
            "start": round(self.start, 3),
            "end": round(self.end, 3),
            "text": self.text,
            "tokens": list(self.tokens),
            "temperature": self.temperature,
            "avg_logprob": self.avg_logprob,
            "compression_ratio": round(self.compression_ratio, 4),
            "no_speech_prob": round(self.no_speech_prob, 6),
        }


@dataclass(frozen=True)
class Transcription:
    """The text of a recording."""

    text: str
    language: str
    """Its code; the one given, the one detected, or `en` of a model that knows no other."""
    task: str
    duration: float
    """Seconds of the recording."""
    segments: tuple[TranscriptionSegment, ...]
    """Those that have text."""
    windows: int
    """How many were decoded or left out."""
    tokens: int
    """How many were emitted in all windows."""
    speculation: SpeculationStats | None
    """The rounds of all windows; None where nothing was decoded."""

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's verbose object."""
        return {
            "task": self.task,
            "language": self.language,
            "duration": round(self.duration, 3),
            "text": self.text,
            "segments": [segment.to_json(number) for number, segment in enumerate(self.segments)],
        }


class Recording:
    """The features of a recording."""

    def __init__(self, samples: Samples, log_mel: LogMel) -> None:
        """Take samples.

        Raises: RequestError for an array that is not a recording.
        """
        given: Any = np.asarray(samples)
        if given.ndim != 1 or not given.size or given.dtype.kind != "f":
            raise RequestError(
                f"samples are of shape {list(given.shape)} and type {given.dtype}; expected "
                f"floats, one for each of {log_mel.sampling_rate} samples a second"
            )
        with np.errstate(over="ignore"):  # what is not a float of 32 bits is refused as infinite
            self._samples: NDArray[np.float32] = given.astype(np.float32)
        if not np.isfinite(self._samples).all():
            raise RequestError("samples hold NaN or infinity; expected numbers from -1 to 1")
        self._log_mel = log_mel
        self.frames = max(1, len(given) // log_mel.hop_length)
        """Without those that a window is filled up with."""
        self.duration = len(given) / log_mel.sampling_rate
        """In seconds."""

    @cached_property
    def silent(self) -> bool:
        """Whether all samples are the same."""
        return bool(self._samples.min() == self._samples.max())

    @cached_property
    def features(self) -> Features:
        """All frames', a window of them at least."""
        return self._log_mel(self._samples)

    def window(self, seek: int) -> Features:
        """Return the features from a frame on, filled up with zeros.

        Shapes: [mel bins, frames of a window].
        """
        most = self._log_mel.window_frames
        found = self.features[:, seek : seek + most]
        return np.ascontiguousarray(np.pad(found, ((0, 0), (0, most - found.shape[1]))))


class WindowRequest(NamedTuple):
    """What is to be decoded."""

    features: Features
    params: SamplingParams


class Span(NamedTuple):
    """A segment of a window: its tokens, and its time in steps of `STEP_S` from there."""

    begin: int
    end: int
    tokens: list[int]


def split(tokens: Sequence[int], frames: int, begin: int) -> tuple[list[Span], int]:
    """Return the segments of a window's tokens, and the frames to move on by.

    Two timestamps in a row end a segment and begin the next one. One that no second timestamp ends
    is left for the next window to hear whole, unless it is the only one, or a single timestamp is
    the last token: no speech is after that.
    `frames` are those of the recording in the window; the first timestamp token is `begin`.
    Source: Radford et al. 2022, arXiv:2212.04356, section 4.5.
    """
    stamps = [token >= begin for token in tokens]
    ends = [at for at in range(1, len(tokens)) if stamps[at - 1] and stamps[at]]
    if not ends:
        latest = next((t - begin for t in reversed(tokens) if t >= begin), 0)
        return [Span(0, latest or frames // STEP_FRAMES, [*tokens])], frames
    whole = stamps[-2:] == [False, True]
    places = [*ends, len(tokens)] if whole else ends
    spans, first = [], 0
    for place in places:
        part = [*tokens[first:place]]
        spans.append(Span(max(0, part[0] - begin), part[-1] - begin, part))
        first = place
    if whole:
        return spans, frames
    return spans, (tokens[ends[-1] - 1] - begin) * STEP_FRAMES or frames


class Transcriber:
    """Makes requests of a recording, window by window, and a transcription of what they return."""

    def __init__(
        self,
        recording: Recording,
        config: WhisperConfig,
        tokenizer: Tokenizer,
        context: int,
        options: TranscriptionOptions | None = None,
    ) -> None:
        """`context` is how many tokens a text may have.

        Raises: RequestError for a language or a task that the model does not know.
        """
        self._recording = recording
        self._config = config
        self._tokenizer = tokenizer
        self._options = options or TranscriptionOptions()
        config.check(self._options.language, self._options.task)
        self._language = self._options.language or config.language
        if not config.multilingual:
            self._language = "en"
        self._context = context
        self._segments: list[TranscriptionSegment] = []
        self._windows = 0
        self._tokens = 0
        self._stats: SpeculationStats | None = None
        self._requests = self._all()
        self.seconds = 0.0
        """How much of the recording is done."""

    def advance(self, done: Completion | None = None) -> WindowRequest | None:
        """Take the completion of the request before, None at first; return the next one.

        None is the end.
        Raises: CapacityError where the context has no room for any text.
        """
        try:
            return next(self._requests) if done is None else self._requests.send(done)
        except StopIteration:
            return None

    def _all(self) -> Generates[WindowRequest, Completion, None]:
        """Yield one request after the other; each is answered by its completion."""
        recording, log_mel, seek = self._recording, self._config.log_mel, 0
        if recording.silent:
            seek = recording.frames
        while seek < recording.frames:
            frames = min(log_mel.window_frames, recording.frames - seek)
            spans, moved = yield from self._window(seek, frames)
            self._segments += [span for span in spans if span.text.strip()]
            seek += moved
            self._windows += 1
            self.seconds = min(log_mel.seconds(seek), recording.duration)
        self.seconds = recording.duration

    def result(self) -> Transcription:
        """Return what is transcribed so far."""
        tokens = [token for segment in self._segments for token in segment.tokens]
        return Transcription(
            self._text(tokens).strip(),
            self._language or "",
            self._options.task,
            self._recording.duration,
            tuple(self._segments),
            self._windows,
            self._tokens,
            self._stats,
        )

    def _window(
        self, seek: int, frames: int
    ) -> Generates[WindowRequest, Completion, tuple[list[TranscriptionSegment], int]]:
        """Decode a window; return its segments, and the frames to move on by."""
        options, config = self._options, self._config
        features = self._recording.window(seek)
        silence = yield from self._hear(features)
        least = options.no_speech_threshold
        doubtful = least is not None and silence > least
        prefix = config.prefix(self._language, options.task, timestamps=options.timestamps)
        done = yield from self._decode(features, prefix, ranked=doubtful or options.logprobs)
        mean = _mean_logprob(done)
        if doubtful and mean is not None and mean < options.logprob_threshold:
            return [], frames
        tokens = done.token_ids
        if tokens and tokens[-1] == config.end:
            tokens = tokens[:-1]
        if options.timestamps:
            spans, moved = split(tokens, frames, config.timestamp_begin)
        else:
            spans, moved = [Span(0, frames // STEP_FRAMES, [*tokens])], frames
        start = config.log_mel.seconds(seek)
        return [
            TranscriptionSegment(
                start + span.begin * STEP_S,
                start + span.end * STEP_S,
                self._text(span.tokens),
                tuple(span.tokens),
                seek,
                options.temperature,
                mean,
                silence,
            )
            for span in spans
        ], moved

    def _hear(self, features: Features) -> Generates[WindowRequest, Completion, float]:
        """Detect the language where it is not known; return the probability of <|nospeech|>.

        Both are what the decoder expects after its first token, before any rule.
        """
        config, wanted = self._config, self._language is None
        if not wanted and self._options.no_speech_threshold is None:
            return 0.0
        params = SamplingParams(
            decoder_start=(config.start,),
            max_tokens=1,
            logprobs=MOST_RANKED,
            ignore_eos=True,
            allowed_token_ids=tuple(config.languages.values()) if wanted else None,
            suppress_tokens=(),
            begin_suppress_tokens=(),
            bad_words_ids=(),
            forced_bos_token_id=(),
            forced_eos_token_id=(),
        )
        done = yield WindowRequest(features, params)
        if wanted:
            codes = {token: code for code, token in config.languages.items()}
            self._language = codes[done.token_ids[0]]
        assert done.logprobs, "log-probabilities were asked for"
        found = done.logprobs[0].get(config.no_speech)
        return exp(found.logprob) if found is not None else 0.0

    def _decode(
        self, features: Features, prefix: tuple[int, ...], *, ranked: bool
    ) -> Generates[WindowRequest, Completion, Completion]:
        options, config = self._options, self._config
        room = min(config.max_length, self._context - len(prefix))
        if room < 1:
            raise CapacityError(
                f"the context of this bundle is {self._context} tokens, and a text begins with "
                f"{len(prefix)}; build with a larger `max_length`"
            )
        rules = TimestampRules(config.timestamp_begin, config.end, config.max_initial_timestamp)
        params = SamplingParams(
            decoder_start=prefix,
            max_tokens=room,
            temperature=options.temperature,
            seed=None if options.seed is None else options.seed + self._windows,
            logprobs=0 if ranked else None,
            timestamp_rules=rules if options.timestamps else None,
        )
        done = yield WindowRequest(features, params)
        self._tokens += len(done.token_ids)
        if self._stats is None:
            own = done.speculation
            self._stats = SpeculationStats(own.gamma, own.drafter, own.fallback, own.tuned)
        self._stats.merge(done.speculation)
        return done

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without timestamps and control tokens."""
        return self._tokenizer.decode([token for token in tokens if token < self._config.end])


def _mean_logprob(done: Completion) -> float | None:
    """Return the mean log-probability of a text's tokens; None where it was not asked for."""
    if done.logprobs is None:
        return None
    pairs = zip(done.token_ids, done.logprobs, strict=True)
    found = [entry[token].logprob for token, entry in pairs]
    return sum(found) / len(found) if found else -inf


def transcribe(
    generator: Generator,
    config: WhisperConfig,
    samples: Samples,
    options: TranscriptionOptions | None = None,
    *,
    progress: Callable[[float], object] | None = None,
    **drafting: Unpack[GenerateOptions],
) -> Transcription:
    """Transcribe a recording of any length with an open bundle of `automatic-speech-recognition`.

    `progress` is called with the seconds that are done. A recording without speech has no text.
    Shapes: samples [N] f32, from -1 to 1, as many a second as `config.log_mel` says.
    Raises: RequestError, EngineError.
    """
    recording = Recording(samples, config.log_mel)
    context = context_of(generator)
    work = Transcriber(recording, config, generator.tokenizer, context, options)
    run(work, generator, progress, **drafting)
    return work.result()


def context_of(generator: Generator) -> int:
    """Return how many tokens the text of a window may have."""
    target = generator.models.target
    return min(target.max_length, target.geometry.max_positions)


def run(
    work: Transcriber,
    generator: Generator,
    progress: Callable[[float], object] | None = None,
    **drafting: Unpack[GenerateOptions],
) -> None:
    """Decode all windows, one after the other.

    Raises: RequestError, EngineError; the result has the windows before.
    """
    done = None
    while (request := work.advance(done)) is not None:
        if progress is not None:
            progress(work.seconds)
        done = generator.generate(request.features, request.params, **drafting)
    if progress is not None:
        progress(work.seconds)
