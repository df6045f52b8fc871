"""`autopar launch`: starts what `program.save` wrote, or writes the files with which a cluster does."""

from autopar.launching.job import SavedJob, read_job
from autopar.launching.kubernetes import pytorch_job, train_job
from autopar.launching.ray_cluster import ray_script
from autopar.launching.slurm import batch_script

__all__ = ["SavedJob", "batch_script", "pytorch_job", "ray_script", "read_job", "train_job"]
