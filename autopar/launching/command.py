"""The command `autopar launch`."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import PlanError
from autopar.ir.writing import write_whole
from autopar.launching.elastic import ENVIRONMENT, elastic_torchrun
from autopar.launching.job import SavedJob, read_job
from autopar.launching.kubernetes import pytorch_job, train_job
from autopar.launching.ray_cluster import ray_script
from autopar.launching.slurm import batch_script
from autopar.launching.torchrun import torchrun


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `autopar launch` takes."""
    parser.add_argument("folder", type=Path, help="what `autopar emit` or program.save wrote")
    parser.add_argument("--arguments", default="", metavar="TEXT", help="of train.py: --arguments='--steps 100'")
    parser.add_argument("--name", help="of the job; default: the folder's")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="of a mesh of several nodes: start on each, with one")
    parser.add_argument(
        "--elastic", action="store_true", help="of a folder of `autopar ladder --elastic`: nodes may go and come"
    )
    parser.add_argument("--slurm", type=Path, metavar="FILE", help="write a batch script for sbatch instead")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE", help="of --slurm: partition=gpu, time=04:00:00"
    )
    parser.add_argument("--kubernetes", type=Path, metavar="FILE", help="write a job for kubectl instead")
    parser.add_argument("--kind", choices=("TrainJob", "PyTorchJob"), default="TrainJob", help="of --kubernetes")
    parser.add_argument("--image", help="of --kubernetes: a container image with autopar")
    parser.add_argument("--runtime", default="torch-distributed", help="of a TrainJob: a ClusterTrainingRuntime")
    parser.add_argument("--claim", help="of a PyTorchJob: a volume claim, mounted at the folder")
    parser.add_argument("--ray", type=Path, metavar="FILE", help="write a script for a Ray cluster instead")


def run(options: argparse.Namespace) -> int:
    """Starts torchrun here, or writes the files that are asked for, each whole or not at all."""
    job = read_job(options.folder, options.name, shlex.split(options.arguments))
    texts = [(options.slurm, _slurm), (options.kubernetes, _kubernetes), (options.ray, _ray)]
    asked = [(file, make(job, options)) for file, make in texts if file is not None]
    if options.elastic:
        if asked or options.rendezvous is None:
            raise PlanError("expected --rendezvous HOST:PORT beside --elastic, and start it on each node, found others")
        return _run(elastic_torchrun(job.folder, options.rendezvous, job.name, job.arguments), ENVIRONMENT)
    if not asked:
        return _start(job, options.rendezvous)
    for file, text in asked:
        write_whole(file, text)
        print(_next(file, options))
    return 0


def _slurm(job: SavedJob, options: argparse.Namespace) -> str:
    return batch_script(job, dict(_pair(text) for text in options.sbatch))


def _kubernetes(job: SavedJob, options: argparse.Namespace) -> str:
    if not options.image:
        raise PlanError("expected --image beside --kubernetes, a container image with autopar, found none")
    if options.kind == "TrainJob":
        if options.claim:
            raise PlanError("expected --claim for a PyTorchJob; of a TrainJob, the runtime says what is mounted")
        return train_job(job, options.image, options.runtime)
    return pytorch_job(job, options.image, options.claim)


def _ray(job: SavedJob, options: argparse.Namespace) -> str:
    return ray_script(job)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value


def _next(file: Path, options: argparse.Namespace) -> str:
    begin = {options.slurm: "sbatch", options.kubernetes: "kubectl apply -f", options.ray: "python"}[file]
    return f"{begin} {shlex.quote(str(file))}"


def _start(job: SavedJob, rendezvous: str | None) -> int:
    if job.nodes > 1 and rendezvous is None:
        raise PlanError(
            f"expected a plan for one node, found one for {job.nodes}; start this on each of them with --rendezvous "
            "HOST:PORT, or take --slurm, --kubernetes or --ray"
        )
    return _run(torchrun(job, rendezvous), {})


def _run(arguments: list[str], variables: Mapping[str, str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    found_here = str(Path(__file__).parents[2])  # the ranks import this autopar, also from a checkout
    paths = [found_here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        command, env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}, check=False
    ).returncode
