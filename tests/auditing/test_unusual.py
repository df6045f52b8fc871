"""Configurations with keys that public recipes use seldom: each is judged as its framework would, or what is not
carried is named. Small models; the rules are those of Megatron-LM's arguments, torchtitan, DeepSpeed, Accelerate and
nanotron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from autopar.auditing.frameworks import read_text
from autopar.auditing.prediction import TracedModels, overlap_of
from autopar.auditing.result import Audit, audit
from autopar.auditing.stages import laid_out
from autopar.errors import PlanError
from autopar.microbatch import divided_graph
from autopar.profiler import load_profile
from autopar.rewrites import graph_of
from autopar.simulate import predict, simulate
from autopar.simulate.incremental import Incremental

SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
         "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 256}  # fmt: skip


class Case(NamedTuple):
    """What is added to a framework's small file, on which devices; what comes of it: the verdict, fields of the job,
    and what is said."""

    name: str
    added: str
    verdict: str = "fine"
    job: dict[str, Any] = {}  # noqa: RUF012  (of a NamedTuple, never changed)
    says: tuple[str, ...] = ()
    mesh: str = "h100:8"

    def check(self, found: Audit) -> None:
        told = str(found)
        assert found.verdict == self.verdict, told
        assert {key: getattr(found.job, key) for key in self.job} == self.job
        assert [one for one in self.says if one not in told] == [], told


# Megatron-LM ----------------------------------------

MEGATRON = """python pretrain_gpt.py --num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \\
  --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 1024 {}
"""
_PP4 = "--pipeline-model-parallel-size 4 "
OF_MEGATRON = (
    Case("chunks of a number of layers", _PP4 + "--num-layers-per-virtual-pipeline-stage 1",
         job={"chunks": 2, "schedule": "interleaved", "layers_of_stages": None}),
    Case("layers that no number of chunks has", "--num-layers 32 " + _PP4 + "--num-layers-per-virtual-pipeline-stage 3",
         "illegal", says=("divides the 8 of a stage, found 3", "one of 1, 2, 4, 8")),
    Case("chunks by their number", _PP4 + "--num-virtual-stages-per-pipeline-rank 2", job={"chunks": 2}),
    Case("chunks said twice", _PP4 + "--num-virtual-stages-per-pipeline-rank 2 "
         "--num-layers-per-virtual-pipeline-stage 1", "illegal", says=("leave one out",)),
    Case("fewer layers at the ends", "--num-layers 9 " + _PP4 + "--decoder-first-pipeline-num-layers 2 "
         "--decoder-last-pipeline-num-layers 1", job={"layers_of_stages": (2, 3, 3, 1)}, says=("layers 2 2×3 1",)),
    Case("fewer layers in the first stage alone", "--num-layers 7 " + _PP4 + "--decoder-first-pipeline-num-layers 1",
         job={"layers_of_stages": (1, 2, 2, 2)}),
    Case("ends that leave what does not divide", _PP4 + "--decoder-first-pipeline-num-layers 1", "illegal",
         says=("layers that the stages share evenly", "8 layers with 1 at the ends of 4 stages")),
    Case("fewer layers at the ends, in chunks", "--num-layers 12 " + _PP4 + "--num-virtual-stages-per-pipeline-rank 2 "
         "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
         job={"layers_of_stages": (1, 2, 2, 1, 1, 2, 2, 1), "chunks": 2}),
    Case("fewer layers at the ends, in chunks of a number", "--num-layers 12 " + _PP4 + "--decoder-first-pipeline-num-"
         "layers 3 --num-layers-per-virtual-pipeline-stage 1", "illegal", says=("where stages have layers of",)),
    Case("ends that count as layers", "--num-layers 6 " + _PP4 + "--account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", job={"layers_of_stages": (1, 2, 2, 1)}),
    Case("ends that count, and do not divide", _PP4 + "--account-for-loss-in-pipeline-split", "illegal",
         says=("a number that divides 9 layers",)),
    Case("an embedding by itself", "--num-layers 9 " + _PP4 + "--standalone-embedding-stage",
         job={"layers_of_stages": (0, 3, 3, 3)}),
    Case("a layout", _PP4 + "--pipeline-model-parallel-layout 'Et*3|(tt|)*2,tL'",
         job={"layers_of_stages": (3, 2, 2, 1), "chunks": 1}),
    Case("a layout of too few layers", _PP4 + "--pipeline-model-parallel-layout 'Et|(tt|)*2,tL'", "illegal",
         says=("with 8 layers, found 4 with 6",)),
    Case("interleaved without overlapped sends", "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication "
         "--num-layers-per-virtual-pipeline-stage 2", "illegal", says=("more than two stages",)),
    Case("full recomputation without a method", "--recompute-granularity full", "illegal",
         says=("--recompute-method",)),
    Case("full recomputation of some layers", "--recompute-granularity full --recompute-method block "
         "--recompute-num-layers 3", job={"recompute": "full", "recompute_layers": 3}),
    Case("a method without a granularity", "--recompute-method uniform", job={"recompute": "none"}),
    Case("gathers that overlap without the optimizer", "--overlap-param-gather --overlap-grad-reduce", "illegal",
         says=("--use-distributed-optimizer beside",)),
    Case("more tokens than positions", "--seq-length 512", "illegal", says=("at least the sequence's 512, found 256",)),
    Case("both halves", "--fp16", "illegal", says=("fp16 or bf16",)),
    Case("too few groups for tensor parallelism", "--group-query-attention --num-query-groups 2 "
         "--tensor-model-parallel-size 4", "illegal", says=("key/value heads that tp=4 divides, found 2",)),
    Case("groups that count for nothing", "--num-query-groups 2 --tensor-model-parallel-size 4", job={"tp": 4}),
    Case("an optimizer on the host", "--optimizer-cpu-offload", says=("planned as if all were on the device",)),
    Case("what does not fit", "--num-layers 64 --hidden-size 8192 --num-attention-heads 64", "does not fit",
         says=("compute",)),
)  # fmt: skip


@pytest.mark.parametrize("case", OF_MEGATRON, ids=lambda case: case.name)
def test_megatron(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON.format(case.added))
    case.check(audit(path, case.mesh, search=None))


def test_a_better_job_drops_what_said_stages_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON.format("--num-layers 9 " + _PP4 + "--decoder-first-pipeline-num-layers 3"))
    found = audit(path, "h100:8", search="fast")
    assert found.better is not None and found.better.job.stage_layers is None
    assert "decoder-first" not in found.better_text() and "--num-layers 9" in found.better_text()


@pytest.mark.parametrize("added", [
    _PP4 + "--tensor-model-parallel-size 2", _PP4 + "--num-layers-per-virtual-pipeline-stage 1",
    "--num-layers 9 " + _PP4 + "--decoder-last-pipeline-num-layers 3 --overlap-grad-reduce",
    "--use-distributed-optimizer",
])  # fmt: skip
def test_what_is_told_is_the_whole_step_simulated_once_more(added: str, tmp_path: Path) -> None:
    """One layer of repeated ones is played, and the step once, with sums where the job has them."""
    path = tmp_path / "job.sh"
    path.write_text(MEGATRON.format(added))
    found = audit(path, "h100:8", search=None)
    assert found.predicted is not None
    plan = found.predicted.plan
    graph = graph_of(plan, TracedModels().graph(found.job))
    part, profile = divided_graph(graph, plan.microbatches), load_profile("h100")
    whole = predict(Incremental(part, profile, overlap_of(found.job), in_parts=False).timeline(plan))
    told = plan.predicted
    assert (told.step_time_ns, told.peak_bytes) == (whole.step_time_ns, whole.peak_bytes)
    assert told.breakdown == whole.breakdown
    early = predict(simulate(part, plan, profile))
    has_late_sums = not found.job.overlaps_sums and found.job.ranks_of_data > 1
    assert (early.step_time_ns != told.step_time_ns) == has_late_sums


@pytest.mark.parametrize(("text", "layers"), [
    ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0)), ("E|(t|)*2(tt|)*2L", (0, 1, 1, 2, 2, 0)), ("EttL", (2,)),
])  # fmt: skip
def test_layouts_are_read_as_megatron_writes_them(text: str, layers: tuple[int, ...]) -> None:
    assert laid_out(text) == layers


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(PlanError, match="expected a layout of E, t, m, L and"):
        laid_out("Et|x")


# torchtitan ----------------------------------------

TITAN = """[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = {batch}
seq_len = 256
[parallelism]
{added}
"""
_PP2 = "pipeline_parallel_degree = 2\npipeline_parallel_schedule = "
OF_TITAN = (
    Case("stages with a layer less at the ends", "pipeline_parallel_degree = 4",
         job={"layers_of_stages": (1, 2, 2, 1), "zero": 2}),
    Case("no layer less", "pipeline_parallel_degree = 4\npipeline_parallel_first_stage_less_layers = 0\n"
         "pipeline_parallel_last_stage_less_layers = 0", job={"layers_of_stages": (2, 2, 1, 1)}),
    Case("stages of a number of layers", _PP2 + "'Interleaved1F1B'\npipeline_parallel_layers_per_stage = 2",
         job={"chunks": 2, "layers_of_stages": (1, 2, 2, 1)}),
    Case("a number of layers that leaves uneven ranks", _PP2 + "'Interleaved1F1B'\n"
         "pipeline_parallel_layers_per_stage = 3", "illegal", says=("found 3 of 3 layers",)),
    Case("a schedule of single stages with several", _PP2 + "'1F1B'\npipeline_parallel_layers_per_stage = 2",
         "illegal", says=("expected 2 stages, found 4",)),
    Case("fewer microbatches than stages, in rounds", _PP2 + "'Interleaved1F1B'\n"
         "pipeline_parallel_microbatch_size = 4", job={"microbatches": 2, "chunks": 2}),
    Case("fewer microbatches than stages", "pipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 4",
         "illegal", says=("at least as many microbatches as there are stages, 4",)),
    Case("replicas beside tensor parallelism", "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
         "tensor_parallel_degree = 2", "illegal", says=("DDP is alone",)),
    Case("shards of half of the ranks", "data_parallel_replicate_degree = 2", job={"sharding_ranks": 4, "data": 8}),
    Case("gathered once", "fsdp_reshard_after_forward = 'never'", job={"zero": 2}),
    Case("contexts in a ring", "context_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'",
         job={"cp": 2, "context": "ring"}),
    Case("a misspelt key", "tensor_parallel_degre = 2", says=("tensor_parallel_degre = 2: autopar does not know",)),
    Case("heads that do not divide", "tensor_parallel_degree = 32", "illegal", says=("heads that tp=32",),
         mesh="h100:4x8"),
)  # fmt: skip


@pytest.mark.parametrize("case", OF_TITAN, ids=lambda case: case.name)
def test_torchtitan(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TITAN.format(batch=8, added=case.added))
    case.check(audit(path, case.mesh, search=None))


# DeepSpeed ----------------------------------------

_Z = '"zero_optimization": {"stage": '
OF_DEEPSPEED = (
    Case("a batch alone", '{"train_batch_size": 32}', job={"micro_batch": 4, "accumulation": 1}),
    Case("a batch in four", '{"train_batch_size": 64, "gradient_accumulation_steps": 4}', job={"micro_batch": 2}),
    Case("a batch that does not divide", '{"train_batch_size": 36}', "illegal", says=("a multiple of micro batch",)),
    Case("three numbers that differ", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, '
         '"gradient_accumulation_steps": 2}', "illegal", says=("× 2 times",)),
    Case("both halves", '{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}', "illegal",
         says=("fp16 or bf16",)),
    Case("state on the host", '{"train_batch_size": 8, ' + _Z + '3, "offload_optimizer": {"device": "cpu", '
         '"pin_memory": true}, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}',
         job={"zero": 3}, says=("offload_optimizer.device = cpu", "planned as if all were on it")),
    Case("buckets", '{"train_batch_size": 8, ' + _Z + '2, "overlap_comm": true, "reduce_bucket_size": 2e8, '
         '"allgather_bucket_size": 200000000, "contiguous_gradients": true}}', job={"zero": 2, "overlaps_sums": True},
         says=("not needed",)),
    Case("sums behind", '{"train_batch_size": 8, ' + _Z + "1}}", job={"zero": 1, "overlaps_sums": False}),
    Case("sums of another type", '{"train_batch_size": 8, "communication_data_type": "bf16", '
         '"data_types": {"grad_accum_dtype": "bf16"}}',
         says=("communication_data_type = bf16: gradients", "grad_accum_dtype = bf16: gradients")),
    Case("shards of a node", '{"train_batch_size": 16, ' + _Z + '3, "mics_shard_size": 8}}',
         job={"sharding_ranks": 8, "data": 16}, mesh="h100:2x8"),
    Case("a stage that there is not", '{"train_batch_size": 8, ' + _Z + "4}}", "illegal", says=("from 0 to 3",)),
    Case("heads over ranks", '{"train_batch_size": 8, "sequence_parallel_size": 4}', job={"cp": 4, "data": 2,
         "micro_batch": 4}),
    Case("more ranks than heads", '{"train_batch_size": 8, "sequence_parallel_size": 8}', "illegal",
         says=("key/value heads that 8 ranks divide, found 4",)),
)  # fmt: skip


@pytest.mark.parametrize("case", OF_DEEPSPEED, ids=lambda case: case.name)
def test_deepspeed(case: Case, tmp_path: Path) -> None:
    path, model = tmp_path / "job.json", tmp_path / "config.json"
    path.write_text(case.added)
    model.write_text(json.dumps(SMALL))
    case.check(audit(path, case.mesh, model, search=None))


# Accelerate ----------------------------------------

ACCELERATE = """distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
_V2 = "fsdp_config:\n  fsdp_version: 2\n"
_DEGREE = "  parallelism_config_"
OF_ACCELERATE = (
    Case("version 2 asks not the strategy", _V2 + "  fsdp_sharding_strategy: SHARD_GRAD_OP\n", job={"zero": 3},
         says=()),
    Case("version 2, gathered once", _V2 + "  fsdp_reshard_after_forward: false\n", job={"zero": 2}),
    Case("version 1, by its strategy", "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", job={"zero": 2}),
    Case("version 1, a strategy behind the forward pass", "fsdp_config:\n  fsdp_version: 1\n"
         "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n", job={"zero": 2}),
    Case("version 1, of version 2's kind", "fsdp_config:\n  fsdp_reshard_after_forward: true\n", "illegal",
         says=("add fsdp_version: 2",)),
    Case("shards of a node", "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n", job={"sharding_ranks": 8},
         says=("shards are those of a node",)),
    Case("degrees that leave ranks", _V2 + f"parallelism_config:\n{_DEGREE}tp_size: 2\n{_DEGREE}dp_shard_size: 2\n",
         "illegal", says=("dp 2 × tp 2 = 4",)),
    Case("degrees of all ranks", _V2 + f"parallelism_config:\n{_DEGREE}tp_size: 2\n{_DEGREE}dp_shard_size: 4\n",
         job={"tp": 2, "data": 4, "zero": 3}),
    Case("replicas beside tensor parallelism", _V2 + f"parallelism_config:\n{_DEGREE}tp_size: 2\n"
         f"{_DEGREE}dp_replicate_size: 4\n", "illegal", says=("dp_shard_size above 1",)),
    Case("degrees under version 1", f"fsdp_config: {{}}\nparallelism_config:\n{_DEGREE}dp_shard_size: 8\n", "illegal",
         says=("add fsdp_version: 2",)),
    Case("tensor parallelism of old", _V2 + "tp_config:\n  tp_size: 4\n", says=("tp_config.tp_size = 4: tensor",)),
    Case("parameters on the host", _V2 + "  fsdp_offload_params: true\n  fsdp_activation_checkpointing: true\n",
         job={"recompute": "full"}, says=("fsdp_offload_params = True: parameters",)),
    Case("too few key/value heads", _V2 + f"parallelism_config:\n{_DEGREE}tp_size: 8\n{_DEGREE}dp_shard_size: 1\n"
         f"{_DEGREE}cp_size: 1\n", "illegal", says=("key/value heads that tp=8 divides, found 4",)),
)  # fmt: skip


@pytest.mark.parametrize("case", OF_ACCELERATE, ids=lambda case: case.name)
def test_accelerate(case: Case, tmp_path: Path) -> None:
    path, model = tmp_path / "job.yaml", tmp_path / "config.json"
    path.write_text(ACCELERATE + case.added)
    model.write_text(json.dumps(SMALL))
    case.check(audit(path, case.mesh, model, search=None, micro_batch=1))


def test_deepspeed_ranks_are_not_those_of_accelerates_degrees(tmp_path: Path) -> None:
    """Its ZeRO shards among all of them, whatever a ParallelismConfig leaves unsaid."""
    text = ACCELERATE.replace("FSDP", "DEEPSPEED") + "deepspeed_config:\n  zero_stage: 3\nparallelism_config:\n"
    file, _ = read_text("job.yaml", f"{text}{_DEGREE}sp_size: 2\n")
    assert (file.job.cp, file.job.context, file.job.shard, file.faults) == (2, "heads", None, ())


# nanotron ----------------------------------------

NANOTRON = """model:
  dtype: bfloat16
  model_config: {{hidden_size: 256, intermediate_size: 512, num_attention_heads: 8, num_key_value_heads: 4,
    num_hidden_layers: 4, vocab_size: 1000, tie_word_embeddings: false, {model}}}
optimizer: {{zero_stage: 1, accumulate_grad_in_fp32: {sums}}}
parallelism: {{dp: {dp}, tp: {tp}, pp: {pp}, {added}}}
tokens: {{micro_batch_size: 1, batch_accumulation_per_replica: 4, sequence_length: 256}}
"""
_EVEN = {"dp": 8, "tp": 1, "pp": 1, "model": "rope_theta: 1e4", "sums": "true"}
OF_NANOTRON = (
    (Case("all forward, then all backward, where nothing is said", "", job={"schedule": "gpipe"}),
     {"dp": 4, "pp": 2}),
    (Case("one forward, one backward", "pp_engine: 1f1b", job={"schedule": "1f1b"}), {"dp": 4, "pp": 2}),
    (Case("a vocabulary that is padded", "tp_mode: REDUCE_SCATTER", job={"tp": 4, "sequence_parallel": True},
          says=()), {"dp": 2, "tp": 4}),
    (Case("too few key/value heads", "", "illegal", says=("key/value heads that tp=8 divides, found 4",)),
     {"dp": 1, "tp": 8}),
    (Case("gradients in 16 bits", "", says=("accumulate_grad_in_fp32 = False: gradients and masters",)),
     {"sums": "false"}),
    (Case("layers computed again", "recompute_layer: true", job={"recompute": "full"}), {}),
    (Case("a window", "", says=("sliding_window_size = 128: attention in a sliding window",)),
     {"model": "sliding_window_size: 128"}),
    (Case("stages that do not divide the layers", "pp_engine: afab", job={"pp": 3}, mesh="h100:3"),
     {"dp": 1, "pp": 3}),
    (Case("ranks that are not there", "", "illegal", says=("a product of degrees of 8 devices",)), {"dp": 3}),
)  # fmt: skip


@pytest.mark.parametrize(("case", "sizes"), OF_NANOTRON, ids=[case.name for case, _ in OF_NANOTRON])
def test_nanotron(case: Case, sizes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(NANOTRON.format(**{**_EVEN, **sizes}, added=case.added))
    case.check(audit(path, case.mesh, search=None))
