"""Audits: what is illegal, what does not fit and what is slow are told apart, and the better configuration is written
back
with everything else as it was."""

from __future__ import annotations

import difflib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar import cli
from autopar.auditing.flavors import read_config
from autopar.auditing.frameworks import FRAMEWORKS, Framework, read_text
from autopar.auditing.job import TrainingJob, completed, with_batch
from autopar.auditing.legality import faults
from autopar.auditing.result import SLOW, Audit, read_back
from autopar.auditing.writing import changed_text, differences
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from benchmarks.audit.cases import CASES, CONFIGS, ROOT, AuditCase
from models import mlp

NANOTRON = """# ours
model:
  dtype: bfloat16
  model_config: {{hidden_size: 1024, intermediate_size: 4096, num_attention_heads: 16, num_key_value_heads: {kv_heads},
    num_hidden_layers: 2, vocab_size: 32000, tie_word_embeddings: false}}
optimizer: {{zero_stage: {zero}}}
parallelism:
  dp: {dp}  # ranks with their own samples
  tp: {tp}
  pp: {pp}
  tp_mode: REDUCE_SCATTER
tokens:
  micro_batch_size: {micro}
  batch_accumulation_per_replica: {times}
  sequence_length: 2048
"""
FINE = {"kv_heads": 16, "zero": 1, "dp": 8, "tp": 1, "pp": 1, "micro": 4, "times": 1}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def written(path: Path, **changes: int) -> Path:
    path.write_text(NANOTRON.format(**{**FINE, **changes}))
    return path


# Verdicts ----------------------------------------


def test_key_value_heads_fewer_than_tensor_parallel_ranks_are_illegal(job: Path) -> None:
    found = autopar.audit(written(job, kv_heads=2, dp=2, tp=4), "h100:8", search=None)
    assert found.verdict == "illegal" and found.predicted is None
    assert "key/value heads that tp=4 divides, found 2" in str(found)
    assert "parallelism.tp (line 9)" in str(found) and "tp among 1, 2" in str(found)


def test_what_needs_more_memory_than_there_is_does_not_fit(job: Path) -> None:
    found = autopar.audit(written(job, micro=64), "l4:8", search=None)
    assert found.verdict == "does not fit" and found.is_legal and found.predicted is not None
    assert found.predicted.odds < 0.05


def test_what_is_legal_and_slow_is_told_from_what_is_fine_and_bettered(job: Path, tmp_path: Path) -> None:
    slow = autopar.audit(written(job, dp=1, tp=8, micro=1, times=32), "h100:8", search="fast")
    assert slow.verdict == "slow" and slow.is_legal and slow.fits and slow.gain > SLOW
    assert slow.better is not None and slow.predicted is not None
    assert slow.better.step_ns < slow.predicted.step_ns
    slow.write(tmp_path / "better.yaml")
    changed = list(difflib.ndiff(job.read_text().splitlines(), (tmp_path / "better.yaml").read_text().splitlines()))
    assert "  # ours" in changed and sum(line.startswith("- ") for line in changed) <= 6
    assert "# ranks with their own samples" in (tmp_path / "better.yaml").read_text()
    again = autopar.audit(tmp_path / "better.yaml", "h100:8", search=None)
    assert again.predicted is not None and again.predicted.step_ns == slow.better.step_ns
    assert again.job.global_batch == slow.job.global_batch == 32


ILLEGAL = {
    "product of degrees": {"dp": 4},
    "at most 2": {"dp": 1, "pp": 8},
    "heads that tp=3 divides": {"tp": 3},
}


@pytest.mark.parametrize("expected", ILLEGAL)
def test_what_does_not_divide_is_named(job: Path, expected: str) -> None:
    found = autopar.audit(written(job, **ILLEGAL[expected]), "h100:8", search=None)
    assert found.verdict == "illegal" and expected in str(found)


RULES: dict[str, dict[str, object]] = {
    "a multiple of micro batch": {"global_batch": 33, "accumulation": None},
    "4 parts divide": {"cp": 2, "data": 4, "seq": 2050, "context": "ring"},
    "a multiple of 4 microbatches": {"pp": 4, "data": 2, "chunks": 2, "schedule": "interleaved", "accumulation": 2,
                                     "global_batch": 16},
    "divides the 8 data-parallel ranks": {"shard": 3},
    "ep=1 for a model without experts": {"ep": 2},
}  # fmt: skip


@pytest.mark.parametrize("expected", RULES)
def test_each_rule_finds_its_fault_and_no_other(job: Path, expected: str) -> None:
    file, _ = read_text("job.yaml", NANOTRON.format(**FINE))
    fine = completed(replace(file.job, framework="megatron"), Mesh("h100", 1, 8))
    assert faults(file, fine) == []
    found = faults(file, replace(fine, **RULES[expected]))  # type: ignore[arg-type]
    assert found and all(fault.expected and fault.found and fault.remedy for fault in found)
    assert any(expected in fault.expected for fault in found)


@pytest.mark.parametrize("case", [case for case in CASES if case.expected == "illegal"], ids=lambda case: case.file)
def test_public_configurations_that_cannot_run_so(case: AuditCase) -> None:
    found = autopar.audit(case.path, case.mesh, case.model_path, search=None, **case.given)
    assert found.verdict == "illegal" and len(found.faults) == 1


def test_devices_that_are_given_overrule_those_of_the_file_and_this_is_said() -> None:
    found = autopar.audit(CONFIGS / "megatron_gpt3_175b.sh", "a100:1x4", search=None)
    assert found.verdict == "illegal" and "devices = 1 × 8: judged on a100:1x4" in str(found)


def test_what_has_to_be_said_beside_a_file_is_asked_for() -> None:
    with pytest.raises(PlanError, match="expected the devices as mesh"):
        autopar.audit(CONFIGS / "torchtitan_llama3_8b.toml", search=None)
    with pytest.raises(PlanError, match=r"--model config.json or module:config, --seq-len"):
        autopar.audit(CONFIGS / "deepspeed_hf_zero3.json", "h100:8", search=None)
    with pytest.raises(PlanError, match="expected search as one of fast"):
        autopar.audit(CONFIGS / "deepspeed_hf_zero3.json", "h100:8", search="far")


def test_a_module_of_the_users_own_is_planned(tmp_path: Path) -> None:
    config = mlp.Config()
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1}')
    found = autopar.audit(path, "h100:2", (mlp.build(config), mlp.example_inputs(config)), search=None)
    assert found.verdict == "fine" and found.predicted is not None and found.job.zero == 2


# Writing ----------------------------------------

NO_DEGREES = "accelerate_multi", "accelerate_fsdp2", "accelerate_slurm", "accelerate_fp8", "accelerate_deepspeed"
SAME_DEVICES = [case for case in CASES if case.expected == "fits" and not case.file.startswith(NO_DEGREES)]


def other_job(job: TrainingJob, framework: Framework) -> TrainingJob:
    """A legal job on the same devices that differs in all that the framework can say."""
    assert job.devices and job.global_batch and job.model
    data = job.ranks_of_data // 2 if framework.has_tensor and job.ranks_of_data % 2 == 0 else job.ranks_of_data
    tp = job.devices // data // job.pp // job.cp
    micro = 2 if "accelerate" not in job.framework and job.global_batch % (data * 2) == 0 else job.micro_batch
    zero = next(stage for stage in framework.zeros if stage != job.zero)
    return replace(
        job, data=data, shard=data, replicate=1, tp=tp, sequence_parallel=tp > 1 and job.framework != "accelerate",
        zero=zero, micro_batch=micro, accumulation=job.global_batch // data // (micro or 1), recompute_every=1,
        recompute="full" if "full" in framework.recomputations else "none", recompute_layers=None,
    )  # fmt: skip


@pytest.mark.parametrize("case", SAME_DEVICES, ids=lambda case: case.file)
def test_another_job_is_written_and_read_back_with_all_else_as_it_was(case: AuditCase) -> None:
    text = case.path.read_text()
    file, framework = read_text(case.file, text)
    given = {"micro_batch": 1, **case.given} if file.job.micro_batch is None else dict(case.given)
    given = {"seq" if name == "seq_len" else name: value for name, value in given.items()}
    given |= {"model": read_config(case.model_path)[0]} if case.model_path else {}
    old = with_batch(completed(replace(file.job, **given), Mesh.parse(case.mesh)))
    new = other_job(old, framework)
    changed = changed_text(file, old, new, framework)
    again = read_text(case.file, changed)[0]
    found = read_back(Audit(file, framework, old, given=tuple(given.items())), changed, new)
    assert differences(found, new) == []
    lines = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert all(line in changed.splitlines() for line in lines)
    assert {item.key for item in file.left} <= {item.key for item in again.left} | {
        "activation_checkpoint.selective_ac_option"
    }


MEGATRON = "TP=2\nM=4 # micro\nrun.sh --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\\n" \
           "  --tensor-model-parallel-size $TP --micro-batch-size=$M --global-batch-size $((M*8)) --bf16 " \
           "--sequence-parallel --swiglu | tee log  # all\n"  # fmt: skip


def test_arguments_are_changed_where_they_stand_and_computed_ones_overruled_at_the_end() -> None:
    file, framework = read_text("a.sh", MEGATRON)
    old = completed(file.job, Mesh("h100", 1, 8))
    assert (old.tp, old.micro_batch, old.global_batch, old.data) == (2, 4, 32, 4)
    new = completed(replace(old, tp=1, data=8, shard=8, sequence_parallel=False, global_batch=64, accumulation=2), None)
    text = changed_text(file, old, new, framework)
    assert text.startswith("TP=1\nM=4 # micro\n") and "--sequence-parallel" not in text
    assert "--swiglu \\\n    --global-batch-size 64 | tee log  # all" in text
    assert differences(completed(read_text("a.sh", text)[0].job, Mesh("h100", 1, 8)), new) == []


def test_what_a_file_cannot_say_is_refused(job: Path) -> None:
    file, framework = read_text("a.sh", MEGATRON)
    old = completed(file.job, Mesh("h100", 1, 8))
    wrong = differences(old, replace(old, zero=3))
    assert wrong == ["zero 0 instead of 3"]
    assert FRAMEWORKS["megatron"] is framework


# The command ----------------------------------------


def test_the_command_prints_a_verdict_and_says_it_by_its_status(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["audit", str(written(job)), "--mesh", "h100:8", "--search", "none"]) == 0
    printed = capsys.readouterr().out
    for word in ("legal, and fits", "dp 8 with ZeRO-1", "TFLOP/s a device", "MFU", "bound by", "in nine of ten runs"):
        assert word in printed
    assert cli.main(["audit", str(written(job, dp=3)), "--mesh", "h100:8", "--search", "none"]) == 1
    assert "choose degrees whose product is 8" in capsys.readouterr().out
    assert cli.main(["audit", "no.toml", "--mesh", "h100:8"]) == 2


def test_what_is_illegal_is_told_without_torch(job: Path) -> None:
    """Legality is reading and counting; so it is said at once."""
    script = (
        "import sys; from autopar.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(10 * ('torch' in sys.modules) + status)"
    )
    command = [sys.executable, "-c", script, "audit", str(written(job, kv_heads=2, dp=2, tp=4)), "--mesh", "h100:8"]
    found = subprocess.run([*command, "--search", "none"], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "illegal" in found.stdout, found.stderr


def test_a_verdict_needs_neither_torch_export_nor_what_only_programs_run(job: Path) -> None:
    """Each takes longer to import than a verdict takes."""
    script = (
        "import sys; from autopar.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(*{'torch.export._trace', 'torch._dynamo', 'torch.distributed.tensor', 'autopar.runtime.surface', "
        "'networkx', 'jsonschema'} & sys.modules.keys(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "audit", str(written(job)), "--mesh", "h100:8", "--search", "none"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "legal, and fits" in found.stdout and found.stderr.strip() == ""


def test_whether_it_is_legal_is_told_before_what_it_takes(job: Path) -> None:
    told = list[Audit]()
    found = autopar.audit(written(job), "h100:8", search=None, tell=told.append)
    assert [one.verdict for one in told] == ["legal", "fine"] and told[-1] is found
    assert "legal; whether it fits" in str(told[0]) and "step  " not in str(told[0])
