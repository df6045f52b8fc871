"""Megatron-LM's pipeline stages: how many chunks a rank has, and how many layers each stage."""

from __future__ import annotations

from autopar.auditing.job import ModelSizes, divisors
from autopar.auditing.stages import in_chunks, laid_out, with_ends
from autopar.auditing.taking import Taker

BY_HAND = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "standalone-embedding-stage",
            "pipeline-model-parallel-layout")  # fmt: skip
"""Arguments that say stages one by one."""
_A_CHUNK = "num-layers-per-virtual-pipeline-stage"
_CHUNKS = "num-virtual-stages-per-pipeline-rank", "virtual-pipeline-model-parallel-size"


Stages = tuple[int, tuple[int, ...] | None, tuple[int, int] | None]
"""Chunks of a rank, layers of each stage where they are said, and as how many layers the ends count."""


def stages_said(taker: Taker, pp: int, model: ModelSizes | None) -> Stages:
    """What the arguments say of stages, all of which count as read."""
    first, last = (taker.whole("stages", name, least=0) for name in BY_HAND[:2])
    is_alone = taker.true("stages", BY_HAND[2])
    layout = taker.given(BY_HAND[3])
    before, behind = (taker.true("stages", f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss"))
    a_chunk, chunks = taker.whole("chunks", _A_CHUNK), taker.whole("chunks", *_CHUNKS)
    if pp == 1:
        return 1, None, None
    if layout is not None:
        return _laid_out(taker, str(layout.value), pp, model)
    if model is None:
        return chunks or 1, None, None
    if a_chunk and chunks:
        taker.fault("chunks", f"--{_A_CHUNK} or --{_CHUNKS[0]}", "both", "leave one out", _A_CHUNK, *_CHUNKS)
    if is_alone or first is not None or last is not None:
        if a_chunk and not chunks:
            taker.fault("chunks", f"--{_CHUNKS[0]} where stages have layers of their own", f"--{_A_CHUNK}",
                        f"say --{_CHUNKS[0]}", _A_CHUNK)  # fmt: skip
        ends = 0 if is_alone else first, last
        return chunks or 1, _uneven(taker, model.layers, pp, chunks or 1, ends), None
    weights = int(before), int(behind)
    chunks = chunks or _chunks(taker, (model.layers + sum(weights)) // pp, a_chunk)
    if chunks > 1 and pp == 2 and taker.given("no-overlap-p2p-communication"):
        taker.fault("interleaved schedule", "more than two stages without overlapped sends", pp,
                    "take out --no-overlap-p2p-communication", "no-overlap-p2p-communication")  # fmt: skip
    return chunks, None, weights if any(weights) else None


def _laid_out(taker: Taker, text: str, pp: int, model: ModelSizes | None) -> Stages:
    sizes = laid_out(text)
    if len(sizes) % pp or (model is not None and sum(sizes) != model.layers):
        expected = f"a multiple of {pp} stages with {model.layers if model else 'all'} layers"
        taker.fault("layout", expected, f"{len(sizes)} with {sum(sizes)}", "say as many", BY_HAND[3])
    return max(1, len(sizes) // pp), sizes, None


def _chunks(taker: Taker, of_rank: int, layers: int | None) -> int:
    """How many chunks of so many layers a rank has."""
    if layers is None:
        return 1
    if of_rank % layers:
        chosen = ", ".join(map(str, divisors(of_rank)))
        taker.fault("chunks", f"a number of layers that divides the {of_rank} of a stage", layers,
                    f"one of {chosen}", _A_CHUNK)  # fmt: skip
    return max(1, of_rank // layers)


def _uneven(
    taker: Taker, layers: int, pp: int, chunks: int, ends: tuple[int | None, int | None]
) -> tuple[int, ...]:  # fmt: skip
    """Layers of each stage where those of the ends are said."""
    of_ranks = with_ends(layers, pp, *ends)
    sizes = of_ranks and in_chunks(of_ranks, chunks)
    if sizes is None:
        said = " and ".join(str(end) for end in ends if end is not None)
        taker.fault(
            "stages", f"layers that the stages share evenly, {chunks} chunks each, beside those of the ends",
            f"{layers} layers with {said} at the ends of {pp} stages", "other numbers at the ends", *BY_HAND, *_CHUNKS,
        )  # fmt: skip
        return (layers,) * pp * chunks
    return sizes
