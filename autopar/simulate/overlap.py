"""What a software hides behind what it computes, and what queues behind each other on links."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from autopar.cost import Profile
from autopar.runtime.packing import BUCKET_SIZES, BucketSizes
from autopar.simulate.program import Transmission

STOPPING = ("activation", "operator")  # purposes of collectives that the rank does not go on beside
STOPS, APART = "for activations", "for weights"  # in the names of a link's queues


class Sums(Enum):
    """When gradients are summed over ranks, and where.

    EARLY: while the backward pass goes on, from memory that a bucket takes for it: the backward pass waits for earlier
    buckets where too many hold theirs (`MAX_IN_FLIGHT`), as emitted programs do. BUFFERED: the same, from memory that
    is there all the time, for which nothing waits, as in Megatron-LM. LATE: after the backward pass, as DeepSpeed's
    pipeline engine does.
    """

    EARLY = "early"
    BUFFERED = "buffered"
    LATE = "late"


class Overlap(NamedTuple):
    """How a software hides what it sends behind what it computes.

    sums: of gradients. cuts_activations: gathers before products and reductions behind them come in as many chunks as
    there are ranks, each beside the product of another (Wang et al., ASPLOS'23; Transformer Engine's user buffers), so
    that one chunk is left in which nothing is computed. Of products that take as long, as large models' do. casts: the
    master weights are cast where they are used, and each gradient where it is made, as emitted programs do; others keep
    weights in 16 bits, which their optimizer writes. adds: gradients are added to those of earlier microbatches by
    kernels of their own, as emitted programs do; else the products that make them add them up in float32, at the pace
    at which tables of a profile have gradients of weights (gradient accumulation fusion of Megatron-LM). balances:
    attention in a ring first exchanges halves of sequences, so that all ranks have as much of the causal part, as
    emitted programs do; else sequences come so from the input on, as Megatron-LM cuts them. queues_apart: gradients and
    parameters queue by themselves on a level of links, as communicators of their own do, so that what stops a rank does
    not wait behind them; the time in which both are under way is not told. bucket_bytes: of gradients or parameters
    that travel together at most, the large ones too (Megatron-LM's flat buffers); 0 packs as emitted programs do.
    """

    sums: Sums = Sums.EARLY
    cuts_activations: bool = False
    casts: bool = True
    adds: bool = True
    balances: bool = True
    queues_apart: bool = False
    bucket_bytes: int = 0

    @property
    def packing(self) -> BucketSizes:
        """What travels together."""
        return BucketSizes(1 << 62, self.bucket_bytes, self.bucket_bytes) if self.bucket_bytes else BUCKET_SIZES

    def inside(self, sent: Sequence[Transmission]) -> Sequence[Transmission]:
        """Of what an operator sends, what is left."""
        if self.balances or all(one.collective != "ring" for one in sent):
            return sent
        return [one for one in sent if one.collective != "all_to_all"]


AS_EMITTED = Overlap()


class Queues(Enum):
    """What queues behind each other on a level of links; queues of one level share it (`engine.shared`).

    LEVEL: all that is sent. PURPOSE: what stops a rank, and gradients with parameters. AXIS: what is sent along one
    mesh axis: torch's ProcessGroupNCCL has a communicator and a stream for each process group, and the runtime a group
    for each axis; on that stream a collective waits for what the rank has launched before, not for other groups'.
    Gloo's groups have threads of their own, too, but these share the rank's cores, by which CPUs' links are measured.
    """

    LEVEL = "level"
    PURPOSE = "purpose"
    AXIS = "axis"

    def link(self, sent: Transmission, purpose: str) -> str:
        """The queue of what is sent."""
        if self is Queues.AXIS and sent.is_shared:
            return f"{sent.level} axis {sent.axis}"
        if self is Queues.PURPOSE:
            return f"{sent.level} {STOPS if purpose in STOPPING else APART}"
        return sent.level

    def links(self, sent: Transmission) -> tuple[str, ...]:
        """The queues that it may be in."""
        return tuple([self.link(sent, purpose) for purpose in ("activation", "parameter")])


def queues_of(profile: Profile, overlap: Overlap) -> Queues:
    """What queues behind each other where a software runs on a device."""
    if overlap.queues_apart:
        return Queues.PURPOSE
    return Queues.AXIS if profile.device_type == "cuda" else Queues.LEVEL
