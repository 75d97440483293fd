"""Peak compute rates and memory bandwidths of GPUs, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DevicePeak:
    """Peak rates of a GPU.

    name: a part of the driver's name for it. bfloat16: dense matrix products in bf16 with fp32 accumulation (fp16 where
    the GPU has no bf16), in TFLOP/s. float32: the same in fp32 without TF32. bandwidth: of its memory, in TB/s.
    """

    name: str
    bfloat16: float
    float32: float
    bandwidth: float

    def flops(self, dtype: str) -> float:
        """Returns the peak rate in floating-point operations a second. dtype: "bfloat16" or "float32"."""
        return 1e12 * (self.bfloat16 if dtype == "bfloat16" else self.float32)


# By the names of the option --gpu. The first entry whose `name` is in the driver's name counts, so "A100-SXM4-40GB"
# comes before "A100".
PEAKS = {
    "t4": DevicePeak("T4", 65.0, 8.1, 0.32),
    "v100": DevicePeak("V100", 125.0, 15.7, 0.9),
    "rtx3090": DevicePeak("RTX 3090", 71.0, 35.6, 0.936),
    "rtx4090": DevicePeak("RTX 4090", 165.2, 82.6, 1.008),
    "rtx5090": DevicePeak("RTX 5090", 209.5, 104.8, 1.792),
    "l40s": DevicePeak("L40S", 362.0, 91.6, 0.864),
    "l4": DevicePeak("L4", 121.0, 30.3, 0.3),
    "a100-40": DevicePeak("A100-SXM4-40GB", 312.0, 19.5, 1.555),
    "a100": DevicePeak("A100", 312.0, 19.5, 2.039),
    "a10": DevicePeak("A10", 125.0, 31.2, 0.6),
    "a6000": DevicePeak("A6000", 154.8, 38.7, 0.768),
    "h100": DevicePeak("H100", 989.4, 66.9, 3.35),
    "h200": DevicePeak("H200", 989.4, 66.9, 4.8),
    "b200": DevicePeak("B200", 2250.0, 80.0, 8.0),
}


def peak_of(name: str) -> DevicePeak | None:
    """Returns the peak rates of a GPU by the driver's name; None where they are unknown. PCIe versions count as
    unknown: they are slower than the SXM modules of the table."""
    return next((peak for peak in PEAKS.values() if peak.name in name and "PCIe" not in name), None)


def device_flops(dtype: str) -> float | None:
    """Returns the peak operations a second of this process's GPU; None on a CPU and on a GPU that is not known."""
    peak = peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if peak is None else peak.flops(dtype)
