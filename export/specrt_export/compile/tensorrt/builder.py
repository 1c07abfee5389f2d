"""Build a plan: one way for TensorRT and for TensorRT for RTX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from specrt.cuda import survey
from specrt.engines.tensorrt.journal import Message
from specrt.engines.tensorrt.library import Library
from specrt.engines.tensorrt.record import FORMAT, EngineRecord, Profile, Setting
from specrt.errors import BuildError
from specrt_export.compile.tensorrt.cache import SUFFIX, TimingCache
from specrt_export.compile.tensorrt.memory import (
    Need,
    Room,
    check_memory,
    find_room,
    need,
    weights_of,
)
from specrt_export.compile.tensorrt.monitor import Progress, Watch, interruptible, monitor
from specrt_export.compile.tensorrt.network import Contract, check_graph, contract, parse
from specrt_export.compile.tensorrt.options import RTX, PlanOptions, check_options, configure
from specrt_export.compile.tensorrt.place import written_aside
from specrt_export.compile.tensorrt.profiles import add_profiles
from specrt_export.compile.tensorrt.report import compiled, highlights, read_header, weight_bytes
from specrt_export.compile.tensorrt.write import Written, write_plan


@dataclass(frozen=True)
class PlanReport:
    """A plan that was built."""

    record: EngineRecord
    """What goes into `engine.json`."""
    needed: Need
    """The memory it was expected to take."""
    seconds: float
    timing_cache: str
    """What became of the timing cache, or why there is none."""


def build_plan(
    graph: Path,
    out: Path,
    library: Library,
    profiles: Sequence[Profile],
    options: PlanOptions,
    progress: Progress,
    *,
    form: str = "native",
    cancelled: Callable[[], bool] = lambda: False,
    room: Room | None = None,
    timing_cache: Path | None = None,
) -> PlanReport:
    """Build the plan of a lowered graph whose weights lie beside it.

    `form` is that of the graph, as in `EngineRecord`. `room` is this machine's memory unless given.
    The timing cache lies beside the plan unless told otherwise.
    Raises: BuildError, `CancelledError` among them; KeyboardInterrupt after Ctrl-C, at the end of a
    step. `out` is then as it was.
    """
    began = time.monotonic()
    check_options(options, library, gpu=not survey().problem)
    model = _read(graph)
    attentions = check_graph(model)
    weights = weights_of(model.graph.initializer)
    needed = need(weights, profiles, options, library.backend)
    check_memory(needed, weights, profiles, library.backend, room or find_room())
    watch = Watch(progress, tuple(profile.name for profile in profiles), cancelled)
    cache = TimingCache(library, timing_cache or out.with_suffix(SUFFIX))
    job = _Job(graph, library, tuple(profiles), options, form, watch, cache)
    with interruptible(watch):
        record = job.run(out, attentions)
    progress("plan built", 1.0)
    return PlanReport(record, needed, time.monotonic() - began, cache.note)


def _read(graph: Path) -> onnx.ModelProto:
    try:
        return onnx.load(graph, load_external_data=False)
    except Exception as error:  # the library passes on whatever its parser raises
        raise BuildError(
            f"{graph} is not an ONNX graph ({type(error).__name__}); make it again with "
            "`specrt build RECIPE`"
        ) from error


@dataclass(frozen=True)
class _Job:
    """One build: what takes long runs here, and Ctrl-C stops it."""

    graph: Path
    library: Library
    profiles: tuple[Profile, ...]
    options: PlanOptions
    form: str
    watch: Watch
    cache: TimingCache

    def run(self, out: Path, attentions: int) -> EngineRecord:
        """Parse, check, compile and write; return what was made."""
        with self.library.messages() as log:
            module = self.library.module
            builder = module.Builder(self.library.logger)
            network = builder.create_network(_network_flags(module))
            offered = self._parse(network, attentions)
            config = builder.create_builder_config()
            configure(config, module, self.options)
            add_profiles(builder, config, offered.batch, self.profiles)
            seen = monitor(module, self.watch)  # kept here: the builder does not
            config.progress_monitor = seen
            self.cache.attach(config)
            with written_aside(out) as file:
                written = write_plan(
                    self.library, builder, network, config, file, self.watch, self.options
                )
                self.watch.check()
            self.cache.keep(config)
        return self._record(offered, log.messages, written)

    def _parse(self, network: Any, attentions: int) -> Contract:
        self.watch.start("parse", 1)
        parse(self.library, network, self.graph)
        self.watch.finish("parse")
        self.watch.check()
        offered = contract(network, self.form, attentions)
        if offered.candidates != self.options.candidates:
            raise BuildError(
                f"{self.graph} cuts out {offered.candidates} candidates a row; the recipe says "
                f"{self.options.candidates}: lower it again"
            )
        return offered

    def _record(self, offered: Contract, messages: list[Message], written: Written) -> EngineRecord:
        settings = self.options.settings().items()
        found = survey()
        # What tensorrt-rtx builds is not for the GPU of the machine that builds it.
        used = found.gpus[:1] if self.library.backend != RTX else ()
        return EngineRecord(
            format=FORMAT,
            backend=self.library.backend,
            version=self.library.version,
            form=self.form,
            compute=offered.compute,
            profiles=self.profiles,
            candidates=offered.candidates,
            confidence=offered.confidence,
            plan_bytes=written.size,
            sha256=written.sha256,
            weight_bytes=weight_bytes(messages),
            compiled=compiled(messages, self.profiles),
            capabilities=read_header(written.head).capabilities,
            gpu=used[0].name if used else "",
            gpu_capability=used[0].capability if used else "",
            driver=found.driver if used else "",
            settings=tuple(Setting(name, value) for name, value in settings),
            messages=highlights(messages),
        )


def _network_flags(module: Any) -> int:
    """Return the flags of a strongly typed network; later versions know no other."""
    kind = getattr(module, "NetworkDefinitionCreationFlag", None)
    flag = getattr(kind, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)
