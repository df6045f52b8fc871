"""What rows of single eager calls time beside the kernel: a pair of events round one call on an idle stream.

The first event passes at once, and half of a call's time on the host goes by before its kernel is launched; the last
event is recorded when the call returns. So a row says max(floor, floor / 2 + kernel): with it, kernels that move bytes
are within 1.5% of a straight line in their bytes on each of three GPUs.
"""

from __future__ import annotations

SOFTWARE = "torch-2.1.0 eager cu121"
#: Microseconds of a call that computes almost nothing, by operator: medians of rows below 256 KiB, and of the hundred
#: least products. Each is of one host with its software, none of a device.
FLOORS_US = {
    "A100-PCIe-40GB": {
        "add": 26.7, "add_scalar": 31.6, "div": 26.6, "gelu": 30.5, "layer_norm": 46.9, "mul": 26.1, "pow": 26.4,
        "relu": 31.4, "softmax": 33.4, "tanh": 25.8, "linear": 55.3, "bmm": 32.3,
    },
    "V100-PCIe-32GB": {
        "add": 32.4, "add_scalar": 37.6, "div": 32.7, "gelu": 38.1, "layer_norm": 58.5, "mul": 32.4, "pow": 32.8,
        "relu": 39.3, "softmax": 41.0, "tanh": 31.9, "linear": 66.0, "bmm": 40.0,
    },
}  # fmt: skip
OTHERS = "A100-PCIe-40GB"  # whose host stands in for those of which no small call was timed
SHOWN = 1.5  # times the floor, from which on a row says how long its kernel took


def floor_ns(gpu: str, op: str, software: str) -> float:
    """Nanoseconds of a call of an operator whose kernel takes no time; 0 for rows of kernels alone."""
    if not software.startswith(SOFTWARE):
        return 0.0
    return 1000 * FLOORS_US.get(gpu, FLOORS_US[OTHERS])[op]


def row_ns(kernel_ns: float, floor: float) -> float:
    """What a row says of such a kernel."""
    return max(floor, floor / 2 + kernel_ns)


def kernel_ns(measured_ns: float, floor: float) -> float | None:
    """The kernel of a row; None where it is hidden behind the host."""
    return measured_ns - floor / 2 if measured_ns > SHOWN * floor else None
