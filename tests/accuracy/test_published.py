"""The published iterations' benchmark: its reader, its model, its constants and its fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.profiler import load_profile
from autopar.profiler.text import profile_text
from benchmarks.accuracy import megatron, published
from benchmarks.accuracy.constants import CONSTANTS, measured_system, shipped_constants, with_constants
from benchmarks.accuracy.fitting import gauss_newton_step

HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_both_forms_of_the_table_are_read(tmp_path: Path) -> None:
    """The multi-node form states the parameters first, and both count with or without decimals."""
    plain = published.read_rows(written(tmp_path, HEADER, "8,16,2,64,4,4,32,2,2,2,12.5"))
    multi = published.read_rows(
        written(tmp_path, f"Parameters (billion),{HEADER}", "0.1,8,16.0,2,64,4,4,32,2,2,2,12.5")
    )
    assert plain == multi == [published.Row(8, 16, 2, 64, 4, 4, 32, 2, 2, 2, 12.5)]
    assert plain[0].microbatches == 4
    assert plain[0].config.fused_softmax, "2 samples times 2 heads"
    alone = published.read_rows(written(tmp_path, HEADER, "8,16,1,64,4,4,32,2,2,2,12.5"))[0]
    assert not alone.config.fused_softmax


def test_what_is_no_such_table_is_refused(tmp_path: Path) -> None:
    lines = HEADER.replace(",# layers", ""), "8,16,2,64,4,32,2,2,2,12.5"
    with pytest.raises(ValueError, match=r"expected the columns \['# layers'\]"):
        published.read_rows(written(tmp_path, *lines))


def test_rows_that_are_not_understood_end_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "9,16,2,64,4,4,32,2,2,2,12.5": "expected GPUs = tensor × data × pipeline",
        "8,15,2,64,4,4,32,2,2,2,12.5": "whole micro batches",
        "8,16,0,64,4,4,32,2,2,2,12.5": "positive numbers",
        "8,16,2,64,4,4,32,2,2,2,inf": "positive numbers",
        "8,16,two,64,4,4,32,2,2,2,12.5": "two",
        "8,16,2": "NoneType",
    }
    rows = published.read_rows(written(tmp_path, HEADER, *wrong, "8,16,2,64,4,4,32,2,2,2,12.5"))
    assert len(rows) == 1
    told = capsys.readouterr().out.splitlines()
    for number, (line, reason) in enumerate(zip(told, wrong.values(), strict=True), 2):
        assert f"line {number}: not read:" in line and reason in line


def test_a_row_becomes_the_plan_that_it_names(tmp_path: Path) -> None:
    row = published.read_rows(written(tmp_path, HEADER, "8,16,2,64,4,4,32,2,2,2,12.5"))[0]
    graph, plan = published.plan_of(row)
    assert len(plan.stages) == 2
    assert plan.microbatches == 4
    assert plan.recompute == tuple(f"layers.{number}" for number in range(4))
    assert graph.tensors["tokens"].shape == (4, 32), "one microbatch of both data-parallel ranks"
    (time_ms,) = published.predict_ms({row: (graph, plan)}, [row], load_profile("a100"))
    assert 0 < time_ms < 1000


def test_the_fused_softmax_computes_what_the_operators_do() -> None:
    torch.manual_seed(0)
    losses, gradients = [], []
    tokens = torch.randint(0, 32, (2, 8))
    for fused in (True, False):
        torch.manual_seed(1)
        model = megatron.GPT(megatron.Config(8, 2, 16, 2, fused, vocab_size=32, dropout=0.0)).double()
        loss = model(tokens, tokens.roll(-1, 1))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)  # both take the softmax in float32
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_constants_can_be_read_back_from_their_profile() -> None:
    chosen = {name: value * (0.7 + 0.02 * number) for number, (name, value) in enumerate(CONSTANTS.items())}
    found = shipped_constants(with_constants(load_profile("a100"), chosen))
    assert found == {name: pytest.approx(value, rel=5e-3) for name, value in chosen.items()}


def test_the_shipped_profile_says_what_was_fitted() -> None:
    profile = load_profile("a100")
    assert profile.host is None, "what was measured is another software's"
    sources = measured_system(profile).provenance
    assert {sources[name].split(":")[0] for name in ("host", "operators/matmul", "links/inter_node")} == {"fitted"}
    assert "rows of" in sources["host"]


def test_a_gauss_newton_step_finds_the_least_squares_without_outliers() -> None:
    random = np.random.default_rng(0)
    slopes, wanted = random.normal(size=(60, 3)), np.array([0.2, -0.1, 0.05])
    errors = -slopes @ wanted
    errors[7] += 3.0
    assert gauss_newton_step(errors, slopes, np.zeros(3)) == pytest.approx(wanted, abs=0.01)


def test_profiles_are_written_as_they_are_read() -> None:
    data = {"name": "x", "knots": [[1e9, 0.5], [1.5e10, 0.75]], "launch": [3000, 3000], "none": None, "empty": []}
    text = profile_text(data)
    assert "[[1e+09, 0.5]" not in text
    assert "[1e+09, 0.5], [1.5e+10, 0.75]" in text
    assert json.loads(text) == data
