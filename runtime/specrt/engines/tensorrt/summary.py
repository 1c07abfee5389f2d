"""A plan in a few lines, for `specrt inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from specrt.engines.tensorrt.record import Compiled, EngineRecord, Profile

_MIB = 1 << 20


def summary(record: EngineRecord) -> list[tuple[str, str]]:
    """Return names and values, in the order to be shown."""
    return list(_lines(record))


def _lines(record: EngineRecord) -> Iterator[tuple[str, str]]:
    yield "library", f"{record.backend} {record.version}"
    form = "KV buffers in place" if record.form == "native" else "whole new KV buffers each pass"
    yield "form", f"{record.form} ({form}), {record.compute}"
    if record.plan_bytes:
        yield (
            "plan",
            f"{_mib(record.plan_bytes)}, of which {_mib(record.weight_bytes)} weights",
        )
    if record.capabilities:
        yield "compute capabilities", ", ".join(record.capabilities)
    for setting in record.settings:
        if setting.name != "capabilities" or not record.capabilities:
            yield setting.name, setting.value
    compiled = {one.profile: one for one in record.compiled}
    for profile in record.profiles:
        yield f"profile {profile.name}", _profile(profile, compiled.get(profile.name))
    for message in record.messages:
        yield "warning", message


def _profile(profile: Profile, compiled: Compiled | None) -> str:
    width = str(profile.width.least)
    if not profile.width.fixed:
        width += f" to {profile.width.most}, best {profile.width.best}"
    if compiled is None:
        return f"width {width}"
    text = (
        f"width {width}; {compiled.launches} kernels, {compiled.attention} attention, "
        f"{_mib(compiled.activation_bytes)} working memory"
    )
    many = compiled.dequantising
    return text + (f"; {many} kernels that only dequantise a weight" if many else "")


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
