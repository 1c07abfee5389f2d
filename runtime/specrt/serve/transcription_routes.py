"""/v1/audio/transcriptions and /v1/audio/translations: OpenAI's forms and answers of speech."""

from __future__ import annotations

from asyncio import to_thread
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from specrt.aio import AsyncStream
from specrt.completion import Completion
from specrt.errors import RequestError, did_you_mean
from specrt.params import AUTO, Gamma, GenerateOptions
from specrt.serve.admission import Places, ShutDownError
from specrt.serve.form_data import FormField, parse_form
from specrt.serve.request_log import RequestRecord, record_of
from specrt.serve.route import Route
from specrt.serve.sending import JsonBody, unless_gone
from specrt.serve.service import ServedCompletions, Service
from specrt.speech.subtitles import srt_text, vtt_text
from specrt.speech.transcription import (
    Recording,
    Transcriber,
    Transcription,
    TranscriptionOptions,
    context_of,
)
from specrt.speech.wav import parse_wav
from specrt.speech.whisper_config import SPEECH_TASK, TRANSCRIBE, WhisperConfig

_GRANULARITIES = "timestamp_granularities[]"

_FIELDS = (
    "file", "model", "language", "response_format", "temperature", "seed", _GRANULARITIES, "gamma",
    "drafter", "no_speech_threshold", "stream",
)  # fmt: skip

_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")

_DOCUMENT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "model": {"type": "string"},
                        "language": {"type": "string"},
                        "response_format": {"type": "string", "enum": list(_FORMATS)},
                        "temperature": {"type": "number"},
                        "seed": {"type": "integer"},
                        _GRANULARITIES: {
                            "type": "array",
                            "items": {"type": "string", "enum": ["segment"]},
                        },
                        "gamma": {"type": "string"},
                        "drafter": {"type": "string"},
                        "no_speech_threshold": {"type": "number"},
                    },
                }
            }
        },
    }
}


@dataclass(frozen=True)
class SpeechForm:
    """A request: a file, how it is transcribed, and the form of the answer."""

    file: FormField
    model: str | None
    options: TranscriptionOptions
    answer: str
    drafting: GenerateOptions

    @classmethod
    def of(cls, fields: list[FormField], task: str) -> SpeechForm:
        """Read the fields of a form.

        Raises: RequestError naming the first that is unknown, twice there or out of range.
        """
        found: dict[str, FormField] = {}
        for one in fields:
            name = _GRANULARITIES if one.name == _GRANULARITIES[:-2] else one.name
            if name not in _FIELDS:
                raise RequestError(f"{name[:80]} is not supported{did_you_mean(name, _FIELDS)}")
            if name in found and name != _GRANULARITIES:
                raise RequestError(f"{name} is there twice; expected one of it")
            found[name] = one
            if name == _GRANULARITIES and one.text != "segment":
                raise RequestError(f"{name} has {one.text[:80]!r}; expected segment")
        if "file" not in found:
            raise RequestError("the form has no file; expected a WAV file of that name")
        texts = {name: one.text for name, one in found.items() if name != "file"}
        if texts.get("stream", "false").lower() != "false":
            raise RequestError("stream is not supported for transcriptions; leave it out")
        answer = texts.get("response_format", "json")
        if answer not in _FORMATS:
            raise RequestError(
                f"response_format is {answer[:80]!r}{did_you_mean(answer, _FORMATS)}"
            )
        if _GRANULARITIES in found and answer != "verbose_json":
            raise RequestError(f"{_GRANULARITIES} needs response_format verbose_json")
        seed = _whole("seed", texts)
        options = TranscriptionOptions(
            language=texts.get("language") or None,
            task=task,
            timestamps=answer in ("verbose_json", "srt", "vtt"),
            temperature=_number("temperature", texts, 0.0),
            seed=seed,
            no_speech_threshold=_number("no_speech_threshold", texts, _DEFAULT_THRESHOLD),
            logprobs=answer == "verbose_json",
        )
        drafting: GenerateOptions = {"gamma": _gamma(texts), "drafter": texts.get("drafter")}
        return cls(found["file"], texts.get("model"), options, answer, drafting)


_DEFAULT_THRESHOLD = TranscriptionOptions.no_speech_threshold or 0.0


def _number(name: str, texts: dict[str, str], default: float) -> float:
    try:
        return float(texts.get(name, default))
    except ValueError:
        raise RequestError(f"{name} is {texts[name][:80]!r}; expected a number") from None


def _whole(name: str, texts: dict[str, str]) -> int | None:
    text = texts.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > _MOST_DIGITS:
        raise RequestError(f"{name} is {text[:80]!r}; expected a whole number")
    return int(text)


_MOST_DIGITS = 20


def _gamma(texts: dict[str, str]) -> Gamma | None:
    return AUTO if texts.get("gamma") == AUTO else _whole("gamma", texts)


class AudioRoute(Route):
    """A route whose bodies are recordings."""

    most_bytes = "max_audio_bytes"


def transcription_routes(service: Service) -> APIRouter:
    """Return the routes of speech; on a bundle for another task they are 404, and say so."""
    router = APIRouter(route_class=AudioRoute)

    @router.post("/v1/audio/transcriptions", response_model=None, openapi_extra=_DOCUMENT)
    async def transcriptions(request: HttpRequest) -> Response:
        """Write down what is said in a file."""
        return await respond(service, request, TRANSCRIBE)

    @router.post("/v1/audio/translations", response_model=None, openapi_extra=_DOCUMENT)
    async def translations(request: HttpRequest) -> Response:
        """Write down in English what is said in a file."""
        return await respond(service, request, "translate")

    return router


async def respond(service: Service, request: HttpRequest, task: str) -> Response:
    """Return the answer to a form.

    Raises: RequestError, OverloadError, EngineError.
    """
    config = service.speech
    if config is None:
        raise RequestError(
            f"{service.name} is not a bundle for {SPEECH_TASK}; this path needs one, built from a "
            "Whisper checkpoint"
        )
    body, kind = await request.body(), request.headers.get("content-type", "")
    form = SpeechForm.of(await to_thread(parse_form, kind, body), task)
    service.require(form.model)
    work = await to_thread(_transcriber, service, config, form)
    transcribing = _transcribed(service, work, form.drafting, record_of(request.scope))
    done = await unless_gone(request, transcribing)
    return Response(status_code=499) if done is None else _answer(done, form.answer)


def _transcriber(service: Service, config: WhisperConfig, form: SpeechForm) -> Transcriber:
    """Read the file of a form."""
    name = (form.file.filename or "file")[:80]
    samples = parse_wav(form.file.data, name, config.log_mel.sampling_rate)
    generator = service.generator
    return Transcriber(
        Recording(samples, config.log_mel), config, generator.tokenizer, context_of(generator),
        form.options,
    )  # fmt: skip


async def _transcribed(
    service: Service, work: Transcriber, drafting: GenerateOptions, record: RequestRecord
) -> Transcription:
    """Decode all windows of a recording, which has one place in the queue.

    Raises: OverloadError, RequestError, EngineError.
    """
    done = None

    def following(done: Completion | None) -> AsyncStream | None:
        request = work.advance(done)
        if request is None:
            return None
        return service.generator.astream(request.features, request.params, **options)

    options: GenerateOptions = {**drafting, "cache_salt": record.cache_salt()}
    with service.admit(1, record):
        while (stream := await to_thread(following, done)) is not None:
            if service.admission.ended:
                raise ShutDownError
            window = ServedCompletions(
                service, [stream], Places(1), ExitStack(), monotonic(), record
            )
            try:
                (done,) = await window.finish()
            finally:
                await window.close()
    return work.result()


def _answer(done: Transcription, form: str) -> Response:
    """Return a transcription as a client wants it."""
    if form == "text":
        return PlainTextResponse(done.text + "\n")
    if form == "srt":
        return PlainTextResponse(srt_text(done.segments))
    if form == "vtt":
        return PlainTextResponse(vtt_text(done.segments), media_type="text/vtt")
    counts = None if done.speculation is None else done.speculation.to_json()
    more = {
        "usage": {"type": "duration", "seconds": ceil(done.duration)},
        "metrics": {"windows": done.windows, "tokens": done.tokens, "specrt": counts},
    }
    whole = done.to_json() if form == "verbose_json" else {"text": done.text}
    return JsonBody({**whole, **more})
