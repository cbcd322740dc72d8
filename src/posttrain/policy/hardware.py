"""Peak throughput of accelerators by their data sheets."""

from __future__ import annotations

# Dense bf16 TFLOP/s. The first name that occurs in the device's name is used.
PEAK_TFLOPS = {
    "GB300": 2450.0,
    "GB200": 2450.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "L4": 121.0,
    "4090": 165.0,
}


def peak_flops(device_name: str) -> float | None:
    return next((tflops * 1e12 for name, tflops in PEAK_TFLOPS.items() if name in device_name), None)
