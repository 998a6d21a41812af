"""The colours of pages and pictures as CSS: for each kind of sub-stage, each cause of a bubble and each pipeline."""

from collections.abc import Collection

from jigsawrl.telemetry.colours import hex_colour, hue_of

_Shade = tuple[float, float, float, float]
"""Lightness on white and on black, chroma, hue."""

KINDS: dict[str, _Shade] = {
    "prefill": (0.52, 0.58, 0.14, 275),
    "decode": (0.67, 0.66, 0.13, 245),
    "tail": (0.84, 0.46, 0.08, 222),
    "logprob": (0.68, 0.66, 0.12, 165),
    "grad": (0.74, 0.72, 0.15, 62),
    "optim": (0.56, 0.56, 0.15, 35),
    "tool": (0.70, 0.64, 0.14, 325),
    "reward": (0.82, 0.52, 0.09, 345),
    "sync": (0.63, 0.60, 0.02, 255),
    "swap": (0.44, 0.76, 0.03, 300),
}
"""A rollout is blue, training orange, waiting pink, moving state grey. What leaves room stands out least."""

CAUSES: dict[str, _Shade] = {
    **{cause: KINDS[cause] for cause in ("tail", "tool", "sync", "swap")},
    "dependency": (0.86, 0.60, 0.13, 95),
    "empty queue": (0.90, 0.36, 0.01, 255),
}
"""A cause that is a sub-stage too has its colour."""

BUSY: _Shade = (0.62, 0.62, 0.12, 152)
_PIPELINE = (0.58, 0.74, 0.16)


def css_name(name: str) -> str:
    """As part of a class name."""
    return name.replace(" ", "-")


def legend(kinds: Collection[str], bubbles: Collection[str]) -> list[tuple[str, str]]:
    """CSS classes and names: of these sub-stages, and of these causes of bubbles that have a colour of their own."""
    causes = [cause for cause in CAUSES if cause in bubbles and cause not in kinds]
    shown = [(f"k-{kind}", kind) for kind in KINDS if kind in kinds]
    return shown + [(f"c-{css_name(cause)}", f"{cause} (bubble)") for cause in causes]


def style(pipelines: int) -> str:
    """The classes of all kinds and causes and of so many pipelines, for light and dark."""
    return f"{_classes(pipelines, 0)}@media(prefers-color-scheme:dark){{{_classes(pipelines, 1)}}}"


def _classes(pipelines: int, mode: int) -> str:
    shades = {f"k-{kind}": shade for kind, shade in KINDS.items()}
    shades |= {f"c-{css_name(cause)}": shade for cause, shade in CAUSES.items()} | {"c-busy": BUSY}
    fills = {name: hex_colour(shade[mode], *shade[2:]) for name, shade in shades.items()}
    inks = {index: hex_colour(_PIPELINE[mode], _PIPELINE[2], hue_of(index)) for index in range(pipelines)}
    return "".join(
        [f".{name}{{fill:{colour};background:{colour}}}" for name, colour in fills.items()]
        + [f".p{index}{{color:{colour}}}" for index, colour in inks.items()]
    )
