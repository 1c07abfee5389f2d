"""Prometheus metrics: the names of vLLM, after a prefix of one's own choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specrt.completion import Completion
from specrt.serve.admission import Admission
from specrt.serve.api_keys import KEY_COUNTERS, ApiKey
from specrt.speculation.round import Round

PREFIXES = {"vllm": "vllm:"}
"""How names begin; every other prefix ends in an underscore, as Prometheus advises."""

_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)


COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts that the KV buffers held already.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Rounds in which tokens were drafted.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_evaluated_tokens": "Drafted tokens up to each round's first rejection.",
    "spec_decode_num_accepted_tokens": "Drafted tokens accepted.",
    "spec_decode_num_emitted_tokens": "Tokens that rounds delivered: all but each text's first.",
    "spec_decode_fallbacks": "Completions that went on without their drafter.",
    "verify_rounds": "Rounds of devices' sessions in which tokens were drafted.",
    "verify_draft_tokens": "Tokens that devices drafted.",
    "verify_accepted_tokens": "Tokens accepted that devices drafted.",
}

LABELLED = {
    "spec_decode_num_accepted_tokens_per_pos": (
        "position", "Drafted tokens accepted, by their position in the draft.",
    ),
    "spec_decode_gamma": ("gamma", "Rounds, by the number of tokens drafted in them."),
    "request_success": ("finished_reason", "Completions that ended, by their finish reason."),
    "request_refused": ("status", "Requests refused, by their HTTP status."),
}  # fmt: skip
"""Counters with a label of their own."""

HISTOGRAMS = {
    "time_to_first_token_seconds": (_TTFT_S, "From the request to its first token."),
    "inter_token_latency_seconds": (
        _ITL_S, "The time of a round over the tokens it emitted, once for each of them.",
    ),
    "e2e_request_latency_seconds": (_E2E_S, "From the request to its last token."),
    "request_queue_time_seconds": (_TTFT_S, "The wait for a row."),
}  # fmt: skip


class DeviceSessions(Protocol):
    """Devices that draft, and the sessions they have here."""

    def __len__(self) -> int:
        """Return how many sessions are open."""

    @property
    def running(self) -> Sequence[Completion]:
        """The texts that hold a row."""

    @property
    def waiting(self) -> int:
        """How many sessions wait for a row, not for their device."""

    @property
    def links(self) -> int:
        """How many WebSockets are open."""


class ServerMetrics:
    """What `/metrics` tells, in a registry of its own."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self, prefix: str, model: str, admission: Admission, kv_positions: int,
        *, prompts_held: bool = True,
    ) -> None:  # fmt: skip
        """`kv_positions` are all rows'; with `prompts_held` prompts take some of them."""
        self._registry = CollectorRegistry()
        self._begin = PREFIXES.get(prefix, f"{prefix}_")
        self._model = model
        self._admission = admission
        self._kv_positions = kv_positions
        self._prompts_held = prompts_held
        self.devices: DeviceSessions | None = None
        """Those that draft for this target, where they may."""
        self.keys: Iterable[ApiKey] = ()
        """Of clients, where a key is needed."""
        self._count = {name: self._counter(name, text) for name, text in COUNTERS.items()}
        self._count_by = {
            name: self._family(Counter, name, text, label)
            for name, (label, text) in LABELLED.items()
        }
        self._times = {
            name: self._family(Histogram, name, text, buckets=buckets).labels(model)
            for name, (buckets, text) in HISTOGRAMS.items()
        }
        self._registry.register(self)

    def _family(self, kind: Any, name: str, text: str, *more: str, **options: Any) -> Any:
        """Return a metric with the model's name and more as labels."""
        labels = ("model_name", *more)
        return kind(self._begin + name, text, labels, registry=self._registry, **options)

    def _counter(self, name: str, text: str) -> Counter:
        made: Counter = self._family(Counter, name, text).labels(self._model)
        return made

    def collect(self) -> Iterable[Metric]:
        """Read the gauges as they are now."""
        admission, devices = self._admission, self.devices
        of_devices = devices.running if devices is not None else ()
        waiting = admission.waiting + (devices.waiting if devices is not None else 0)
        running = [*(s.completion for s in [*admission.live] if s.has_row), *of_devices]
        # The last token of a text is in no buffer, and a full one has one token more.
        lengths = (len(c.token_ids) + self._prompts_held * c.prompt_tokens for c in running)
        held = sum(max(0, length - 1) for length in lengths)
        values = {
            "num_requests_running": ("Completions that have a row.", len(running)),
            "num_requests_waiting": ("Completions that wait for a row.", waiting),
            "num_requests_paused": (
                "Completions whose client does not read, and that gave their row away.",
                admission.paused,
            ),
            "kv_cache_usage_perc": (
                "Share of the KV positions of all rows that running completions use, 0 to 1.",
                held / self._kv_positions,
            ),
        }
        if devices is not None:
            values["verify_sessions"] = ("Open sessions of devices.", len(devices))
            values["verify_links"] = ("Open WebSockets of devices.", devices.links)
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(self._begin + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        keys = [*self.keys]
        for name, text in KEY_COUNTERS.items() if keys else ():
            counter = CounterMetricFamily(self._begin + name, text, labels=["model_name", "key"])
            for key in keys:
                counter.add_metric([self._model, key.name], key.counts[name])
            yield counter

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def refuse(self, status: int) -> None:
        """Count a request that was refused."""
        self._count_by["request_refused"].labels(self._model, status).inc()

    def first_token(self, completion: Completion) -> None:
        """Note the first tokens of a completion."""
        timings = completion.timings
        self._count["prompt_tokens"].inc(completion.prompt_tokens)
        self._count["prompt_tokens_cached"].inc(completion.cached_tokens)
        self._times["request_queue_time_seconds"].observe(timings.queue_ms / 1e3)
        self._times["time_to_first_token_seconds"].observe(
            (timings.queue_ms + timings.ttft_ms) / 1e3
        )

    def round(self, round_: Round, seconds: float, emitted: int) -> None:
        """Note a round after the first: how long it took, and how many tokens it delivered."""
        for _ in range(emitted):
            self._times["inter_token_latency_seconds"].observe(seconds / emitted)
        self._count_by["spec_decode_gamma"].labels(self._model, round_.drafted).inc()
        self._count["spec_decode_num_emitted_tokens"].inc(emitted)
        if round_.drafted:
            self._count["spec_decode_num_drafts"].inc()
            self._count["spec_decode_num_draft_tokens"].inc(round_.drafted)
            self._count["spec_decode_num_evaluated_tokens"].inc(round_.evaluated)
            self._count["spec_decode_num_accepted_tokens"].inc(round_.accepted)
            for position in range(round_.accepted):
                self._count_by["spec_decode_num_accepted_tokens_per_pos"].labels(
                    self._model, position
                ).inc()

    def device_round(self, round_: Round) -> None:
        """Note a round of a device's session, from any thread."""
        if round_.drafted:
            self._count["verify_rounds"].inc()
            self._count["verify_draft_tokens"].inc(round_.drafted)
            self._count["verify_accepted_tokens"].inc(round_.accepted)

    def end(self, completion: Completion, seconds: float) -> None:
        """Note a completion that is over, however it ended."""
        self._count["generation_tokens"].inc(len(completion.token_ids))
        self._times["e2e_request_latency_seconds"].observe(seconds)
        self._count_by["request_success"].labels(
            self._model, completion.finish_reason or "abort"
        ).inc()
        if completion.speculation.fallback is not None:
            self._count["spec_decode_fallbacks"].inc()
