"""Programs of several stages compute what the model computes, and every rank sends the bytes that were predicted."""

from __future__ import annotations

import pytest

from tests.equivalence import pipelines

#: of each model, plans that between them have every plan and every schedule; `pipelines.main` proves all
SAMPLE = {
    "gpt": [
        *("pp_zero3 1f1b", "pp4 1f1b", "pp_tp interleaved", "pp_few gpipe", "pp4 zero_bubble_v", "pp2_of_3 1f1b"),
        *("pp4_of_6 interleaved_zero_bubble", "pp2_of_6_in_4 interleaved", "submeshes_1_2_1 zero_bubble_v"),
        *("pp_zero3 dualpipev", "pp4 dualpipev"),
    ],
    "llama": ["pp_tp gpipe", "pp_zero2 1f1b", "pp2_of_7_in_3 interleaved_zero_bubble", "pp2_dp2_of_5 zero_bubble"],
    "hf_gpt2": [
        *("pp2 interleaved", "pp_zero1 1f1b", "pp4 gpipe", "pp_tied zero_bubble_v", "pp4_of_6 gpipe"),
        "pp_tied dualpipev",
    ],
    "hf_t5": ["pp_dp 1f1b", "pp2 gpipe", "pp_zero3 zero_bubble_v"],
    "moe": ["pp_recompute 1f1b", "pp_tp 1f1b", "pp2_of_3 zero_bubble_v"],
}
CASES = [(model, *case.split()) for model, cases in SAMPLE.items() for case in cases]


@pytest.mark.sampled(
    only=(
        "gpt-pp_zero3-1f1b",
        "gpt-submeshes_1_2_1-zero_bubble_v",
        "gpt-pp4_of_6-interleaved_zero_bubble",
        "gpt-pp_few-gpipe",
        "gpt-pp_zero3-dualpipev",
        "hf_gpt2-pp_tied-dualpipev",
        "llama-pp_tp-gpipe",
        "llama-pp2_dp2_of_5-zero_bubble",
        "hf_gpt2-pp2-interleaved",
        "hf_gpt2-pp_tied-zero_bubble_v",
        "hf_t5-pp_dp-1f1b",
        "moe-pp_recompute-1f1b",
    )
)
@pytest.mark.ranks
@pytest.mark.parametrize(("model_name", "plan_name", "schedule"), CASES)
def test_pipeline_equals_model(model_name: str, plan_name: str, schedule: str) -> None:
    found = pipelines.faults(model_name, plan_name, schedule)
    assert not found, "\n".join(found)
