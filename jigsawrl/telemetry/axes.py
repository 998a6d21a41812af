"""Round figures along an axis."""

import math

from jigsawrl.telemetry.text import clock


def time_step(least: float) -> float:
    """The smallest round time that is at least this long."""
    short = (digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5) if digit * 10**power < 60)
    long = (60.0 * minutes for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440))
    days = 86400.0 * -(-least // 86400.0)
    return next((step for step in (*short, *long) if step >= least), days)


def time_label(seconds: float, step: float) -> str:
    """A multiple of a round time."""
    return clock(seconds) if step >= 60 else f"{round(seconds, 6):g} s"


def time_ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """Round times from 0 to `seconds` and what to write there."""
    if seconds <= 0:
        return []
    step = time_step(seconds / most)
    return [(index * step, time_label(index * step, step)) for index in range(int(seconds / step) + 1)]


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high`, about `most` at the most, and what to write there."""
    if not low < high:
        return [(low, f"{low:g}")]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(digit * power for digit in (1, 2, 5, 10, 20) if digit * power * most >= high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(index * step, f"{round(index * step, 12):,.6g}") for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """1, 2 and 5 times powers of ten from `low` to `high`; of many only the powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 200 else (1,)
    every = (digit * 10.0**power for power in powers for digit in digits)
    return [(value, f"{value:g}") for value in every if low <= value * 1.000001 and value <= high * 1.000001]
