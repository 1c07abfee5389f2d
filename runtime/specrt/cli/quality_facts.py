"""What quantizing did to a bundle's models, as `specrt build` and `specrt inspect` say it."""

from __future__ import annotations

from collections.abc import Iterator

from specrt.bundle import Manifest, ModelRecord


def quality_lines(manifest: Manifest) -> Iterator[str]:
    """Yield what quantizing did to each model, and to how often a drafted token is right."""
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is not None:
            yield from (f"{role} {name}: {value}" for name, value in loss_facts(model))
    yield from (f"{name}: {value}" for name, value in acceptance_facts(manifest))


def loss_facts(model: ModelRecord) -> list[tuple[str, str]]:
    """Return how far a model is from its checkpoint, and the bits that were chosen for it."""
    facts = []
    if model.quality is not None:
        kl, top1, tokens = model.quality.kl, model.quality.top1, model.quality.tokens
        told = (
            f"KL divergence {kl:.4f} nats from the checkpoint, same likeliest token in "
            f"{100 * top1:.1f} % of {tokens} positions"
        )
        facts.append(("quality", told))
    elif model.precision == "stored":
        facts.append(("quality", "codes and scales are those of the checkpoint"))
    elif model.precision in ("fp16", "bf16"):
        facts.append(("quality", "not measured; the recipe names no quality.calibration"))
    if model.bits is not None:
        raised = [part for part, name in model.bits.items() if name != "int4"]
        told = f"{len(raised)} of {len(model.bits)} parts are int8, the others int4"
        facts.append(("bits", "; ".join([told, *raised])))
    if model.accepted:
        shares = ", ".join(f"{share:.2f}" for share in model.accepted)
        facts.append(("accepted", f"{shares} of the drafts, by position, on the calibration text"))
    return facts


def acceptance_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what quantizing did to how often a drafted token is right."""
    shares = manifest.acceptance
    if shares is None:
        return []
    told = (
        f"the draft says the target's likeliest token in {100 * shares.after:.1f} % of positions, "
        f"{100 * shares.before:.1f} % before quantizing"
    )
    return [("acceptance", told)]
