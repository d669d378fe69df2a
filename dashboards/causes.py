"""Causes in words: what each is, how it shows, what helps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.view import slot_words

KIND_WORDS = {"fp8": "FP8", "not-fp8": "not FP8", "hardware": "hardware"}
"""What a cause is, told apart in words and not by colour alone."""
KIND_TONES = {"fp8": "unstable", "not-fp8": "watch", "hardware": "fallback"}
KIND_MEANINGS = {
    "fp8": "the format or its scales do the harm: another precision or scale helps",
    "not-fp8": "BF16 would suffer alike: the precision stays as it is, and people are told",
    "hardware": "one rank or host measures what the others do not: the precision stays as it is",
}


@dataclass(frozen=True, kw_only=True)
class CauseText:
    """What is known of one cause."""

    title: str
    kind: str
    """fp8, not-fp8 or hardware."""
    fingerprint: str
    """What it shows, and what it does not."""
    helps: str
    """What is done about it, or what people can do."""


def _fp8(title: str, fingerprint: str, helps: str) -> CauseText:
    return CauseText(title=title, kind="fp8", fingerprint=fingerprint, helps=helps)


def _other(title: str, fingerprint: str, helps: str) -> CauseText:
    return CauseText(title=title, kind="not-fp8", fingerprint=fingerprint, helps=helps)


CAUSES: dict[str, CauseText] = {
    "outlier-channels": _fp8(
        "outlier channels",
        "x in rows and w in tiles vanish together while their SQNR stays healthy: a few channels carry the energy, and the "
        "others of their blocks go to zero; or the gain of a norm has grown and the weight behind it makes up for it",
        "the cheapest scale or format whose what-if is healthy, else BF16 for fprop and dgrad; a gain that its weight makes "
        "up for is folded into the weight, which changes no result",
    ),
    "scale-too-small": _fp8(
        "scale too small",
        "elements saturate, which block scales never do by themselves",
        "a neutral multiplier, or another margin or amax history; else what reads the operand runs in BF16",
    ),
    "scale-too-large": _fp8(
        "scale too large",
        "elements or whole rows vanish, and SQNR or cosine with them, while their own magnitudes are as before",
        "a neutral multiplier, or another margin or amax history; else what reads the operand runs in BF16",
    ),
    "stuck-scale": _fp8(
        "stuck scale",
        "as a scale that is too small or too large, of an operand whose delayed scale has not moved while its amax has",
        "another amax history; a person looks at why the scale is not updated",
    ),
    "stale-inverse-scale": _fp8(
        "stale inverse scale",
        "the result of a GEMM is wrong and what it reads is healthy; with a cosine of 1 it is a multiple of the right one",
        "BF16 for that GEMM, for no scale or format of its operands heals it; a person looks at where scales are handed over",
    ),
    "flushed-gradients": _fp8(
        "flushed gradients",
        "rows of dy vanish whole, and what is left is exact, or nothing is: an amax floor lies under the block scales",
        "a smaller multiplier of dy where a what-if shows that it helps, else BF16 for dgrad and wgrad",
    ),
    "nonfinite-origin": _fp8(
        "non-finite values",
        "NaN or Inf begin in one place, upstream of every other; not FP8's where what the GEMM reads, or the weight, is "
        "non-finite already, or where the GEMM runs in a higher precision",
        "one sample only alerts; two in a row put the GEMMs at the origin into BF16. Where no precision helps: look at the "
        "batch, or go back to a checkpoint",
    ),
    "fluctuating": _fp8(
        "fluctuating gradients",
        "the gradient distortion of some layers goes far beyond the healthy one and comes back, several times in a few samples",
        "read the heatmap of gradient distortion, then smooth the gradients of the layers named: opt-in, for there is no "
        "published evidence",
    ),
    "norm-gain": _other(
        "norm gain too large",
        "the largest gain of a norm is a multiple of its own median, and what it feeds is larger by as much in any precision",
        "set the gain to the value proposed, or go back to an earlier checkpoint",
    ),
    "token-imbalance": _other(
        "token-imbalanced gradients",
        "dy vanishes along tokens in several layers, but not along features, and the recomputed gradients are right",
        "look at the loss weights of the tokens, and at masked or repeated ones",
    ),
    "qk-growth": _other(
        "growing QK logits",
        "the largest attention logit, or the gain of a norm of q or k, lies far above its median, and the GEMMs are right",
        "rescale the weights or gains of q and k, clip them (QK-Clip), or lower the learning rate",
    ),
    "data-spike": _other(
        "data spike",
        "the loss jumps and the gradients or activations of all layers with it, while the recomputed GEMMs are right",
        "look at the batches since then; skip them and go on from a checkpoint before",
    ),
    "loss-spike": _other(
        "loss spike",
        "the loss jumps alone: neither the layers together nor a GEMM explain it",
        "lower the learning rate, or go back to a checkpoint and skip the batches",
    ),
    "starved-expert": _other(
        "starved expert",
        "an expert that had its share gets no token any more, and the GEMMs are right",
        "look at the router's bias and its balancing",
    ),
    "dead-layer": _other(
        "dead layer",
        "the input of a layer that was alive is all zeros, before quantisation",
        "look at the gain of the norm before it, and at what else feeds it",
    ),
    "gradient-norm-growth": _other(
        "growing gradient norm",
        "the gradient norm rises over many samples, far above what it was for long; one large norm, or one that is no number, "
        "is none",
        "lower the learning rate or the clipping norm before it diverges: later it only delays",
    ),
    "one-rank": CauseText(
        title="one rank alone",
        kind="hardware",
        fingerprint="a recomputed GEMM is wrong on one rank or host, and by far less on all together",
        helps="take that host out and test it: ECC errors, row remapping, XID messages, throttling",
    ),
}
"""By the stable names that decisions carry."""


@dataclass(frozen=True, kw_only=True)
class CauseView:
    """One cause as the pages and the command line tell it."""

    name: str
    title: str
    kind: str
    kind_words: str
    kind_meaning: str
    tone: str
    place: str
    """Layer and slot where it shows first; empty for the whole run."""
    summary: str
    advice: str
    value: str
    """A proposed value, in words; empty where there is none."""
    href: str


def cause_of(decision: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The cause that a decision carries in its evidence, if any."""
    cause = (decision.get("evidence") or {}).get("cause")
    return cause if isinstance(cause, Mapping) and cause.get("name") else None


def remedy_of(decision: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells the decisions of one remedy apart from others; None for a decision that stands alone."""
    remedy = (decision.get("evidence") or {}).get("remedy")
    if remedy is None:
        return None
    name = remedy.get("id", remedy.get("name")) if isinstance(remedy, Mapping) else remedy
    return (decision.get("step"), str(name))


def cause_view(cause: Mapping[str, Any]) -> CauseView:
    """A cause in words; one that this page does not know keeps its name."""
    name, kind = str(cause["name"]), str(cause.get("kind") or "")
    known = CAUSES.get(name)
    value = cause.get("value")
    return CauseView(
        name=name,
        title=known.title if known else name.replace("-", " "),
        kind=kind,
        kind_words=KIND_WORDS.get(kind, kind),
        kind_meaning=KIND_MEANINGS.get(kind, ""),
        tone=KIND_TONES.get(kind, "unknown"),
        place=_place(cause),
        summary=str(cause.get("summary") or ""),
        advice=str(cause.get("advice") or ""),
        value=f"proposed value {value:.4g}" if isinstance(value, int | float) else "",
        href=f"/causes#{name}" if known else "/causes",
    )


def cause_words(cause: Mapping[str, Any]) -> str:
    """A cause in a few words: "outlier channels (FP8)"."""
    view = cause_view(cause)
    return f"{view.title} ({view.kind_words})" if view.kind_words else view.title


def _place(cause: Mapping[str, Any]) -> str:
    slot = cause.get("slot")
    where = slot_words(slot) if isinstance(slot, Mapping) else ""
    layer = cause.get("layer") or (slot.get("layer") if isinstance(slot, Mapping) else None)
    return f"{str(layer)!r} {where}".strip() if layer else ""
