"""How long a served model's steps take by its batch: plain frozen data, for who packs models on devices.

tokens a second = batch / decode step        in the steady state, when every sequence gets a token each step
a batch holds a bound where the upper end of its steps' 90% interval, times the tail, does; where the profile says
nothing of how sure it is, the predicted step times the tail. tail: how much longer the slowest of a hundred steps
takes than is predicted, on hosts that others share, as measured there; 1 where steps take what they take
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError


@dataclass(frozen=True)
class StepLatency:
    """A predicted step. interval_ns: nine of ten runs end in it; None where the profile does not say."""

    predicted_ns: int
    interval_ns: tuple[int, int] | None = None

    @property
    def upper_ns(self) -> int:
        """What is held against a bound."""
        return self.predicted_ns if self.interval_ns is None else max(self.predicted_ns, self.interval_ns[1])


@dataclass(frozen=True)
class BatchLatency:
    """Of one batch: a decode step, a prefill step by its prompt length, bytes a device; refusal: why it is not served.

    layout: of the ranks, such as "dp=2 × tp=2".
    """

    batch: int
    decode: StepLatency | None = None
    prefill: Mapping[int, StepLatency] = field(default_factory=dict)
    peak_bytes: int = 0
    layout: str = ""
    refusal: str = ""

    @property
    def tokens_s(self) -> float:
        """Tokens a second, all sequences together; 0 where it is not served."""
        return self.batch / (self.decode.predicted_ns / 1e9) if self.decode is not None else 0.0

    def holds(self, decode_ns: float | None, prefill_ns: float | None = None, tail: float = 1.0) -> bool:
        """Whether no step takes longer than its bound; None for no bound."""
        if self.decode is None:
            return False
        slowest = max((step.upper_ns for step in self.prefill.values()), default=0)
        return (decode_ns is None or tail * self.decode.upper_ns <= decode_ns) and (
            prefill_ns is None or tail * slowest <= prefill_ns
        )


@dataclass(frozen=True)
class LatencyCurve:
    """Batches of one model on one mesh, growing."""

    points: tuple[BatchLatency, ...]

    def largest(
        self, latency_bound_ms: float | None, prefill_bound_ms: float | None = None, tail: float = 1.0
    ) -> BatchLatency:
        """The largest batch that is served with every step within its bound. Raises InfeasibleError where there is
        none, naming the shortest step that there is."""
        decode_ns, prefill_ns = (None if ms is None else ms * 1e6 for ms in (latency_bound_ms, prefill_bound_ms))
        held = [point for point in self.points if point.holds(decode_ns, prefill_ns, tail)]
        if held:
            return held[-1]
        served = [point for point in self.points if point.decode is not None]
        if not served:
            why = self.points[0].refusal if self.points else "none was asked for"
            raise InfeasibleError(f"no batch is served: {why}")
        best = min(served, key=lambda point: point.decode.upper_ns if point.decode else 0)
        assert best.decode is not None
        prompts = ", ".join(f"{step.upper_ns / 1e6:.3g} ms for prompts of {n}" for n, step in best.prefill.items())
        raise InfeasibleError(
            f"expected a decode step within {latency_bound_ms} ms and a prefill step within {prefill_bound_ms} ms, "
            f"found {best.decode.upper_ns / 1e6:.3g} ms and {prompts or 'none'} at least, with a batch of {best.batch}"
            f"{'' if tail == 1.0 else f', and {tail:g} times that in the slowest of a hundred'}; "
            "raise the bound, take more or faster devices, or shorter prompt_lengths (longer prompts go in chunks)"
        )
