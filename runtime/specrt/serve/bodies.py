"""What clients send: bodies of OpenAI's requests, and the sampling parameters they come to.

Fields that vLLM and llama.cpp add are read too, where they mean something here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specrt.errors import RequestError, did_you_mean
from specrt.params import BEAMS, GenerateOptions, SamplingParams, without_beams
from specrt.text.message_forms import REASONING, object_of

MOST_CHOICES, MOST_STOPS, MOST_SCHEMA = 64, 64, 200_000
"""Completions of one request, stop strings, and characters of a schema or a tool's description."""

MOST_BAD_WORDS = 1000
"""Of one request, and characters or tokens of each: all are looked at for every token of a row."""

MOST_MESSAGES, MOST_FIELDS, MOST_BIASES = 4096, 200, 10_000
"""Messages of a conversation, fields of a body or a message, and tokens that are biased."""

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first wrong item is told, not a million of them."""

Messages = Annotated[list[T], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]

_EXPECTED = {
    "string_type": "a text", "string_unicode": "a text of whole characters",
    "list_type": "a list", "too_short": "a list that is not empty",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
    "int_type": "a whole number", "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false", "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more", "less_than_equal": "up to {le}",
    "too_long": "up to {max_length} items", "string_too_long": "up to {max_length} characters",
}  # fmt: skip
"""What a field may be, by the type of pydantic's error."""


def refusal_of(errors: Sequence[Mapping[str, Any]], given: Any) -> tuple[str | None, str]:
    """Return the name of the field of a body that is wrong, and what was expected.

    A field of several forms has an error for each: those tell most that lead furthest in.
    """
    places = [_place(error, given) for error in errors]
    place = max((one for one in places if one[:1] == places[0][:1]), key=len)
    found = [error for one, error in zip(places, errors, strict=True) if one == place]
    param = ".".join(place)
    where = param or "the body"
    if found[0]["type"] == "missing":
        return param or None, f"{where} is missing; give it"
    forms = {}
    for error in found:
        form = _EXPECTED.get(error["type"])
        if form is None:
            return param or None, f"{where}: {error['msg'].removeprefix('Value error, ')}"
        forms[form.format(**error.get("ctx", {}))] = True
    value = "null" if found[0]["input"] is None else short(found[0]["input"])
    return param or None, f"{where} is {value}; expected {' or '.join(forms)}"


def _place(error: Mapping[str, Any], given: Any) -> list[str]:
    """Return where in a body an error is, without the names that pydantic gives to forms."""
    place, missing = list[str](), error["type"] == "missing"
    path = error["loc"]
    for at, part in enumerate(path):
        if isinstance(given, Mapping) and (part in given or (missing and at == len(path) - 1)):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        else:
            continue
        place.append(str(part))
    return place


class StreamOptions(BaseModel):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    """A last chunk without choices has the usage; in the others it is null."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage so far."""
    include_speculation: bool | None = None
    """Every chunk tells what was drafted of its text."""


class OpenModel(BaseModel):
    """An object that may have fields which mean nothing here, but not many of them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and len(given) > MOST_FIELDS:
            raise ValueError(f"it has {len(given)} fields; expected up to {MOST_FIELDS}")
        return given


class FormatOptions(BaseModel):
    """What the text must be like."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None


class Body(OpenModel):
    """What all routes of completions, chats and other conversations take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    gamma: int | Literal["auto"] | None = None
    """Tokens to draft each round; 0 decodes plainly."""
    drafter: str | None = None
    verifier: str | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests start from prefixes of those with the same one alone."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that would change the answer, each with what to do about it."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
    )
    """Fields that change no text here; no log line names them."""

    @property
    def unknown(self) -> list[str]:
        """Names of fields that mean nothing here."""
        return sorted(set(self.model_extra or {}) - self.ignored - set(self.refused) - set(BEAMS))

    def refuse(self) -> None:
        """Refuse what cannot be honoured.

        Raises: RequestError, which names the field.
        """
        extra = self.model_extra or {}
        for name, remedy in self.refused.items():
            if extra.get(name) not in (None, False, [], {}):
                raise RequestError(f"{name} is not supported: {remedy}")


class SamplingBody(Body):
    """What the routes of completions and of chats take: all sampling parameters."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Items[int] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(max_length=MOST_BAD_WORDS)]], Field(max_length=MOST_BAD_WORDS)
        ]
        | None
    ) = None
    bad_words_ids: (
        Annotated[
            list[Annotated[list[int], Field(max_length=MOST_BAD_WORDS)]],
            Field(max_length=MOST_BAD_WORDS),
        ]
        | None
    ) = None
    decoder_start: Items[int] | None = None
    allowed_token_ids: Items[int] | None = None
    suppress_tokens: Items[int] | None = None
    begin_suppress_tokens: Items[int] | None = None
    forced_bos_token_id: int | Items[int] | None = None
    forced_eos_token_id: int | Items[int] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    user: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "suffix": "nothing is inserted into a text here; leave it out",
        "audio": "only text is made here; leave it out",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "prompt_logprobs": "ask /v1/completions for echo and logprobs",
        "lora": "a bundle has one set of weights; leave it out",
        "continue_final_message": "an answer that was begun is not continued; end with the user's",
        "chat_template": "give it to the server with --chat-template",
        "chat_template_kwargs": "templates are given messages and tools alone; leave it out",
    }

    ignored = Body.ignored | {"cache_prompt"}

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def options(self, salt: str) -> GenerateOptions:
        """Return how it is drafted, and with whose requests it shares what is left of them."""
        return {
            "gamma": self.gamma, "drafter": self.drafter, "cache_salt": salt, "memory_key": salt,
        }  # fmt: skip

    def params(self, most_tokens: int | None, context: int, **more: Any) -> SamplingParams:
        """Return the sampling parameters; without `most_tokens` the context is the limit.

        A temperature that is not given is 1, as OpenAI has it.
        Raises: RequestError for a field that cannot be honoured.
        """
        self.refuse()
        same = SamplingBody.model_fields.keys() & SamplingParams.__dataclass_fields__
        options = {name: getattr(self, name) for name in same}
        options["temperature"] = 1.0 if self.temperature is None else self.temperature
        options |= self.constraint()
        options["stop"] = self.stops
        options["n"] = self.n or 1
        options["max_tokens"] = context if most_tokens is None else most_tokens
        given = {name: value for name, value in (options | more).items() if value is not None}
        return SamplingParams(**given)

    def constraint(self) -> dict[str, Any]:
        """Return what the whole text must match, as sampling parameters have it.

        Raises: RequestError for several, and for a form that is unknown.
        """
        found: list[dict[str, Any]] = [
            {"json_schema": self.guided_json}, {"regex": self.guided_regex},
            {"choice": self.guided_choice}, {"grammar": self.guided_grammar},
            {"grammar": self.grammar}, {"json_schema": self.json_schema},
            response_format(self.response_format), _structured(self.structured_outputs),
        ]  # fmt: skip
        given = [one for one in found if any(value is not None for value in one.values())]
        if len(given) > 1:
            raise RequestError(
                f"{len(given)} constraints were given; expected one of response_format, "
                "structured_outputs, grammar and json_schema"
            )
        constraint = given[0] if given else {}
        if len(json.dumps(constraint, default=str)) > MOST_SCHEMA:
            raise RequestError(f"a constraint has more than {MOST_SCHEMA} characters; shorten it")
        return constraint

    def refuse(self) -> None:
        """Refuse what cannot be honoured; `best_of` may say what `n` says."""
        extra = self.model_extra or {}
        if "best_of" in extra and extra["best_of"] == (self.n or 1):
            del extra["best_of"]
        without_beams(extra)
        super().refuse()


def response_format(
    given: Mapping[str, Any] | None, field: str = "response_format"
) -> dict[str, Any]:
    """Return the constraint of OpenAI's `response_format`, by whatever name a protocol has it.

    Raises: RequestError for another form.
    """
    if given is None or given.get("type") == "text":
        return {}
    kind = given.get("type")
    if kind == "json_object":
        schema = given.get("schema")
        if schema is not None and not isinstance(schema, Mapping):
            raise RequestError(f"{field}.schema is {short(schema)}; expected an object")
        return {"json_schema": schema or {"type": "object"}}
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else given.get("schema")
        if not isinstance(schema, Mapping):
            place = "schema" if "." in field else "json_schema.schema"
            raise RequestError(f"{field} has no {place}; expected an object that is the schema")
        return {"json_schema": schema}
    raise RequestError(
        f"{field}.type is {short(kind)}; expected 'text', 'json_object' or 'json_schema'"
    )


_STRUCTURED = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
}  # fmt: skip


def _structured(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the constraint of vLLM's `structured_outputs`."""
    found = {name: value for name, value in (given or {}).items() if value is not None}
    if found.pop("json_object", None):
        found["json"] = {"type": "object"}
    for name in found:
        if name not in _STRUCTURED:
            raise RequestError(f"structured_outputs has {name!r}{did_you_mean(name, _STRUCTURED)}")
    return {_STRUCTURED[name]: value for name, value in found.items()}


Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]

Prompts = (
    str
    | Ids
    | Annotated[list[str | Ids], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
    | None
)


class CompletionBody(SamplingBody):
    """A request to /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_message(cls, given: Any, read: Callable[[Any], Prompts]) -> Prompts:
        """Refuse with one message, not with one for each form."""
        try:
            return read(given)
        except ValidationError:
            raise ValueError("expected a text, token ids, or a list of these") from None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several; none where it is null."""
        given: Any = self.prompt
        if given is None:
            return []
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)


class ChatMessage(OpenModel):
    """A message; what a template may read of it is kept."""

    role: str
    content: str | Items[dict[str, Any]] | None = None
    tool_calls: Items[dict[str, Any]] | None = None

    def plain(self) -> dict[str, Any]:
        """Return what the chat template reads: content as text, arguments of calls as JSON.

        Raises: RequestError for content that is not a text.
        """
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self._text()}
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
            if self.content is None:
                message["content"] = None  # some templates tell it from an empty text
        for name in ("name", "tool_call_id", *REASONING):
            value = (self.model_extra or {}).get(name)
            if isinstance(value, str):
                message[name] = value
        return message

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        texts = []
        for part in self.content:
            kind, text = part.get("type"), part.get("text")
            if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
                raise RequestError(
                    f"messages have a part of type {kind!r}; expected 'text', with its text: this "
                    "model reads nothing else"
                )
            texts.append(text)
        return "".join(texts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as templates have it: its arguments an object, where they are the text of one.

    A model may have written others, and is told of them as it did.
    """
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("messages have a tool call without function.name; give one")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        found = object_of(arguments or "{}")
        arguments = arguments if found is None else found
    return {**call, "function": {**function, "arguments": arguments}}


class ChatBody(SamplingBody):
    """A request to /v1/chat/completions."""

    messages: Messages[ChatMessage]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    refused = {**SamplingBody.refused, "echo": "messages are not told again; leave it out"}

    @property
    def most_tokens(self) -> int | None:
        """The limit by either of its names."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    @property
    def ranked(self) -> int | None:
        """How many of the likeliest tokens to tell; None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs was given without logprobs; set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(BaseModel):
    """A request to /tokenize: vLLM's `prompt` or llama.cpp's `content`."""

    prompt: str | None = None
    content: str | None = None
    messages: Messages[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    """Each token with its text, or with its bytes where they are not text, as llama.cpp does it."""


class DetokenizeBody(BaseModel):
    """A request to /detokenize."""

    tokens: Items[int]
