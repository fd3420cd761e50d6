"""The GPUs that can be estimated for, one row each: all that an estimate knows of the hardware."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.core.costs.precision import BF16, Format, Precision


@dataclass(frozen=True)
class Device:
    """The assumed performance of an accelerator.

    Attributes:
        tflops: dense peak in bf16, in 10^12 operations per second.
        efficiency: the share of it that matrix products reach.
        memory_tbs: memory bandwidth in TB/s.
        link_gbs, latency_ms: a transfer between neighbours takes ``latency_ms`` plus its bytes at ``link_gbs`` GB/s.
        node_gbs, network_gbs: GB/s that a rank sends in collectives, to the GPUs of its domain and to all others.
        fp8_tflops, fp4_tflops: dense peaks in the same unit; None if its matrix units have no such format.
        memory_gib: its memory in GiB, as drivers report it.
        domain: GPUs whose links are faster than the network (NVLink, xGMI): those of a node, or of a rack.
        multiprocessors: streaming multiprocessors, or compute units.
        capability: the first number of its compute capability, as torch reports it.
        pace: factor by which passes take longer than all that says; 1 unless a run has been measured.
    """

    name: str
    tflops: float
    memory_tbs: float
    efficiency: float
    link_gbs: float
    latency_ms: float = 0.3
    node_gbs: float = 230.0
    network_gbs: float = 25.0
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    memory_gib: int = 80
    domain: int = 8
    multiprocessors: int = 108
    capability: int = 8
    pace: float = 1.0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tflops:g} TFLOPS at {self.efficiency / self.pace:.0%} in matrix products, memory "
            f"{self.memory_tbs:g} TB/s, transfers {self.latency_ms:g} ms + bytes at {self.link_gbs:g} GB/s"
        )

    def supported(self, precision: Precision) -> Precision:
        """The precision in which it computes what is asked for in ``precision``."""
        return precision if self._peaks[precision.format] is not None else BF16

    def peak(self, precision: Precision) -> float:
        """The dense peak of its linear layers, in TFLOPS."""
        return self._peaks[self.supported(precision).format] or self.tflops

    def reached(self, precision: Precision) -> float:
        """What products of linear layers reach, in TFLOPS."""
        return self.peak(precision) * self.efficiency * self.supported(precision).share

    def collective_gbs(self, ranks: int) -> float:
        """GB/s that a rank sends in a collective of so many adjacent ranks."""
        return self.node_gbs if ranks <= self.domain else self.network_gbs

    @property
    def _peaks(self) -> dict[Format, float | None]:
        return {"bf16": self.tflops, "fp8": self.fp8_tflops, "fp4": self.fp4_tflops}


NODE = 8
"""The GPUs of the largest node; domains with more are racks of nodes."""
# Peaks and memory are from the vendors' data sheets (docs/estimates.md names them). Of the bandwidth of links in one
# direction, collectives reach about three quarters: 340 of 450 GB/s on an H100. The network is one adapter per GPU, of
# 200 Gbit/s (A100), 400, 800 (B300, GB300) or 1,600 (VR200). A transfer between two GPUs of AMD has one of their seven
# links. The efficiency and the link of the A100 are fitted to the 4 nodes of the Zero Bubble paper.
DEVICES = {
    device.name: device
    for device in (
        #      name     bf16    TB/s  share link   ms   domain net   fp8     fp4     GiB  GPUs  SMs  arch
        Device("a100", 312.0, 2.0, 0.80, 100.0, 0.3, 230.0, 25.0, None, None, 80, 8, 108, 8),
        Device("h100", 989.0, 3.35, 0.65, 200.0, 0.1, 340.0, 50.0, 1979.0, None, 80, 8, 132, 9),
        Device("h200", 989.0, 4.8, 0.65, 200.0, 0.1, 340.0, 50.0, 1979.0, None, 141, 8, 132, 9),
        Device("h800", 989.0, 3.35, 0.65, 100.0, 0.1, 155.0, 50.0, 1979.0, None, 80, 8, 132, 9),
        Device("h20", 148.0, 4.0, 0.80, 200.0, 0.1, 340.0, 50.0, 296.0, None, 96, 8, 78, 9),
        Device("b200", 2250.0, 8.0, 0.55, 400.0, 0.1, 680.0, 50.0, 4500.0, 9000.0, 180, 8, 148, 10),
        Device("b300", 2250.0, 8.0, 0.60, 400.0, 0.1, 680.0, 100.0, 4500.0, 13500.0, 268, 8, 148, 10),
        Device("gb200", 2500.0, 8.0, 0.55, 400.0, 0.1, 680.0, 50.0, 5000.0, 10000.0, 185, 72, 152, 10),
        Device("gb300", 2500.0, 8.0, 0.65, 400.0, 0.1, 680.0, 100.0, 5000.0, 15000.0, 277, 72, 152, 10),
        Device("vr200", 4000.0, 22.0, 0.65, 800.0, 0.1, 1360.0, 200.0, 17500.0, 35000.0, 277, 72, 224, 10),
        Device("mi300x", 1307.0, 5.3, 0.45, 50.0, 0.1, 310.0, 50.0, 2615.0, None, 192, 8, 304, 9),
        Device("mi325x", 1307.0, 6.0, 0.45, 50.0, 0.1, 310.0, 50.0, 2615.0, None, 256, 8, 304, 9),
        Device("mi355x", 2517.0, 8.0, 0.55, 60.0, 0.1, 370.0, 50.0, 5033.0, 10066.0, 288, 8, 256, 9),
    )
}
