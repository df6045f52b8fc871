"""What ranks take at their highest point in random plans is what was predicted, or less: one plan for each thing that
such plans do, and plans that people run do not."""

from __future__ import annotations

import pytest

from tests.equivalence.peaks import peaks
from tests.rank_pool import pool

PLANS = {
    "each rank takes its query heads' keys out of grouped ones": ("llama-small", 13),
    "reshapes copy what a conversion has laid anew": ("moe-small", 3),
    "constants are converted once, and stay": ("bert-small", 3),
    "slices of what runs again share its memory": ("llama-small", 4),
    "what runs again and is sent is waited for": ("wide_resnet-small", 1),
    "convolutions keep their part with its borders": ("wide_resnet-wide", 15),
    "group norms of split images keep what is centred": ("unet", 31),
    "gradients of shards that are stored whole are packed": ("wide_resnet-small", 13),
    "gradients are exchanged for other shards while the rank stops": ("moe-wide", 15),
    "results lie as converted queries do, also where a conversion moves nothing": ("gpt-small", 61),
    "what is used as it is stored is sent from another use, too": ("gpt-long", 63),
}
PLANS_OF_FOUR = {
    "a slice of one expert is multiplied without a copy, and keeps the whole": ("moe-small", 51),
    "three rows that four ranks store are gathered as four": ("wide_resnet-small", 51),
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", [*PLANS, *PLANS_OF_FOUR])
def test_no_rank_takes_more_than_predicted(what: str) -> None:
    name, number = (PLANS | PLANS_OF_FOUR)[what]
    found = list(peaks(name, 1, number, pool(4 if what in PLANS_OF_FOUR else 2)))
    assert len(found) == 1
    assert found[0].short_bytes <= 0 and found[0].predicted_bytes < 1.1 * found[0].measured.peak_bytes, str(found[0])
