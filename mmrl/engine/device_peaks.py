"""Peak rates of devices, by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DevicePeak:
    """Dense operations a second of matrix products in bf16 (fp16 where a device has no bf16) with sums in fp32, and in
    fp32 without TF32, in 1e12; memory bandwidth in 1e12 bytes a second. name: a part of the driver's name for it."""

    name: str
    bfloat16: float
    float32: float
    bandwidth: float

    def flops(self, dtype: str) -> float:
        """Returns operations a second."""
        return 1e12 * (self.bfloat16 if dtype == "bfloat16" else self.float32)


# Names as `--gpu` takes them. More particular names come first: the driver's name decides by the first that fits.
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
    """Returns the peak rates of a device by the driver's name; None where they are not known. A PCIe H100 is slower
    than the SXM module whose rates are here."""
    return next((peak for peak in PEAKS.values() if peak.name in name and "PCIe" not in name), None)


def device_flops(dtype: str) -> float | None:
    """Returns the peak operations a second of this process's GPU; None on a CPU and on a GPU that is not known."""
    peak = peak_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return None if peak is None else peak.flops(dtype)
