"""What a bundle's `generation_config.json` implies for requests: options, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from specrt.errors import BundleError, RequestError
from specrt.params import SamplingParams

_SAME = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
)  # fmt: skip
"""Settings that are sampling parameters by the same name."""

_WITHOUT_EFFECT: Mapping[str, Any] = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "renormalize_logits": False,
}
"""Settings that are not honoured, each with the value at which that changes nothing."""


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Settings of how to sample, by the same names."""


class GenerationConfig(NamedTuple):
    """The settings of one file, for a text that begins with so many tokens."""

    options: dict[str, Any]
    """Sampling parameters, for requests that leave them out."""
    notices: list[str]
    """Remarks for the user, a line each."""


def read_sampling(path: Path, data: bytes) -> dict[str, Any]:
    """Read how a model is meant to be sampled, as sampling parameters; nothing where greedily.

    Raises: BundleError for what is not JSON, and for values that cannot be.
    """
    with _readable(path):
        found = _object(data)
        if not found.get("do_sample"):
            return {}
        given = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
        sampling = {"temperature": 1.0, **given}
        SamplingParams(**sampling)
        return sampling


def read_generation_config(
    path: Path, data: bytes, *, start: int, vocabulary: int
) -> GenerationConfig:
    """Read the settings that hold for encoder-decoders, as transformers applies them.

    Its `min_length` counts the `start` tokens of a text, and a token is forced to come first only
    after a single one.
    Raises: BundleError for what is not JSON, and for values that cannot be.
    """
    with _readable(path):
        found = _object(data)
        options = _options(found, start)
        beams = _whole(found, "num_beams", 1)
        _check_ids(options, vocabulary)
        SamplingParams(**options, max_tokens=max(1, options.get("min_tokens", 0)))
    notices = []
    if beams > 1:
        notices.append(
            f"the checkpoint's generation config asks for {beams} beams; texts are decoded with "
            "one, greedily or sampled, because beams are not speculated on"
        )
    left_out = [name for name, value in _WITHOUT_EFFECT.items() if _given(found, name, value)]
    if left_out:
        notices.append(
            f"the checkpoint's generation config has {', '.join(left_out)}, which is not honoured"
        )
    return GenerationConfig(options, notices)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError, RequestError) as error:
        raise BundleError(
            f"{path} cannot be read ({error}); correct it in the checkpoint, and build the bundle "
            "again"
        ) from None


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}; expected an object")
    return found


def _options(found: Mapping[str, Any], start: int) -> dict[str, Any]:
    options = {name: found[name] for name in _SAME if found.get(name) is not None}
    if start > 1:
        options.pop("forced_bos_token_id", None)
    least = max(_whole(found, "min_length", 0) - start, _whole(found, "min_new_tokens", 0))
    if least > 0:
        options["min_tokens"] = least
    return options


def _whole(found: Mapping[str, Any], name: str, default: int) -> int:
    value = found.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; expected a whole number of 0 or more")
    return value


def _given(found: Mapping[str, Any], name: str, without_effect: Any) -> bool:
    value = found.get(name)
    return value is not None and value != without_effect


def _check_ids(options: Mapping[str, Any], vocabulary: int) -> None:
    """Refuse ids that the model does not score, which no request could be made with."""
    for name in _SAME[2:]:
        for token in _flat(options.get(name, ())):
            if type(token) is not int or not 0 <= token < vocabulary:
                raise ValueError(
                    f"{name} holds {token!r}; expected ids of the vocabulary, 0 to {vocabulary - 1}"
                )


def _flat(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        return (value,)
    return [item for part in value for item in _flat(part)]
