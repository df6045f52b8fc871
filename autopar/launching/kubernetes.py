"""Jobs for Kubernetes: Kubeflow Trainer's TrainJob, or the PyTorchJob of its Training Operator before.

Both set torchrun's PET_* variables in each pod (nodes, ranks a node, this node's number, the first one's address), so
that the command is torchrun with the script alone. Fields are those of trainer.kubeflow.org/v1alpha1 (spec.runtimeRef,
spec.trainer) and kubeflow.org/v1 (spec.nprocPerNode, spec.pytorchReplicaSpecs).
"""

from __future__ import annotations

from typing import Any

from autopar.errors import PlanError
from autopar.launching.job import SavedJob
from autopar.launching.yaml_text import yaml_text

_PYTORCH = "pytorch"  # the container that the operator looks for
_LONGEST = 63  # letters of a pod's host name, which is the job's name and which of its pods it is
_MOST_WORDS, _LONGEST_WORD, _LONGEST_IMAGE = 128, 65_536, 500  # of a TrainJob's trainer
_HEADING = """Start with: kubectl apply -f, on this file
The image has autopar and torch; {folder} is in it, or on a volume that all pods mount there."""


def train_job(job: SavedJob, image: str, runtime: str = "torch-distributed") -> str:
    """The text of a TrainJob. runtime: a ClusterTrainingRuntime, which also says what volumes pods mount."""
    _check_name(job, f"-node-0-{job.nodes - 1}-00000")
    _check_lengths(image, _command(job))
    data = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {
                "image": image, "command": _command(job), "numNodes": job.nodes, "numProcPerNode": job.per_node,
                "resourcesPerNode": _resources(job),
            },
        },
    }  # fmt: skip
    return yaml_text(data, _HEADING.format(folder=job.folder))


def pytorch_job(job: SavedJob, image: str, claim: str | None = None) -> str:
    """The text of a PyTorchJob. claim: of a volume that is mounted at the program's folder."""
    _check_name(job, f"-worker-{job.nodes - 1}")
    replicas = {"Master": _replica(job, image, 1, claim)}
    if job.nodes > 1:
        replicas["Worker"] = _replica(job, image, job.nodes - 1, claim)
    data = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {"nprocPerNode": str(job.per_node), "pytorchReplicaSpecs": replicas},
    }
    return yaml_text(data, _HEADING.format(folder=job.folder))


def _check_name(job: SavedJob, rest: str) -> None:
    if len(job.name) + len(rest) > _LONGEST:
        raise PlanError(
            f"expected a name of at most {_LONGEST - len(rest)} letters, to which Kubernetes adds {rest!r} for pods, "
            f"found {job.name!r}; take --name"
        )


def _check_lengths(image: str, command: list[str]) -> None:
    if len(image) > _LONGEST_IMAGE:
        raise PlanError(f"expected an image of at most {_LONGEST_IMAGE} letters, found {len(image)}")
    if len(command) > _MOST_WORDS or max(map(len, command)) > _LONGEST_WORD:
        raise PlanError(
            f"expected a command of at most {_MOST_WORDS} words of {_LONGEST_WORD:,} letters, which is what a TrainJob "
            f"takes, found {len(command)} of up to {max(map(len, command)):,}; give arguments in a file of the image"
        )


def _command(job: SavedJob) -> list[str]:
    """$(NAME) would be a variable of the container; $$(NAME) is $(NAME)."""
    given = [job.path, *job.arguments]
    return ["torchrun", f"--nproc-per-node={job.per_node}", *(text.replace("$(", "$$(") for text in given)]


def _resources(job: SavedJob) -> dict[str, Any]:
    if job.on_gpus:
        return {"limits": {"nvidia.com/gpu": job.per_node}}
    return {"requests": {"cpu": job.per_node}}


def _replica(job: SavedJob, image: str, count: int, claim: str | None) -> dict[str, Any]:
    """So many pods. What NCCL and loaders share is in memory, of which a container has 64 MB by itself."""
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if claim is not None:
        mounts.append({"name": "program", "mountPath": str(job.folder)})
        volumes.append({"name": "program", "persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": _PYTORCH, "image": image, "command": _command(job), "resources": _resources(job),
        "volumeMounts": mounts,
    }  # fmt: skip
    spec = {"containers": [container], "volumes": volumes}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": spec}}
