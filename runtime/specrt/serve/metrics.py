"""Prometheus metrics: the names of vLLM, behind a prefix of one's own choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from specrt.completion import Completion
from specrt.serve.admission import Admission
from specrt.speculation.round import Round

PREFIXES = {"vllm": "vllm:"}
"""How names begin; every other prefix ends in an underscore, as Prometheus advises."""

_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480)


class DeviceSessions(Protocol):
    """Devices that draft, and the sessions they have here."""

    def __len__(self) -> int:
        """Return how many sessions are open."""

    @property
    def links(self) -> int:
        """How many WebSockets are open."""


class ServerMetrics:
    """What `/metrics` tells, in a registry of its own."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, prefix: str, model: str, admission: Admission, kv_positions: int) -> None:
        """`kv_positions` are those of all rows."""
        self._registry = CollectorRegistry()
        self._begin = PREFIXES.get(prefix, f"{prefix}_")
        self._model = model
        self._admission = admission
        self._kv_positions = kv_positions
        labels = ("model_name",)

        def counter(name: str, text: str) -> Counter:
            made = Counter(self._begin + name, text, labels, registry=self._registry)
            return made.labels(model)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(
                self._begin + name, text, labels, registry=self._registry, buckets=[*buckets]
            )
            return made.labels(model)

        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter(
            "prompt_tokens_cached", "Tokens of prompts that the KV buffers held already."
        )
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._rounds = counter("spec_decode_num_drafts", "Rounds in which tokens were drafted.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._fallbacks = counter(
            "spec_decode_fallbacks", "Completions that went on without their drafter."
        )
        self._per_position = Counter(
            self._begin + "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their position in the draft.",
            (*labels, "position"), registry=self._registry,
        )  # fmt: skip
        self._gamma = Counter(
            self._begin + "spec_decode_gamma",
            "Rounds, by the number of tokens drafted in them.",
            (*labels, "gamma"), registry=self._registry,
        )  # fmt: skip
        self._ended = Counter(
            self._begin + "request_success",
            "Completions that ended, by their finish reason.",
            (*labels, "finished_reason"), registry=self._registry,
        )  # fmt: skip
        self._refused = Counter(
            self._begin + "request_refused", "Requests refused, by their HTTP status.",
            (*labels, "status"), registry=self._registry,
        )  # fmt: skip
        self._ttft = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _TTFT_S
        )
        self._itl = histogram(
            "inter_token_latency_seconds",
            "The time of a round over the tokens it emitted, once for each of them.", _ITL_S,
        )  # fmt: skip
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _E2E_S
        )
        self._queued = histogram("request_queue_time_seconds", "The wait for a row.", _TTFT_S)
        self._device_rounds = counter(
            "verify_rounds", "Rounds of devices' sessions in which tokens were drafted."
        )
        self._device_drafted = counter("verify_draft_tokens", "Tokens that devices drafted.")
        self._device_accepted = counter(
            "verify_accepted_tokens", "Tokens accepted that devices drafted."
        )
        self.devices: DeviceSessions | None = None
        """Those that draft for this target, where they may."""
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Read the gauges as they are now."""
        admission = self._admission
        live = [stream.completion for stream in [*admission.live]]
        held = sum(
            c.prompt_tokens + len(c.token_ids) for c in live if c.timings.taken_ns is not None
        )
        values = {
            "num_requests_running": ("Completions that have a row.", admission.running),
            "num_requests_waiting": ("Completions that wait for a row.", admission.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV positions of all rows that running completions use, 0 to 1.",
                held / self._kv_positions,
            ),
        }
        if self.devices is not None:
            values["verify_sessions"] = ("Open sessions of devices.", len(self.devices))
            values["verify_links"] = ("Open WebSockets of devices.", self.devices.links)
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(self._begin + name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def refuse(self, status: int) -> None:
        """Count a request that was refused."""
        self._refused.labels(self._model, status).inc()

    def first_token(self, completion: Completion) -> None:
        """Note the first tokens of a completion."""
        timings = completion.timings
        self._prompt.inc(completion.prompt_tokens)
        self._cached.inc(completion.cached_tokens)
        self._queued.observe(timings.queue_ms / 1e3)
        self._ttft.observe((timings.queue_ms + timings.ttft_ms) / 1e3)

    def round(self, round_: Round, seconds: float, emitted: int) -> None:
        """Note a round after the first: how long it took, and how many tokens it delivered."""
        for _ in range(emitted):
            self._itl.observe(seconds / emitted)
        self._gamma.labels(self._model, round_.drafted).inc()
        if round_.drafted:
            self._rounds.inc()
            self._drafted.inc(round_.drafted)
            self._accepted.inc(round_.accepted)
            for position in range(round_.accepted):
                self._per_position.labels(self._model, position).inc()

    def device_round(self, round_: Round) -> None:
        """Note a round of a device's session, from any thread."""
        if round_.drafted:
            self._device_rounds.inc()
            self._device_drafted.inc(round_.drafted)
            self._device_accepted.inc(round_.accepted)

    def end(self, completion: Completion, seconds: float) -> None:
        """Note a completion that is over, however it ended."""
        self._generated.inc(len(completion.token_ids))
        self._e2e.observe(seconds)
        self._ended.labels(self._model, completion.finish_reason or "abort").inc()
        if completion.speculation.fallback is not None:
            self._fallbacks.inc()
