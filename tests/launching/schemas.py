"""What clusters take, as structural schemas: the fields that a job may have, and of which types and bounds.

A custom resource's schema is structural: the API server refuses wrong types and bounds, and drops (or refuses, under
strict validation, which `kubectl apply` asks for) fields that it does not have. So nothing beside the fields is allowed
here.

Facts from the Go types of which the CRDs are generated:
- TrainJob: kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go at 0015772c (TrainJobSpec, RuntimeRef,
  Trainer; the rules on metadata.name; MaxItems and MaxLength of each list).
- PyTorchJob: kubeflow/training-operator, pkg/apis/kubeflow.org/v1/pytorch_types.go at 2f18ab7a (PyTorchJobSpec: the
  replica types, nprocPerNode is a string), common_types.go at 186ac6c6 (ReplicaSpec, RestartPolicy).
- Pods: k8s.io/api/core/v1 (PodSpec, Container, ResourceRequirements, Volume), of which those that we write.
"""

from __future__ import annotations

from typing import Any


def closed(required: str, **fields: Any) -> dict[str, Any]:
    """An object of these fields alone."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def strings(most: int | None = None, longest: int | None = None) -> dict[str, Any]:
    item = {"type": "string"} | ({} if longest is None else {"maxLength": longest})
    return {"type": "array", "items": item} | ({} if most is None else {"maxItems": most})


TEXT = {"type": "string"}
SHORT = {"type": "string", "minLength": 1, "maxLength": 253}
COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}  # RFC 1035
QUANTITIES = {
    "type": "object",
    "propertyNames": {"pattern": "^([a-z0-9.-]+/)?[A-Za-z0-9._-]+$"},
    "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9.]+(m|[kKMGT]i?)?$"}]},
}
RESOURCES = closed("", limits=QUANTITIES, requests=QUANTITIES)
METADATA = closed("name", name=LABEL)

TRAIN_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
    kind={"const": "TrainJob"},
    metadata=METADATA,
    spec=closed(
        "runtimeRef",
        runtimeRef=closed("name", name=SHORT, apiGroup={"const": "trainer.kubeflow.org"},
                          kind={"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]}),
        trainer=closed("", image={"type": "string", "maxLength": 500}, command=strings(128, 65536),
                       args=strings(128, 65536), numNodes=COUNT, numProcPerNode=COUNT, resourcesPerNode=RESOURCES),
    ),
)  # fmt: skip

VOLUME = closed(
    "name", name=LABEL, emptyDir=closed("", medium={"enum": ["", "Memory"]}),
    persistentVolumeClaim=closed("claimName", claimName=SHORT),
)  # fmt: skip
CONTAINER = closed(
    "name image", name={"const": "pytorch"}, image=TEXT, command=strings(), args=strings(), resources=RESOURCES,
    volumeMounts={"type": "array", "items": closed("name mountPath", name=LABEL, mountPath=TEXT)},
)  # fmt: skip
POD = closed(
    "containers",
    containers={"type": "array", "minItems": 1, "items": CONTAINER}, volumes={"type": "array", "items": VOLUME},
)  # fmt: skip
REPLICA = closed(
    "template", replicas=COUNT, template=closed("spec", spec=POD),
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
)  # fmt: skip

PYTORCH_JOB = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=METADATA,
    spec=closed(
        "pytorchReplicaSpecs",
        nprocPerNode={"type": "string", "pattern": "^(auto|cpu|gpu|[0-9]+)$"},
        pytorchReplicaSpecs=closed("Master", Master=REPLICA, Worker=REPLICA),
    ),
)

#: options of sbatch that its manual lists and that are useful in a job of ranks, with whether they have a value
SBATCH = {
    "job-name": True, "nodes": True, "ntasks-per-node": True, "gpus-per-node": True, "cpus-per-task": True,
    "output": True, "error": True, "signal": True, "requeue": False, "no-requeue": False, "partition": True,
    "account": True, "qos": True, "time": True, "mem": True, "exclusive": None, "constraint": True, "exclude": True,
    "nodelist": True, "reservation": True, "mail-type": True, "mail-user": True, "comment": True, "dependency": True,
    "array": True, "begin": True, "deadline": True, "licenses": True, "switches": True, "export": True, "chdir": True,
}  # fmt: skip
