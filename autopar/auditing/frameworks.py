"""The frameworks whose files are read and written, and which one a file is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.auditing import accelerate, deepspeed, megatron, nanotron, torchtitan
from autopar.auditing.job import JobFile, TrainingJob
from autopar.auditing.values import yaml_values
from autopar.errors import PlanError

Read = Callable[[str, str], JobFile]
Changed = Callable[[TrainingJob, TrainingJob, JobFile], dict[str, Any]]


class Framework(NamedTuple):
    """How a framework's file is read, and what says another job in it.

    The jobs that it can express: zeros: stages of ZeRO; tensor, stages, contexts, experts: whether it has such degrees;
    recomputations. form: of its file, as in `values.scalar_text`.
    """

    form: str
    read: Read
    changes: Changed
    zeros: tuple[int, ...]
    recomputations: tuple[str, ...] = ("none", "full")
    has_tensor: bool = True
    has_stages: bool = True
    has_contexts: bool = True


FRAMEWORKS: Mapping[str, Framework] = {
    "torchtitan": Framework("toml", torchtitan.read, torchtitan.changes, (3, 2, 0), ("none", "selective", "full")),
    "megatron": Framework("shell", megatron.read, megatron.changes, (1, 0)),
    "megatron-yaml": Framework("yaml", megatron.read_yaml, megatron.changes, (1, 0)),
    "nanotron": Framework("yaml", nanotron.read, nanotron.changes, (1, 0), has_contexts=False),
    "deepspeed": Framework(
        "json", deepspeed.read, deepspeed.changes, (3, 2, 1, 0), ("none",), False, False, False
    ),
    "accelerate": Framework("yaml", accelerate.read, accelerate.changes, (3, 2), has_stages=False),
}  # fmt: skip


def read_file(path: Path | str, framework: str | None = None) -> tuple[JobFile, Framework]:
    """A file as a job, and whose it is. Raises PlanError where it is of none."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"expected {path} as text, found bytes that are no UTF-8") from error
    return read_text(path.name, text, framework)


def read_text(name: str, text: str, framework: str | None = None) -> tuple[JobFile, Framework]:
    """The same of a text that is called so."""
    kind = framework or recognised(name, text)
    if kind == "megatron" and Path(name).suffix in (".yaml", ".yml"):
        kind = "megatron-yaml"
    if kind not in FRAMEWORKS:
        raise PlanError(f"expected a framework as one of {', '.join(FRAMEWORKS)}, found {kind!r}")
    found = FRAMEWORKS[kind]
    file = found.read(name, text)
    return replace(file, job=replace(file.job, framework=file.job.framework)), found


def recognised(name: str, text: str) -> str:
    """The framework of a file, by its ending, and of YAML by its keys."""
    suffix = Path(name).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return _of_yaml(name, text)
    by_suffix = {
        ".toml": "torchtitan",
        ".json": "deepspeed",
        ".sh": "megatron",
        ".slurm": "megatron",
        ".sbatch": "megatron",
    }
    if suffix in by_suffix:
        return by_suffix[suffix]
    if "--num-layers" in text or "--tensor-model-parallel-size" in text:
        return "megatron"
    raise PlanError(
        f"expected torchtitan's TOML, Megatron's script or YAML, DeepSpeed's JSON, or Accelerate's or nanotron's YAML, "
        f"found {name}; name its --framework"
    )


def _of_yaml(name: str, text: str) -> str:
    keys = set(yaml_values(text, name))
    if any(key.startswith(("parallelism.", "tokens.")) for key in keys):
        return "nanotron"
    if any(key.rpartition(".")[2].strip("-").replace("-", "_") == "tensor_model_parallel_size" for key in keys):
        return "megatron"
    if keys & {"distributed_type", "num_processes", "compute_environment"} or any(
        k.startswith("fsdp_config") for k in keys
    ):
        return "accelerate"
    raise PlanError(f"expected keys of Accelerate, nanotron or Megatron in {name}, found none; name its --framework")
