"""What a process takes of a GPU's memory where its tensors take so much, and how sure that is.

taken = segments(fragmentation · allocated) + context + workspaces + buffers of each communicator

PyTorch's caching allocator asks the device for segments, and blocks of other sizes than those that were freed find no
place in them; what it knows nothing of comes beside: the CUDA context with its kernels, cuBLAS's workspaces of the
forward and the backward thread, and NCCL's buffers. A device that is nearly full is slow long before it is out of
memory: the allocator gives segments back and asks again, step after step, each time with the host waiting for the
device. Plans in that margin are left out, unless a larger limit is asked for; then they are priced:

refilling = refill_ns · microbatches        where more is allocated than `usable_bytes`

That is what runs in the margin lost at most, not what each of them loses: nothing that is predicted of memory tells
those that do from those that do not. So it is beside the step, in the upper end of its interval, and the search takes
a plan in the margin only where it is faster with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.provenance import Provenance

SEGMENT_BYTES = 2 << 20  # the caching allocator asks for multiples of it
#: what a plan may use at most: groups of ranks of data, tensor and pipeline parallelism, and one of all. Limits are
#: found before a plan is, so they leave room for these
MOST_COMMUNICATORS = 4
MOST_RUNS = 2.0537  # standard deviations above which 2% of a normal distribution lie


@dataclass(frozen=True)
class DeviceMemory:
    """What the sum at the top is made of, and how sure it is.

    fragmentation: what the allocator has asked for at the peak, over what is allocated then. tight_share: the part of
    the device above which steps are slow. spread: standard deviation of log(measured / predicted) of what is taken.
    refill_ns: what each microbatch may take longer there, 0 where that is not known.
    """

    context_bytes: int
    workspace_bytes: int
    communicator_bytes: int
    fragmentation: float
    tight_share: float
    spread: float
    provenance: Provenance
    refill_ns: int = 0

    def reserved_bytes(self, allocated_bytes: int) -> int:
        """What the allocator holds of the device where so much is allocated at the peak, in whole segments."""
        held = round(allocated_bytes * self.fragmentation) + self.workspace_bytes
        return -(-held // SEGMENT_BYTES) * SEGMENT_BYTES

    def outside_bytes(self, num_communicators: int) -> int:
        """What a process takes of the device that its allocator does not know of."""
        return self.context_bytes + num_communicators * self.communicator_bytes

    def taken_bytes(self, allocated_bytes: int, num_communicators: int = MOST_COMMUNICATORS) -> int:
        """What is to be compared with the device's capacity."""
        return self.reserved_bytes(allocated_bytes) + self.outside_bytes(num_communicators)

    def tight_bytes(self, capacity_bytes: int) -> int:
        """What may be taken of a device of that capacity before it is tight."""
        return int(capacity_bytes * self.tight_share)

    def usable_bytes(self, capacity_bytes: int) -> int:
        """The most that may be allocated on a device of that capacity, so that it is not tight."""
        left = self.tight_bytes(capacity_bytes) - self.outside_bytes(MOST_COMMUNICATORS)
        segments = max(0, left) // SEGMENT_BYTES * SEGMENT_BYTES - self.workspace_bytes
        return max(0, int(segments / self.fragmentation))

    def refilling_ns(self, allocated_bytes: int, capacity_bytes: int, microbatches: int) -> int:
        """What a step of so many microbatches may take longer, where so much is allocated at the peak, since segments
        are given back and asked for again; 0 out of the margin."""
        return microbatches * self.refill_ns if allocated_bytes > self.usable_bytes(capacity_bytes) else 0

    def needed_bytes(self, taken_bytes: int, spread: float | None = None) -> int:
        """What 98 of 100 plans stay below that are predicted to take so much. spread: the device's, where not given."""
        return round(taken_bytes * math.exp(MOST_RUNS * (self.spread if spread is None else spread)))

    def fits_probability(self, taken_bytes: int, capacity_bytes: int, spread: float | None = None) -> float:
        """How likely what is predicted to take so much leaves a device of that capacity out of the margin in which it
        is slow, or out of memory: of measured runs in it half did not finish. To four digits."""
        if taken_bytes <= 0:
            return 1.0
        room = math.log(capacity_bytes * self.tight_share / taken_bytes) / (self.spread if spread is None else spread)
        return round(0.5 * math.erfc(-room / math.sqrt(2)), 4)
