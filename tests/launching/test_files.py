"""What `autopar launch` writes for clusters: read back by parsers, and run by stand-ins of the clusters' commands."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import autopar
from autopar.cli import main
from autopar.errors import MeshError, PlanError
from autopar.launching import batch_script, pytorch_job, ray_script, read_job, train_job
from autopar.launching.torchrun import torchrun
from autopar.launching.yaml_text import yaml_text
from models import mlp

ODD = ("--text", 'it\'s a "file" of $HOME', "--steps", "3", "# none")


def saved(folder: Path, mesh: str = "h100:2x4") -> Path:
    """A folder as program.save writes it, of a plan for a mesh."""
    config = mlp.Config()
    model, inputs = mlp.build(config), mlp.example_inputs(config)
    devices = autopar.Mesh.parse(mesh)
    plan = autopar.template_plan(model, devices, inputs, dp=devices.num_devices, check=False)
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    for name in ("program.py", "train.py"):
        (folder / name).write_text("import sys\nprint(sys.argv[1:])\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp('a folder\'s "own" $name') / "Out Folder_2")


def test_a_job_is_what_the_plan_says(folder: Path) -> None:
    job = read_job(folder, arguments=ODD)
    assert (job.name, job.nodes, job.per_node, job.on_gpus) == ("out-folder-2", 2, 4, True)
    assert torchrun(job, "host:1")[-len(ODD) - 1 :] == [str(folder / "train.py"), *ODD]


def test_the_batch_script_starts_torchrun_on_each_node_with_all_arguments(folder: Path, tmp_path: Path) -> None:
    """Run by bash, with srun, scontrol and torchrun that print what they are given."""
    script = tmp_path / "job.sbatch"
    script.write_text(batch_script(read_job(folder, arguments=ODD), {"partition": "gpu", "time": "04:00:00"}))
    commands = {
        "scontrol": 'printf "node-1\\nnode-2\\n"', "srun": 'shift; exec "$@"',
        "torchrun": "python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"",
    }  # fmt: skip
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    seen = tmp_path / "cpus"
    commands["srun"] = f'echo "${{SRUN_CPUS_PER_TASK-none}}" >> {shlex.quote(str(seen))}; {commands["srun"]}'
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{commands['srun']}\n")
    environment = {
        **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_ID": "30007", "SLURM_JOB_NUM_NODES": "2",
    }  # fmt: skip
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    subprocess.run(["bash", str(script)], env={**environment, "SLURM_CPUS_PER_TASK": "48"}, check=True, stdout=-3)
    assert seen.read_text().split() == ["none", "48"]
    given = json.loads(done.stdout)
    assert given[-len(ODD) - 1 :] == [str(folder / "train.py"), *ODD]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node-1:30007", "--rdzv-id=30007"} <= set(given)
    asked = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--partition=gpu", "--time=04:00:00"}
    options = [line.split(" ", 1)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert asked <= set(options)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"nodes": "3"}, "besides what the plan says"), ({"comment": "a b"}, "without blanks"), ({"X\n": "1"}, "sbatch"),
     ({"comment": 'a"b'}, "without blanks"), ({"comment": "a#b"}, "without blanks")],
)  # fmt: skip
def test_options_that_sbatch_would_misread_are_refused(folder: Path, options: dict[str, str], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        batch_script(read_job(folder), options)


def test_lists_of_nodes_and_constraints_are_options(folder: Path) -> None:
    text = batch_script(read_job(folder), {"exclude": "gpu[01-04,7]", "constraint": "a100&(ib|roce)"})
    assert "#SBATCH --exclude=gpu[01-04,7]" in text and "#SBATCH --constraint=a100&(ib|roce)" in text


def test_kubernetes_reads_arguments_as_they_are_and_names_as_long_as_pods_may_have(folder: Path) -> None:
    given = ("--text", "$(HOME) of 𝄞", "$$")
    data = yaml.safe_load(train_job(read_job(folder, arguments=given), "image"))
    assert data["spec"]["trainer"]["command"][-3:] == ["--text", "$$(HOME) of 𝄞", "$$"]
    for write in (train_job, pytorch_job):
        with pytest.raises(PlanError, match="to which Kubernetes adds"):
            write(read_job(folder, "a" * 60), "image")


def test_a_train_job_has_the_fields_of_kubeflow_trainer(folder: Path) -> None:
    data = yaml.safe_load(train_job(read_job(folder, arguments=ODD), "registry/image:1"))
    assert (data["apiVersion"], data["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert data["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = data["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun", "--nproc-per-node=4", str(folder / "train.py"), *ODD]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}


def test_a_pytorch_job_has_the_fields_of_the_training_operator(folder: Path) -> None:
    data = yaml.safe_load(pytorch_job(read_job(folder, arguments=ODD), "registry/image:1", claim="data"))
    assert (data["apiVersion"], data["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert data["spec"]["nprocPerNode"] == "4"
    replicas = data["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 1}
    for one in replicas.values():
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["command"][-len(ODD) :] == list(ODD)
        volumes = {item["name"] for item in one["template"]["spec"]["volumes"]}
        assert volumes == {item["name"] for item in container["volumeMounts"]}
        assert {"name": "program", "mountPath": str(folder)} in container["volumeMounts"]


@pytest.mark.parametrize("text", ["", "yes", "1e3", "null", "a: b", "- c", "#d", 'e"\\f', "ü\n\t", "'", "{g}", "1:30"])
def test_strings_are_read_as_what_they_are(text: str) -> None:
    data: dict[str, Any] = {"k": text, "list": [text, 3, {"a": text, "b": [text]}]}
    assert yaml.safe_load(yaml_text(data, text)) == data


def test_the_ray_script_is_python_with_a_worker_for_each_rank(folder: Path) -> None:
    text = ray_script(read_job(folder, arguments=ODD))
    names = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(text).body
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    assert names == {"FOLDER": str(folder), "SCRIPT": str(folder / "train.py"), "ARGUMENTS": list(ODD)}
    assert "num_workers=8, use_gpu=True" in text and 'backend="nccl"' in text.replace("'", '"')


def test_the_command_writes_files_and_says_how_to_start_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"a {name}") for name in ("slurm", "kubernetes", "ray")}
    options = [item for name, file in files.items() for item in (f"--{name}", file)]
    assert (
        main(
            [
                "launch",
                str(folder),
                *options,
                "--image",
                "i:1",
                "--sbatch",
                "time=1:00",
                f"--arguments={shlex.join(ODD)}",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        f"{begin} '{files[name]}'"
        for name, begin in {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "ray": "python"}.items()
    ]
    assert ODD[1] in yaml.safe_load(Path(files["kubernetes"]).read_text())["spec"]["trainer"]["command"]


def test_what_cannot_be_launched_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"no plan\.json"):
        read_job(tmp_path)
    with pytest.raises(PlanError, match="a name of at most 63"):
        read_job(folder, "Not a name")
    assert main(["launch", str(folder)]) == 2
    assert "found one for 2; start this on each of them with --rendezvous" in capsys.readouterr().err
    assert main(["launch", str(folder), "--kubernetes", str(tmp_path / "job.yaml")]) == 2
    assert "expected --image" in capsys.readouterr().err and not (tmp_path / "job.yaml").exists()


def test_nodes_of_unequally_many_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="equally many devices"):
        read_job(saved(tmp_path / "unequal", "h100:1x4+h100:1x2"))


@pytest.mark.ranks
def test_launch_starts_a_rank_for_each_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "own folder", "cpu:2")
    (folder / "train.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n")
    assert main(["launch", str(folder), f"--arguments={shlex.join(ODD)}"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"2 {list(ODD)}"] * 2
    (folder / "train.py").write_text("raise SystemExit(3)\n")
    assert main(["launch", str(folder)]) != 0
