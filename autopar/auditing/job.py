"""A training job as other frameworks configure it, in the field's terms; what its file says where, and what a plan does
not carry of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.auditing.stages import dealt
from autopar.auditing.values import FileValue
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh

RECOMPUTATIONS = ("none", "selective", "block", "full")
PLANS = {"fast": 10, "default": 24, "thorough": 80}
"""How many better jobs are simulated, of those that a sum of simple terms puts first. Halved, the best is missed more
often; doubled, it takes twice as long."""

OF_A_NODE = -1  # as `shard`: among the ranks of a node


@dataclass(frozen=True)
class ModelSizes:
    """A decoder: sizes of its layers, and of which kind they are."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    is_gated: bool = True
    norm: str = "rms"  # or "layer"
    positions: str = "rotary"  # or "learned", "none"
    activation: str = "gelu"  # of an MLP that is not gated; or "gelu_tanh", "squared_relu", "relu", "silu"
    has_bias: bool = False
    is_tied: bool = False
    max_positions: int = 0  # of learned ones
    experts: int = 0
    chosen_experts: int = 0
    expert_ffn: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output."""
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    def mlp_parameters(self, experts: int) -> int:
        """Of one layer, of so many experts where it has some."""
        matrices = 3 if self.is_gated else 2
        if not self.experts:
            return matrices * self.hidden * self.ffn
        return experts * matrices * self.hidden * self.expert_ffn + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """Of the whole model, norms and biases left out."""
        ends = self.vocab * self.hidden * (1 if self.is_tied else 2)
        ends += self.max_positions * self.hidden if self.positions == "learned" else 0
        return ends + self.layers * (self.attention_parameters + self.mlp_parameters(self.experts))

    @property
    def multiplied_parameters(self) -> int:
        """Of the matrices that a token is multiplied with: its experts, the head, not the embedding."""
        layer = self.attention_parameters + self.mlp_parameters(self.chosen_experts)
        return self.vocab * self.hidden + self.layers * layer

    def step_flops(self, batch: int, seq: int) -> float:
        """Floating-point operations of the model for a step, forward and backward, nothing computed again: six for
        each parameter and token, and attention's two products over the positions that a causal mask leaves."""
        attention = 12 * self.layers * self.heads * self.head_size * seq / 2
        return batch * seq * (6 * self.multiplied_parameters + attention)


@dataclass(frozen=True)
class TrainingJob:
    """How a model is trained on which devices. None: neither the file says it nor did the user.

    data: ranks with samples of their own; shard: among how many neighbours of them ZeRO shards, all where None.
    replicate and shard are what files say; data follows from the number of devices. zero: stage 0 to 3.
    accumulation: microbatches of a step, before the pipeline cuts them further. pipeline_micro_batch: of one rank,
    where
    the pipeline cuts a local batch (torchtitan). recompute: as `template_plan`'s; recompute_layers: only so many of
    each
    stage, recompute_every: only every such layer. stage_layers: of each stage, in the order in which they run, where
    they are said; end_weights: as how many layers what is before and behind them counts where they are dealt out.
    """

    framework: str
    model: ModelSizes | None = None
    gpu: str | None = None
    nodes: int | None = None
    per_node: int | None = None
    data: int | None = None
    replicate: int | None = None
    shard: int | None = None
    zero: int = 0
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    stage_layers: tuple[int, ...] | None = None
    end_weights: tuple[int, int] | None = None
    cp: int = 1
    context: str = "gather"
    ep: int = 1
    micro_batch: int | None = None
    pipeline_micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    seq: int | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_every: int = 1
    precision: str = "fp32"  # or "bf16" with float32 masters, "bf16 alone"
    optimizer: str = "adamw"
    compiles: bool = False
    overlaps_sums: bool = True

    @property
    def devices(self) -> int | None:
        """How many there are, where that is known."""
        return None if self.nodes is None or self.per_node is None else self.nodes * self.per_node

    @property
    def mesh(self) -> Mesh:
        """The devices as a mesh. Raises PlanError where they are not known."""
        if self.gpu is None or self.nodes is None or self.per_node is None:
            raise PlanError(
                "expected the devices as mesh (--mesh h100:8x8), found none: this file says only "
                f"{self.nodes or 'nothing of the'} nodes, {self.per_node or 'nothing of the'} devices a node"
            )
        return Mesh(self.gpu, self.nodes, self.per_node)

    @property
    def ranks_of_data(self) -> int:
        """`data`, once it is known."""
        return self.data or 1

    @property
    def microbatches(self) -> int:
        """Into how many parts a step's batch is cut."""
        parts = 1
        if self.pipeline_micro_batch and self.micro_batch:
            parts = max(1, self.micro_batch // self.pipeline_micro_batch)
        return (self.accumulation or 1) * parts

    @property
    def layers_of_stages(self) -> tuple[int, ...] | None:
        """How many layers each stage has, in the order in which they run; None where all have as many, or where the
        software leaves it open."""
        if self.pp == 1 or self.model is None or self.stage_layers is not None:
            return self.stage_layers if self.pp > 1 else None
        return None if self.end_weights is None else dealt(self.model.layers, self.pp * self.chunks, *self.end_weights)

    @property
    def sharding_ranks(self) -> int:
        """Among how many ranks of data ZeRO shards."""
        return self.shard or self.ranks_of_data

    def without_sizes(self) -> list[str]:
        """What has to be known for a prediction and is not."""
        needed = {
            "model": self.model,
            "seq": self.seq,
            "micro_batch": self.micro_batch,
            "global_batch": self.global_batch,
        }
        return [name for name, value in needed.items() if value is None]


def completed(job: TrainingJob, mesh: Mesh | None) -> TrainingJob:
    """The job on these devices: ranks of data are those that are left, and of the three numbers of a batch (of one
    rank,
    how often, of all) the one that is missing follows. What does not come out even stays for `legality` to find."""
    if mesh is not None:
        job = replace(job, gpu=mesh.profile, nodes=mesh.nodes, per_node=mesh.devices_per_node)
    if job.devices is None:
        return job
    inner = job.tp * job.pp * job.cp
    data = job.data
    if data is None and job.replicate is not None and job.shard is not None and job.shard != OF_A_NODE:
        data = job.replicate * job.shard
    if data is None:
        data = max(1, job.devices // inner)
    shard = job.shard if job.shard is not None else max(1, data // (job.replicate or 1))
    if shard == OF_A_NODE:
        shard = math.gcd(data, max(1, (job.per_node or 1) // (job.tp * job.cp)))
    return with_batch(replace(job, data=data, shard=shard, replicate=max(1, data // shard)))


def with_batch(job: TrainingJob) -> TrainingJob:
    """The job with the one of the three numbers of its batch that the other two leave."""
    ranks, micro, times, whole = job.ranks_of_data, job.micro_batch, job.accumulation, job.global_batch
    if whole is None and micro is not None:
        return replace(job, accumulation=times or 1, global_batch=micro * ranks * (times or 1))
    if whole is not None and micro is None and times is not None:
        return replace(job, micro_batch=max(1, whole // (ranks * times)))
    if whole is not None and micro is not None and times is None:
        return replace(job, accumulation=max(1, whole // (micro * ranks)))
    return job


def check_known(job: TrainingJob, name: str) -> None:
    """That all is known that a prediction needs. Raises PlanError with how to say it."""
    options = {"model": "--model config.json or module:config", "seq": "--seq-len", "micro_batch": "--micro-batch",
               "global_batch": "--global-batch"}  # fmt: skip
    absent = job.without_sizes()
    if absent:
        raise PlanError(
            f"expected {', '.join(absent)} in {name}, found none; add {', '.join(options[key] for key in absent)}"
        )


# What the file says ----------------------------------------


@dataclass(frozen=True)
class LegalityFault:
    """Something by which a job stops before its first step."""

    what: str
    expected: str
    found: str
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found} ({self.where}); {self.remedy}"


@dataclass(frozen=True)
class NotCarried:
    """A key that no plan carries, and why. kind: "no equivalent", "approximated", "assumed", "does not matter" or
    "unknown"."""

    key: str
    value: str
    line: int
    kind: str
    why: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.key}{f' = {self.value}' if self.value else ''}: {self.why}"


@dataclass(frozen=True)
class JobFile:
    """A file as it was read: the job, where each field of it stands, and what of the file is not in it. faults: what
    the framework itself refuses of it, whatever the devices."""

    name: str
    text: str
    job: TrainingJob
    where: Mapping[str, FileValue] = field(default_factory=dict)
    left: tuple[NotCarried, ...] = ()
    faults: tuple[LegalityFault, ...] = ()

    def place(self, *fields: str) -> str:
        """Where these fields of the job stand, for messages."""
        found = [f"{self.where[name].key} (line {self.where[name].line})" for name in fields if name in self.where]
        return f"{self.name}: {', '.join(found)}" if found else f"{self.name}: not said there"

    def of_kind(self, kind: str) -> list[NotCarried]:
        """What is left out for one reason."""
        return [item for item in self.left if item.kind == kind]


def divisors(number: int) -> list[int]:
    """From 1 up."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
