"""Measured training iterations, read from CSV files: one configuration and its step time a row.

Two forms are known by their columns: that of `training_iterations.csv` (its models are in `models.csv` beside it, or
given), and that of a measured grid of plans (model, nodes, dp, tp, pp, zero, mbs, grad_acc, gbs_sequences, tokens_s,
memory_gb), whose models are `GRID`. A value that is not understood makes its row one that is listed with the reason.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30
DEVICES_PER_NODE = 8
NVLINK_DOMAIN = 64  # of a GB200 or GB300 rack's 72, those that a power of two of ranks uses
FLAGS = {"": None, "0": False, "0.0": False, "1": True, "1.0": True}


@dataclass(frozen=True)
class Sizes:
    """What `models.csv` says of a model."""

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


GRID = {
    "1B": Sizes(16, 2048, 32, 32, 64, 8192, True, 131072, True),
    "3B": Sizes(28, 3072, 32, 32, 96, 8192, True, 131072, True),
    "8B": Sizes(32, 4096, 32, 32, 128, 14336, True, 131072, True),
    "80B": Sizes(80, 8192, 64, 64, 128, 28672, True, 131072, True),
}
"""The models of the grid: the first two as its description has them, the others as the same software's examples do."""


@dataclass(frozen=True)
class Row:
    """One measured iteration. measured_s: None of a run that did not finish. hsdp: among how many ranks ZeRO shards,
    1 for all. again: of each stage (or one number for all) how many layers are computed again, where recompute does not
    say it of all. layers: blocks of each stage, where they are not even. tells_first: memory_bytes are those of rank 0
    and not of the fullest. unknown: why nothing can be said of it."""

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
    sequence_parallel: bool = False
    zero: int = 0
    hsdp: int = 1
    recompute: str = "none"
    again: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    measured_s: float | None = None
    memory_bytes: float | None = None
    tells_first: bool = False
    cell: str = ""
    network: str = ""  # between nodes, where it is known not to be the usual one
    other: str = field(default="", compare=False)
    unknown: str = ""

    @property
    def microbatches(self) -> int:
        """A step's, on each rank."""
        return self.global_batch // (self.dp * self.micro_batch)

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
    """The rows of a file, plain or gzipped. Raises ValueError for columns of neither form."""
    records = list(_records(path))
    columns = set(records[0]) if records else set()
    if {"nodes", "grad_acc", "memory_gb"} <= columns:
        return [_grid_row(path, number, record) for number, record in enumerate(records, 2)]
    if {"framework", "step_time_s", "global_batch"} <= columns:
        known = read_models(models or path.parent / "models.csv")
        return [_training_row(record, known) for record in records]
    raise ValueError(f"{path}: expected the columns of training iterations or of a grid, found {sorted(columns)}")


def _records(path: Path) -> Iterator[dict[str, str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
        for record in csv.DictReader(file):
            yield {name: (value or "").strip() for name, value in record.items() if name}


def read_models(path: Path) -> dict[str, Sizes]:
    """By name; none where there is no such file."""
    if not path.exists() and not path.with_name(path.name + ".gz").exists():
        return {}
    found = {}
    for record in _records(path if path.exists() else path.with_name(path.name + ".gz")):
        try:
            found[record["model"]] = _sizes(record)
        except (KeyError, ValueError):
            continue
    return found


def _sizes(record: Mapping[str, str]) -> Sizes:
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
    numbers = [int(float(record[name])) for name in names]
    return Sizes(
        *numbers, bool(FLAGS[record["gated_mlp"]]), int(float(record["vocab"])), bool(FLAGS[record["tied_embeddings"]]),
        int(float(record.get("experts") or 0)), "encoder" not in record.get("notes", ""), record.get("notes", ""),
    )  # fmt: skip


# A grid of plans ----------------------------------------


def _grid_row(path: Path, number: int, record: Mapping[str, str]) -> Row:
    """Its memory is in GiB, as what ZeRO saves on many ranks says, and that of rank 0, whatever last stages hold."""
    counts = {name: int(float(record[name])) for name in ("nodes", "dp", "tp", "pp", "zero", "mbs", "grad_acc")}
    sequences = counts["dp"] * counts["mbs"] * counts["grad_acc"]  # as it ran, whatever the batch that is stated
    other = "" if sequences == int(float(record["gbs_sequences"])) else f", {sequences} sequences"
    speed = float(record["tokens_s"] or 0) if record.get("mfu_percent") else 0.0
    seq = int(float(record.get("seq") or 4096))
    return Row(
        id=f"{path.name.partition('.')[0]}:{number}", source=f"playbook {record['model']}", framework="nanotron",
        gpu="H100-SXM5-80GB", gpus=counts["nodes"] * DEVICES_PER_NODE, per_node=DEVICES_PER_NODE,
        model=record["model"], sizes=GRID.get(record["model"]), precision="bf16", seq=seq, micro_batch=counts["mbs"],
        global_batch=sequences, dp=counts["dp"], tp=counts["tp"], pp=counts["pp"], zero=counts["zero"],
        sequence_parallel=counts["tp"] > 1, measured_s=sequences * seq / speed if speed else None,
        memory_bytes=float(record["memory_gb"]) * GIB if record.get("memory_gb") else None, tells_first=True,
        cell=f"{record['model']}, {counts['nodes']} nodes{other}", network="efa",
        unknown="" if record["model"] in GRID else f"no sizes known of the model {record['model']!r}",
    )  # fmt: skip


# Training iterations ----------------------------------------


def _training_row(record: Mapping[str, str], models: Mapping[str, Sizes]) -> Row:
    """Every column is read by itself, so that the reasons of a row that cannot be predicted are all told."""
    reasons: list[str] = []

    def read(name: str, how: Any, default: Any) -> Any:
        try:
            return how(record.get(name, ""))
        except (UnknownError, ValueError, KeyError) as error:
            reasons.append(f"{name}: {error}" if isinstance(error, UnknownError) else f"{name} {record.get(name)!r}")
            return default

    sizes = read_sizes(record, models)
    if sizes is None:
        reasons.append(f"no sizes known of the model {record.get('model')!r}")
    later = re.search(r"VP given as NA in this release, (\d+) in the next", record.get("notes", ""))
    kind, among = read("dp_sharding", _sharding, (0, 1))
    recompute, again = read("recompute", _recompute, ("none", ()))
    row = Row(
        id=record.get("id", ""), source=record.get("source", ""), framework=record["framework"], gpu=record["gpu"],
        gpus=read("gpus", _count, 1), per_node=read("gpus_per_node", _count, 1), model=record["model"], sizes=sizes,
        precision=read("precision", _precision, "bf16"), seq=read("seq", _count, 1),
        micro_batch=read("micro_batch", _count, 1), global_batch=read("global_batch", _count, 1),
        dp=read("dp", _count, 1), tp=read("tp", _count, 1), pp=read("pp", _count, 1),
        vp=int(later[1]) if later else read("vp", _optional, 1),
        cp=read("cp", _optional, 1), ep=read("ep", _optional, 1),
        sequence_parallel=bool(FLAGS.get(record.get("sequence_parallel", ""))), zero=kind, hsdp=among,
        recompute=recompute, again=again, layers=_stage_layers(record),
        measured_s=read("step_time_s", float, None), memory_bytes=_memory(record),
        other=" ".join((record.get("other_settings", ""), record.get("notes", ""), record.get("task", ""))),
    )  # fmt: skip
    if record.get("offload") not in ("", "none", "not stated", None) and re.search(r"[1-9]", record["offload"]):
        reasons.append("offload: of states to the host")
    return replace(row, unknown="; ".join([*reasons, *_uneven(row, reasons)]))


def _uneven(row: Row, reasons: Sequence[str]) -> list[str]:
    if reasons:
        return []
    if row.dp * row.tp * row.pp * row.cp != row.gpus:
        return [f"{row.gpus} GPUs are not dp × tp × pp × cp = {row.dp} × {row.tp} × {row.pp} × {row.cp}"]
    if row.global_batch % (row.dp * row.micro_batch):
        return [f"a global batch of {row.global_batch} is not of whole micro batches"]
    return []


def read_sizes(record: Mapping[str, str], models: Mapping[str, Sizes]) -> Sizes | None:
    """Of the model's row, or of a name that says them."""
    name = record.get("model", "")
    known = models.get(name)
    if known is None:
        found = re.match(r"mcore-test L(\d+) h(\d+) heads(\d+) kv(\d+) ffndefault( experts(\d+))?", name)
        if not found:
            return None
        layers, hidden, heads, kv = (int(found[number]) for number in range(1, 5))
        other = record.get("other_settings", "")
        vocab = re.search(r'"vocab-size":(\d+)', other)
        known = Sizes(
            layers, hidden, heads, kv, hidden // heads, 4 * hidden, '"swiglu":true' in other,
            int(vocab[1]) if vocab else 50257, "untie-embeddings" not in other, int(found[6] or 0),
        )  # fmt: skip
    vocab = -(-known.vocab // 128) * 128  # softwares pad it, or products would be slow
    return replace(known, vocab=vocab)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+(\.0+)?", text):
        raise UnknownError(f"expected one number, found {text!r}")
    return int(float(text))


def _optional(text: str) -> int:
    return _count(text) if text else 1


def _precision(text: str) -> str:
    for name in ("fp8", "bf16", "fp16", "fp32"):
        if name in text.replace("mxfp8", "fp8"):
            return name
    raise UnknownError(f"expected fp8, bf16, fp16 or fp32, found {text!r}")


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
    named = re.search(r"zero[ -]?(\d)", lower)
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
    some = re.fullmatch(r"full, (\d+) layers a stage", lower)
    if some:
        return "none", (int(some[1]),)
    if re.fullmatch(r"(full|all)(/.*/1)?( .*)?|full activation.*|activation checkpointing", lower):
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


def _memory(record: Mapping[str, str]) -> float | None:
    try:
        return float(record.get("memory_GiB", "")) * GIB
    except ValueError:
        return None
