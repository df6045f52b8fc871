# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first plan
#
# autopar takes a model written for one device and finds out how several can share the work. Here: a small GPT, two
# processes on this computer's CPU, and a check that training gives the same losses as on one device.

# %%
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, "..")  # the folder of the repository, for its example models

import matplotlib.pyplot as plt
import torch

import autopar
from models import gpt

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The model, the devices, one batch
#
# The model is an ordinary `nn.Module`. The batch is one *global* batch: how the two ranks share it is for the plan to
# say. The mesh names a cost profile, `cpu`, and says how many devices there are. (The first time, this computer is
# measured for a minute or two. The constraint leaves out pipeline stages, which come in the next notebook.)

# %%
torch.set_num_threads(1)
torch.manual_seed(0)
config = gpt.Config(num_layers=2, hidden_size=128, seq_len=64, batch_size=8)
model, batch = gpt.build(config), gpt.example_inputs(config)
mesh = autopar.Mesh("cpu", devices_per_node=2)

program = autopar.parallelize(model, mesh, batch, constraints=[autopar.Constraint(stages=1)])
print(program.plan)

# %% [markdown]
# Every line of this is explained in the notebook *reading a plan*. In short: what one step is predicted to take, what
# a device has to hold, what it sends, and for each parameter how the two ranks keep it and use it.
#
# ## Against plans that people write by hand
#
# `template_plan` makes the usual ones. The same simulator scores them all, so that they can be compared part by part.

# %%
templates = {
    "data parallel": dict(dp=2),
    "ZeRO-3": dict(dp=2, zero=3),
    "tensor parallel": dict(tp=2),
}
plans = {name: autopar.template_plan(model, mesh, batch, **how) for name, how in templates.items()}
plans["found by the search"] = program.plan

parts = ["compute", "exposed_communication", "optimizer"]
left = [0.0] * len(plans)
figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
for part in parts:
    widths = [getattr(plan.predicted.breakdown, f"{part}_ns") / 1e6 for plan in plans.values()]
    axes.barh(list(plans), widths, left=left, label=part.replace("_", " "))
    left = [before + width for before, width in zip(left, widths, strict=True)]
axes.set(xlabel="predicted time of a step, ms", title="Where a step's time goes")
figure.legend(loc="outside lower center", ncols=4, frameon=False)
plt.show()

# %% [markdown]
# ## The program
#
# What comes out is PyTorch source. It reads like the model, and each communication is a visible call.

# %%
print("\n".join(program.source.splitlines()[:45]))

# %% [markdown]
# ## Running it
#
# `save` writes the program with a training loop to start from, and `torchrun` launches it like any other.

# %%
folder = program.save(Path(tempfile.mkdtemp()) / "out")
print(*sorted(path.name for path in folder.iterdir()))

# %%
launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
found_here = os.pathsep.join([str(Path("..").resolve()), os.environ.get("PYTHONPATH", "")])
environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found_here}
done = subprocess.run([*launch, str(folder / "train.py")], env=environment, check=True, capture_output=True, text=True)
sharded = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
print(done.stdout)

# %% [markdown]
# ## The same on one device
#
# The loop below is `train.py`'s, without autopar: the same weights, the same random batches, the same optimizer.

# %%
generator = torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
single = []
for _ in sharded:
    data = {name: torch.randint(0, 2, tensor.shape, generator=generator) for name, tensor in batch.items()}
    optimizer.zero_grad()
    loss = model(**data)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    single.append(loss.item())

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(single, linewidth=6, alpha=0.4, label="one device")
axes.plot(sharded, marker="o", markersize=4, label="two ranks")
axes.set(xlabel="step", ylabel="loss", title="The sharded program computes what the model computes")
axes.legend(frameon=False)
plt.show()

worst = max(abs(one - other) for one, other in zip(single, sharded, strict=True))
print(f"largest difference of {len(sharded)} losses: {worst:.1e} (they are printed with four digits)")
assert worst < 2e-4

# %% [markdown]
# Next: [reading a plan](2_reading_a_plan.ipynb).
