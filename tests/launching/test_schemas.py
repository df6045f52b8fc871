"""What `autopar launch` writes is what clusters take: held against the schemas of their jobs."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from autopar.errors import PlanError
from autopar.launching import batch_script, pytorch_job, ray_script, train_job
from autopar.launching.job import SavedJob
from tests.launching.schemas import PYTORCH_JOB, SBATCH, TRAIN_JOB

ODD = ("--text", 'it\'s a "file" of $(HOME)', "--steps", "3", "# none", "a: b\n- c", "")
JOBS = [
    SavedJob(name, Path("/data/a folder"), "train.py", nodes, per_node, on_gpus, arguments)
    for name, nodes, per_node, on_gpus, arguments in (
        ("run", 1, 1, False, ()), ("run-2", 1, 8, True, ODD), ("a" * 40, 64, 8, True, ()), ("b", 2, 4, False, ODD),
    )
]  # fmt: skip
JOB_IDS = [f"{job.nodes}x{job.per_node} {'gpus' if job.on_gpus else 'cpus'}" for job in JOBS]


def refused(data: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(data)]


@pytest.mark.parametrize("job", JOBS, ids=JOB_IDS)
def test_a_train_job_is_of_its_schema(job: SavedJob) -> None:
    data = yaml.safe_load(train_job(job, "registry/image:1"))
    assert refused(data, TRAIN_JOB) == []
    assert refused(yaml.safe_load(train_job(job, "i", runtime="own-runtime")), TRAIN_JOB) == []


@pytest.mark.parametrize("claim", [None, "shared.data"])
@pytest.mark.parametrize("job", JOBS, ids=JOB_IDS)
def test_a_pytorch_job_is_of_its_schema(job: SavedJob, claim: str | None) -> None:
    data = yaml.safe_load(pytorch_job(job, "registry/image:1", claim=claim))
    assert refused(data, PYTORCH_JOB) == []
    replicas = data["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 and sum(one["replicas"] for one in replicas.values()) == job.nodes
    for one in replicas.values():
        pod = one["template"]["spec"]
        names = [volume["name"] for volume in pod["volumes"]]
        assert len(set(names)) == len(names)
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(names)


@pytest.mark.parametrize(
    ("schema", "path", "value"),
    [
        (TRAIN_JOB, ("spec", "trainer", "numProcPerNode"), "4"), (TRAIN_JOB, ("metadata", "name"), "7-days"),
        (TRAIN_JOB, ("spec", "trainer", "nproc"), 4), (PYTORCH_JOB, ("spec", "nprocPerNode"), 4),
        (PYTORCH_JOB, ("spec", "pytorchReplicaSpecs", "Master", "restartPolicy"), "on failure"),
        (PYTORCH_JOB, ("spec", "pytorchReplicaSpecs", "Driver"), {}),
    ],
)  # fmt: skip
def test_the_schemas_refuse_what_clusters_do(schema: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    write = train_job if schema is TRAIN_JOB else pytorch_job
    data = holder = yaml.safe_load(write(JOBS[1], "image"))
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    assert refused(data, schema)


def test_more_words_than_a_train_job_takes_are_refused() -> None:
    job = SavedJob("run", Path("/data"), "train.py", 1, 1, False, ("x",) * 125)
    assert refused(yaml.safe_load(train_job(job, "i")), TRAIN_JOB) == []
    for arguments in (("x",) * 126, ("x" * 70_000,)):
        with pytest.raises(PlanError, match="at most 128 words of 65,536 letters"):
            train_job(SavedJob("run", Path("/data"), "train.py", 1, 1, False, arguments), "i")
    with pytest.raises(PlanError, match="an image of at most 500 letters"):
        train_job(job, "i" * 501)


@pytest.mark.parametrize("job", JOBS, ids=JOB_IDS)
def test_a_batch_script_is_bash_with_options_that_sbatch_has(job: SavedJob, tmp_path: Path) -> None:
    """Options are read up to the first line that is neither empty nor a comment."""
    script = tmp_path / "job.sbatch"
    script.write_text(batch_script(job, {"partition": "gpu", "time": "04:00:00", "mem": "0", "exclusive": ""}))
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert directives == [line for line in lines[:end] if line.startswith("#SBATCH")]
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in directives)
    assert len(options) == len(directives) and options["nodes"] == str(job.nodes)
    for name, value in options.items():
        assert SBATCH[name] is None or bool(value) == SBATCH[name], name
    assert options["ntasks-per-node"] == "1" and ("gpus-per-node" in options) == job.on_gpus


@pytest.mark.parametrize("job", JOBS, ids=JOB_IDS)
def test_a_ray_script_calls_what_ray_has(job: SavedJob) -> None:
    """Every name that it imports is there, and takes the arguments that it is given."""
    tree = ast.parse(ray_script(job))
    ray = pytest.importorskip("ray", reason="ray is not installed")
    assert ray
    import importlib
    import inspect

    imported = {
        name.name: getattr(importlib.import_module(node.module), name.name)
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module for name in node.names
    }  # fmt: skip
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in imported:
            parameters = inspect.signature(imported[call.func.id]).parameters
            assert {word.arg for word in call.keywords} <= set(parameters), call.func.id
