"""A script that trains on a Ray cluster: a worker of `TorchTrainer` is a rank."""

from __future__ import annotations

from autopar.launching.job import SavedJob

_SCRIPT = '''"""Trains the program in FOLDER on a Ray cluster; options are those of its script.

Where no cluster is said (RAY_ADDRESS), Ray starts one on this host. All nodes must see FOLDER, and have autopar.
"""

import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = {folder!r}
SCRIPT = {path!r}
ARGUMENTS = {arguments!r}


def work(config: dict) -> None:
    """A rank: Ray has joined it with the others, and says which it is."""
    sys.path.insert(0, FOLDER)
    sys.argv = [SCRIPT, *config["arguments"]]
    runpy.run_path(SCRIPT, run_name="__main__")


def main(arguments: list[str]) -> None:
    ray.init()
    trainer = TorchTrainer(
        work,
        train_loop_config={{"arguments": [*ARGUMENTS, *arguments]}},
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig(num_workers={count}, use_gpu={on_gpus!r}, placement_strategy="PACK"),
        run_config=RunConfig(name={name!r}, storage_path=FOLDER + "/ray", failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
'''


def ray_script(job: SavedJob) -> str:
    """The text of the script. Of several nodes, PACK fills one after the other, as the plan's ranks are numbered."""
    return _SCRIPT.format(
        folder=str(job.folder), path=job.path, arguments=list(job.arguments), name=job.name,
        backend="nccl" if job.on_gpus else "gloo", count=job.nodes * job.per_node, on_gpus=job.on_gpus,
    )  # fmt: skip
