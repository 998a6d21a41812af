"""Accelerators by their numbers, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jigsawrl.errors import JigsawError

GIB = 2**30
CPU = "cpu"
"""The name of a worker that is a set of cores."""
DEVICE_PART = 0.9
"""Of a GPU's memory that pipelines may fill; the rest goes to contexts, workspaces, and gaps."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One worker: an accelerator, the part of its host that belongs to it, and its links. Bytes and seconds."""

    name: str
    flops: float
    """Of dense 16-bit arithmetic at its peak, a second."""
    memory_bandwidth: float
    """Of the device's memory, at its peak."""
    device_bytes: float
    host_bytes: float
    """Host memory for each worker."""
    link_bandwidth: float
    """To the other workers of its node, one way."""
    host_bandwidth: float
    """Between host and device, pinned, one way."""
    network_bandwidth: float
    """To other nodes, for each worker, one way."""
    price: float
    """Dollars an hour."""
    source: str

    def limited(self, gigabytes: float | None) -> Hardware:
        """With so much of its memory at most."""
        return (
            self if gigabytes is None else replace(self, device_bytes=min(self.device_bytes, 1e9 * gigabytes))
        )


_ALL = (
    Hardware(
        "h100",
        flops=989e12,
        memory_bandwidth=3.35e12,
        device_bytes=80 * GIB,
        host_bytes=256 * GIB,
        link_bandwidth=450e9,
        host_bandwidth=53e9,
        network_bandwidth=50e9,
        price=6.88,
        source="vendor's data sheet (SXM); host link as measured on an H200; price of a large cloud, approximate",
    ),
    Hardware(
        "h200",
        flops=989e12,
        memory_bandwidth=4.8e12,
        device_bytes=139 * GIB,
        host_bytes=256 * GIB,
        link_bandwidth=450e9,
        host_bandwidth=53e9,
        network_bandwidth=50e9,
        price=7.91,
        source="vendor's data sheet; memory and host link (53 GB/s to the device, 55 back) measured; price of a "
        "large cloud, approximate",
    ),
    Hardware(
        "a100",
        flops=312e12,
        memory_bandwidth=2.04e12,
        device_bytes=80 * GIB,
        host_bytes=128 * GIB,
        link_bandwidth=300e9,
        host_bandwidth=24e9,
        network_bandwidth=25e9,
        price=4.10,
        source="vendor's data sheet (80 GB, SXM); host link of PCIe 4 in practice; price of a large cloud, "
        "approximate",
    ),
    Hardware(
        "h20",
        flops=148e12,
        memory_bandwidth=4.0e12,
        device_bytes=96 * GIB,
        host_bytes=256 * GIB,
        link_bandwidth=450e9,
        host_bandwidth=53e9,
        network_bandwidth=50e9,
        price=1.85,
        source="RollMux (arXiv 2512.11306): arithmetic, memory, price, 400 Gb/s inside a cluster; links of its "
        "generation",
    ),
    Hardware(
        "h800",
        flops=989.5e12,
        memory_bandwidth=3.35e12,
        device_bytes=80 * GIB,
        host_bytes=256 * GIB,
        link_bandwidth=200e9,
        host_bandwidth=53e9,
        network_bandwidth=50e9,
        price=5.28,
        source="RollMux (arXiv 2512.11306): arithmetic, memory, price, 400 Gb/s inside a cluster; links of its "
        "generation",
    ),
)

HARDWARE: Mapping[str, Hardware] = {each.name: each for each in _ALL}


def hardware_named(name: str) -> Hardware:
    """A built-in one; upper and lower case are the same."""
    try:
        return HARDWARE[name.lower()]
    except KeyError:
        raise JigsawError(f"hardware {name!r} is not known; there are {', '.join(HARDWARE)}") from None
