"""Colours in Oklab, where equal lightness looks equally light in every hue."""

import math
from collections.abc import Iterator


def hue_of(index: int) -> float:
    """Degrees. Hues a golden angle apart: neighbours differ however many there are."""
    return 255 + 137.508 * index


def hex_colour(lightness: float, chroma: float, hue: float) -> str:
    """The colour as CSS writes it; one that no screen can show is greyed until one can."""
    return "#" + "".join(f"{part:02x}" for part in _bytes(lightness, chroma, math.radians(hue)))


def _bytes(lightness: float, chroma: float, hue: float) -> Iterator[int]:
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    l3 = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m3 = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s3 = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l3 - 3.3077115913 * m3 + 0.2309699292 * s3,
        -1.2684380046 * l3 + 2.6097574011 * m3 - 0.3413193965 * s3,
        -0.0041960863 * l3 - 0.7034186147 * m3 + 1.7076147010 * s3,
    )
    if chroma > 0.001 and not -0.001 <= min(linear) <= max(linear) <= 1.001:
        return _bytes(lightness, 0.95 * chroma, hue)
    return (_gamma(min(1.0, max(0.0, part))) for part in linear)


def _gamma(linear: float) -> int:
    """The byte that sRGB has for a part of the light."""
    return round(255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055))
