"""Measured training iterations, read from CSV files: one configuration and its step time a row.

Two forms are known by their columns: that of `training_iterations.csv` (its models are in `models.csv` beside it, or
given), and that of a measured grid of plans (model, nodes, dp, tp, pp, zero, mbs, grad_acc, gbs_sequences, tokens_s,
memory_gb), whose models are `GRID`. A value that is not understood, or a column that is not there, makes its row one
that is listed with the reason, unless the others say it: dp is what the devices leave, a step's time follows from
tokens a second.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30
DEVICES_PER_NODE = 8
NVLINK_DOMAIN = 72  # devices of a GB200 or GB300 rack
GRID_COLUMNS = {"model", "nodes", "dp", "tp", "pp", "mbs", "grad_acc"}
TRAINING_COLUMNS = {"model", "gpu"}
EXPERT_COLUMNS = ("experts", "top_k", "moe_ffn", "shared_expert_ffn", "dense_layers")
LATER_CHUNKS = r"VP given as NA in this release, (\d+) in the next"
PRECISIONS = {
    "fp8": r"fp8|float8|e4m3", "bf16": r"bf16|bfloat16", "fp16": r"fp16|float16|\bhalf\b|amp_fp16",
    "tf32": r"^(amp_|\w+ with )?tf32\b|tf32 (on|enabled)\b", "fp32": r"fp32|float32|\bsingle\b",
}  # fmt: skip
COMPILES = r"torch[._-]?compile|\bcompiled?\b"
NOT_COMPILED = r"\b(no|not|without|non)\W+(torch\W)?compiled?\b|compiled?\W+(off|false|no|none|0)\b"
FLAGS = {"": None, "0": False, "0.0": False, "1": True, "1.0": True}


@dataclass(frozen=True)
class Sizes:
    """What `models.csv` says of a model. shared_ffn: of the expert that all tokens pass, 0 without one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    is_gated: bool
    vocab: int
    is_tied: bool
    num_experts: int = 0
    is_causal: bool = True
    notes: str = ""
    chosen_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0  # without experts, where others have them


GRID = {
    "1B": Sizes(16, 2048, 32, 32, 64, 8192, True, 131072, True),
    "3B": Sizes(28, 3072, 32, 32, 96, 8192, True, 131072, True),
    "8B": Sizes(32, 4096, 32, 32, 128, 14336, True, 131072, False),
    "80B": Sizes(80, 8192, 64, 64, 128, 28672, True, 131072, False),
}
"""The models of the grid, as huggingface/nanotron's scripts/scaling_benchmarks.py makes them: heads are tied to the
embedding where the feed-forward part is narrower than 10,000. With that the last has the 80 billion of its name."""


@dataclass(frozen=True)
class Row:
    """One measured iteration. measured_s: None of a run that did not finish. hsdp: among how many ranks ZeRO shards,
    1 for all. again: of each stage (or one number for all) how many layers are computed again, where recompute does not
    say it of all. layers: blocks of each stage, where they are not even. tells_first: memory_bytes are those of rank 0
    and not of the fullest. is_compiled: its blocks run compiled. etp: among how many ranks each expert is split, 0
    where that is not stated. unknown: why nothing can be said of it."""

    id: str
    source: str
    framework: str
    gpu: str
    gpus: int
    per_node: int
    model: str
    sizes: Sizes | None
    precision: str
    seq: int
    micro_batch: int
    global_batch: int
    dp: int
    tp: int
    pp: int
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sequence_parallel: bool = False
    zero: int = 0
    hsdp: int = 1
    recompute: str = "none"
    again: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    measured_s: float | None = None
    memory_bytes: float | None = None
    tells_first: bool = False
    is_compiled: bool = False
    cell: str = ""
    network: str = ""  # between nodes, where it is known not to be the usual one
    other: str = field(default="", compare=False)
    unknown: str = ""

    @property
    def microbatches(self) -> int:
        """A step's, on each rank."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def turns(self) -> int:
        """Passes of a step that follow each other: each microbatch through a stage, and from stage to stage. In each
        all ranks wait for the slowest."""
        return self.microbatches + self.pp - 1

    @property
    def waits(self) -> int:
        """Messages of a step that a rank waits for one after another, and that may come from another node: of each
        microbatch two of an inner stage, of two stages one; two where nodes share tensor parallelism."""
        each = 2 if self.tp > self.per_node or self.pp > 2 else self.pp - 1
        return self.microbatches * each

    @property
    def plan_text(self) -> str:
        """The plan in a few words."""
        words = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "vp": self.vp, "cp": self.cp, "ep": self.ep}
        parts = [f"{name}{count}" for name, count in words.items() if count > 1 or name == "dp"]
        parts += [f"zero{self.zero}", f"mbs{self.micro_batch}×{self.microbatches}"]
        return " ".join([*parts, *([f"recompute {self.recompute}"] if self.recompute != "none" else [])])


class UnknownError(ValueError):
    """A value that is not understood."""


def read_rows(path: Path, models: Path | None = None) -> list[Row]:
    """The rows of a file, plain or gzipped, each of its lines one. Raises ValueError for columns of neither form."""
    columns, records = _table(path)
    place = path.name.partition(".")[0]
    if columns >= GRID_COLUMNS:
        return [_grid_row(f"{place}:{number}", record) for number, record in enumerate(records, 2)]
    if columns >= TRAINING_COLUMNS:
        known = read_models(models or path.parent / "models.csv")
        rows = [_training_row(f"{place}:{number}", record, known) for number, record in enumerate(records, 2)]
        return _named_apart(rows, place)
    raise ValueError(
        f"{path}: expected the columns of training iterations ({', '.join(sorted(TRAINING_COLUMNS))} and others) or of "
        f"a grid ({', '.join(sorted(GRID_COLUMNS))} and others), found {sorted(columns)}"
    )


def _named_apart(rows: Sequence[Row], place: str) -> list[Row]:
    """Rows of one name are told apart by their lines: errors are kept by names."""
    counts = Counter(row.id for row in rows)
    return [
        row if counts[row.id] == 1 else replace(row, id=f"{row.id} ({place}:{number})")
        for number, row in enumerate(rows, 2)
    ]


def _table(path: Path) -> tuple[set[str], list[dict[str, str]]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="")
        records = [{name: (value or "").strip() for name, value in record.items() if name} for record in reader]
        return {name.strip() for name in reader.fieldnames or () if name}, records


def read_models(path: Path) -> dict[str, Sizes]:
    """By name; none where there is no such file."""
    if not path.exists() and not path.with_name(path.name + ".gz").exists():
        return {}
    found = {}
    for record in _table(path if path.exists() else path.with_name(path.name + ".gz"))[1]:
        try:
            found[record["model"]] = _sizes(record)
        except (KeyError, ValueError):
            continue
    return found


def _sizes(record: Mapping[str, str]) -> Sizes:
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
    numbers = [int(float(record[name])) for name in names]
    of_experts = {name: int(float(record.get(name) or 0)) for name in EXPERT_COLUMNS}
    return Sizes(
        *numbers, bool(FLAGS[record["gated_mlp"]]), int(float(record["vocab"])), bool(FLAGS[record["tied_embeddings"]]),
        of_experts["experts"], "encoder" not in record.get("notes", ""), record.get("notes", ""),
        of_experts["top_k"], of_experts["moe_ffn"], of_experts["shared_expert_ffn"], of_experts["dense_layers"],
    )  # fmt: skip


# A grid of plans ----------------------------------------


class _Reader:
    """Reads each column of a record by itself, so that all reasons why it says nothing are told."""

    def __init__(self, record: Mapping[str, str]) -> None:
        self.record, self.reasons = record, list[str]()

    def __call__(self, name: str, how: Callable[[str], Any], default: Any) -> Any:
        text = self.record.get(name, "")
        try:
            return how(text)
        except UnknownError as error:
            self.reasons.append(f"{name}: {error}" if name in self.record else f"{name}: no such column")
        except Exception:  # what a file may say has no end, and none of it may end the other rows
            self.reasons.append(f"{name} {text!r}" if name in self.record else f"{name}: no such column")
        return default


def _grid_row(name: str, record: Mapping[str, str]) -> Row:
    """Its memory is in GiB, as what ZeRO saves on many ranks says, and that of rank 0, whatever last stages hold."""
    read, model = _Reader(record), record.get("model", "")
    if model not in GRID:
        read.reasons.append(f"no sizes known of the model {model!r}")
    counts = {column: read(column, _count, 1) for column in ("nodes", "dp", "tp", "pp", "mbs", "grad_acc")}
    sequences = counts["dp"] * counts["mbs"] * counts["grad_acc"]  # as it ran, whatever the batch that is stated
    other = "" if record.get("gbs_sequences", "") in ("", f"{sequences}") else f", {sequences} sequences"
    speed = read("tokens_s", _speed, 0.0) if record.get("mfu_percent", "any") else 0.0
    seq = read("seq", _count, 4096) if record.get("seq") else 4096
    row = Row(
        id=name, source=f"playbook {model}", framework="nanotron", gpu="H100-SXM5-80GB",
        gpus=counts["nodes"] * DEVICES_PER_NODE, per_node=DEVICES_PER_NODE, model=model, sizes=GRID.get(model),
        precision="bf16", seq=seq, micro_batch=counts["mbs"], global_batch=sequences, dp=counts["dp"], tp=counts["tp"],
        pp=counts["pp"], zero=read("zero", _kind_of_zero, 0), sequence_parallel=counts["tp"] > 1,
        measured_s=sequences * seq / speed if speed else None, memory_bytes=_memory(record, "memory_gb"),
        tells_first=True, cell=f"{model}, {counts['nodes']} nodes{other}", network="efa",
    )  # fmt: skip
    return replace(row, unknown="; ".join([*read.reasons, *_uneven(row, read.reasons)]))


# Training iterations ----------------------------------------


def _training_row(name: str, record: Mapping[str, str], models: Mapping[str, Sizes]) -> Row:
    """name: of a row that has none."""
    read, later = _Reader(record), re.search(LATER_CHUNKS, record.get("notes", ""))
    sizes = read("model", lambda model: read_sizes(model, record, models), None)
    kind, among = read("dp_sharding", _sharding, (0, 1))
    recompute, again = read("recompute", _recompute, ("none", ()))
    row = Row(
        id=record.get("id") or name, source=record.get("source", ""), framework=record.get("framework", ""),
        gpu=record.get("gpu", ""), gpus=read("gpus", _count, 1), per_node=read("gpus_per_node", _per_node, 1),
        model=record.get("model", ""), sizes=sizes, precision=read("precision", _precision, "bf16"),
        seq=read("seq", _count, 1), micro_batch=read("micro_batch", _count, 1),
        global_batch=read("global_batch", _count, 1), dp=1, tp=read("tp", _count, 1), pp=read("pp", _count, 1),
        vp=int(later[1]) if later else read("vp", _optional, 1),
        cp=read("cp", _optional, 1), ep=read("ep", _optional, 1),
        etp=read("etp", _count, 0) if record.get("etp") else 0,
        sequence_parallel=bool(FLAGS.get(record.get("sequence_parallel", ""))), zero=kind, hsdp=among,
        recompute=recompute, again=again, layers=read("other_settings", lambda _: _stage_layers(record), None),
        memory_bytes=_memory(record, "memory_GiB"),
        other=" ".join(record.get(column, "") for column in ("other_settings", "notes", "task")),
        is_compiled=says_compiled(f"{record.get('framework', '')} {record.get('other_settings', '')}"),
    )  # fmt: skip
    row = replace(row, dp=read("dp", lambda text: _data_parallel(text, row), 1))
    row = replace(row, measured_s=read("step_time_s", lambda text: _step_seconds(text, record, row), None))
    read.reasons += _offloaded(record)
    return replace(row, unknown="; ".join([*read.reasons, *_uneven(row, read.reasons)]))


def says_compiled(text: str) -> bool:
    """Whether settings say that PyTorch compiles what runs."""
    found = re.search(COMPILES, text, re.IGNORECASE) is not None
    return found and not re.search(NOT_COMPILED, text, re.IGNORECASE)


def _offloaded(record: Mapping[str, str]) -> list[str]:
    text = record.get("offload", "")
    is_stated = text not in ("", "none", "not stated") and re.search(r"[1-9]", text)
    return ["offload: of states to the host"] if is_stated else []


def _data_parallel(text: str, row: Row) -> int:
    """Where it is not stated, the devices that the other dimensions leave."""
    return row.gpus // (row.tp * row.pp * row.cp) if text == "" else _count(text)


def _step_seconds(text: str, record: Mapping[str, str], row: Row) -> float:
    """Where it is not stated, from tokens a second and device."""
    speed = record.get("tokens_per_s_per_gpu", "")
    if text == "" and speed:
        return row.global_batch * row.seq / (_positive(speed) * row.gpus)
    return _positive(text)


def _uneven(row: Row, reasons: Sequence[str]) -> list[str]:
    if reasons:
        return []
    if row.dp * row.tp * row.pp * row.cp != row.gpus:
        return [f"{row.gpus} GPUs are not dp × tp × pp × cp = {row.dp} × {row.tp} × {row.pp} × {row.cp}"]
    if row.gpus > row.per_node and row.gpus % row.per_node:
        return [f"{row.gpus} GPUs are not whole nodes of {row.per_node}"]
    if row.global_batch % (row.dp * row.micro_batch):
        return [f"a global batch of {row.global_batch} is not of whole micro batches"]
    return []


def read_sizes(model: str, record: Mapping[str, str], models: Mapping[str, Sizes]) -> Sizes:
    """Of the model's row, or of a name that says them. Raises UnknownError where neither does."""
    known = models.get(model) or _named_sizes(model, record.get("other_settings", ""))
    if known is None:
        remedy = "" if models else ", and no models.csv beside the file: name one by --models"
        raise UnknownError(f"no sizes known of the model {model!r}{remedy}")
    vocab = -(-known.vocab // 128) * 128  # softwares pad it, or products would be slow
    return replace(known, vocab=vocab)


def _named_sizes(model: str, other: str) -> Sizes | None:
    """Of Megatron-LM's tests."""
    pattern = r"mcore-test L(\d+) h(\d+) heads(\d+) kv(\d+) ffndefault( experts(\d+)( topk(\d+))?)?"
    found = re.match(pattern, model)
    if not found:
        return None
    layers, hidden, heads, kv = (int(found[number]) for number in range(1, 5))
    vocab = re.search(r'"vocab-size":(\d+)', other)
    return Sizes(
        layers, hidden, heads, kv, hidden // heads, 4 * hidden, '"swiglu":true' in other,
        int(vocab[1]) if vocab else 50257, "untie-embeddings" not in other, int(found[6] or 0),
        chosen_experts=int(found[8] or 1), expert_ffn=4 * hidden,
    )  # fmt: skip


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+(\.0+)?", text) or not float(text):
        raise UnknownError(f"expected one number, found {text!r}")
    return int(float(text))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise UnknownError(f"expected a positive number, found {text!r}")
    return value


def _speed(text: str) -> float:
    """Nothing where a run has none."""
    return _positive(text) if text and float(text) else 0.0


def _kind_of_zero(text: str) -> int:
    if text not in ("0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"):
        raise UnknownError(f"expected 0 to 3, found {text!r}")
    return int(float(text))


def _per_node(text: str) -> int:
    """Where it is not stated, as many as most nodes have."""
    return DEVICES_PER_NODE if text == "" else _count(text)


def _optional(text: str) -> int:
    return _count(text) if text else 1


def _precision(text: str) -> str:
    """The narrowest that it names. TF32 is what is said to be used, not what may be."""
    lower = text.lower()
    for name, words in PRECISIONS.items():
        if re.search(words, lower):
            return name
    raise UnknownError(f"expected {', '.join(PRECISIONS)}, found {text!r}")


def _sharding(text: str) -> tuple[int, int]:
    """The kind of ZeRO, and among how many neighbours (1: all)."""
    lower = text.lower()
    if "per stage" in lower:
        kinds = {tuple(map(int, stage)) for stage in json.loads(lower.partition(":")[2])}
        if len(kinds) > 1:
            raise UnknownError(f"of stages that differ: {text}")
        return {(0, 0, 0): 0, (0, 0, 1): 1, (0, 1, 1): 2, (1, 1, 1): 3}[kinds.pop()], 1
    among = re.search(r"(?:over|of|shard(?:s)?[ =]) ?(\d+)", lower)
    number = int(among[1]) if among else 1
    if "shard_grad_op" in lower:
        return 2, number
    named = re.search(r"zero[a-z_ =:-]*(\d)", lower)
    if named and "fsdp" not in lower:
        return min(3, int(named[1])), number
    if "hsdp" in lower or "hybrid" in lower:
        return 3, number if number > 1 else DEVICES_PER_NODE
    if "fsdp" in lower or "fully_shard" in lower:
        return 3, number
    if lower in ("", "none", "ddp", "not stated", "dp") or "ddp" in lower or lower.startswith("none"):
        return 0, 1
    if "distributed optimizer" in lower:
        return 1, number
    raise UnknownError(f"expected a kind of ZeRO, found {text!r}")


def _recompute(text: str) -> tuple[str, tuple[int, ...]]:
    """What is computed again, and of how many layers of each stage where not of all. Not stated is taken for none."""
    lower = text.lower()
    if lower in ("", "none", "not stated", "no", "false", "0") or lower.startswith("none"):
        return "none", ()
    if lower.startswith("selective") or "core_attn" in lower:
        return ("block" if "attn" in lower or "attention" in lower else "selective"), ()
    some = re.fullmatch(r"full, (\d+) layers a stage|full/block/(\d+)", lower)
    if some:
        return "none", (int(some[1] or some[2]),)
    if re.fullmatch(r"(full|all)(/uniform/\d+|/.*/1)?( .*)?|full activation.*|activation checkpointing", lower):
        return "full", ()
    layers = re.search(r"checkpointed layers a stage (\[.*\])", lower)
    if layers:
        return "none", tuple(json.loads(layers[1]))
    raise UnknownError(f"expected none, selective or full, found {text!r}")


def _stage_layers(record: Mapping[str, str]) -> tuple[int, ...] | None:
    """Blocks of each stage; those of a table that counts embedding and head as layers are without them."""
    other = record.get("other_settings", "")
    found = re.search(r"layers a stage (\[[\d, ]+\])", other)
    if not found:
        return None
    layers = json.loads(found[1])
    if "are layers of their own" in other:
        layers[0] -= 1
        layers[-1] -= 1
    return tuple(layers) if len(layers) > 1 else None


def _memory(record: Mapping[str, str], column: str) -> float | None:
    """None where it is not stated, or no number."""
    try:
        return _positive(record.get(column, "")) * GIB
    except ValueError:
        return None
