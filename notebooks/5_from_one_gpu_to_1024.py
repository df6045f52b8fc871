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
# # From one GPU to 1,024: what changes in the plan
#
# One model, one batch, more and more H100s. The model is a GPT of 1.4 billion parameters; a step trains on 512
# sequences of 1,024 tokens, however many GPUs there are. Nothing here needs a GPU, and the weights are never
# allocated. The times are predictions from data sheets.

# %%
import itertools
import math
import sys
import time

sys.path.insert(0, "..")  # the folder of the repository, for its example models

import matplotlib.pyplot as plt
import torch

import autopar
from models import gpt

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

config = gpt.Config(50257, 1024, num_layers=24, hidden_size=2048, num_heads=16, batch_size=512)
with torch.device("meta"):
    model = gpt.build(config)
batch = {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()}
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{parameters / 1e9:.2f} billion parameters")

# %% [markdown]
# A small budget: each search may take two seconds and stops within a tenth of its bound. (By default it looks for
# twenty, for equal graphs, too, and refines what it finds.)

# %%
meshes = [autopar.Mesh("h100", nodes, each) for nodes, each in ((1, 1), (1, 8), (8, 8), (32, 8), (128, 8))]
budget = autopar.SearchBudget(seconds=2.0, gap=0.1, substitutions=False, proposals=0)
plans, seconds = [], []
for mesh in meshes:
    started = time.perf_counter()
    plans.append(autopar.parallelize(model, mesh, batch, precision="bf16", search=budget).plan)
    seconds.append(time.perf_counter() - started)
    print(f"{mesh.num_devices:5d} GPUs, planned in {seconds[-1]:.0f} s: {str(plans[-1]).splitlines()[0]}")

# %% [markdown]
# ## How the work is divided
#
# The devices are factors of a product: pipeline stages × ranks that share the batch × ranks that share matrices. The
# plan has names for the axes only where people chose them; what an axis does is in the placements. An axis counts as
# *data parallel* here when most results of operators are split by sample along it, else as *tensor parallel*.


# %%
def factors(plan):
    """How many stages, and how many ranks of a stage share the batch; the rest of them share something else."""
    part = plan.stages[0]
    middle = [node for node in part.nodes.values() if len(node.results[0]) == len(part.axes)]
    columns = zip(*(node.results[0] for node in middle), strict=True)
    split = [sum(str(type_) == "S(0)" for type_ in column) > len(middle) / 2 for column in columns]
    data = math.prod(axis.size for axis, by_sample in zip(part.axes, split, strict=True) if by_sample)
    stages = len({stage.first_rank for stage in plan.stages})
    return stages, data, plan.mesh.num_devices // stages // data


names = [f"{mesh.num_devices:,}" for mesh in meshes]
table = [factors(plan) for plan in plans]
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
bottom = [0.0] * len(plans)
for position, label in enumerate(("pipeline stages", "data parallel", "tensor parallel")):
    heights = [math.log2(row[position]) for row in table]
    bars = axes.bar(names, heights, bottom=bottom, label=label)
    axes.bar_label(bars, [f"{row[position]}" if row[position] > 1 else "" for row in table], label_type="center",
                   color="white", fontweight="bold")  # fmt: skip
    bottom = [before + height for before, height in zip(bottom, heights, strict=True)]
axes.text(0, 0.15, "1", ha="center", fontweight="bold")
axes.set(xlabel="GPUs", ylabel="factors of two", title="Stages × data parallel × tensor parallel")
axes.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# ## What a GPU holds
#
# On one GPU, everything that a step needs has to fit, so the batch comes in many microbatches, or what its layers keep
# is computed again in the backward pass. On more, parameters and optimizer state are stored in slices (ZeRO), and
# memory stops being what decides.

# %%
kinds = ["parameters", "optimizer", "gradients", "activations", "activation gradients"]
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
bottom = [0.0] * len(plans)
for kind in [*kinds, "other"]:
    chosen = [
        sum(
            size
            for name, size in plan.predicted.memory.items()
            if name == kind or (kind == "other" and name not in kinds)
        )
        for plan in plans
    ]
    axes.bar(names, [size / 1e9 for size in chosen], bottom=bottom, label=kind)
    bottom = [before + size / 1e9 for before, size in zip(bottom, chosen, strict=True)]
axes.axhline(plans[0].memory_limit / 1e9, color="black", linewidth=0.8, linestyle=":")
axes.text(4.4, plans[0].memory_limit / 1e9, "limit", ha="right", va="bottom", fontsize=9)
axes.set(xlabel="GPUs", ylabel="peak memory of a GPU, GB", title="What a GPU holds at its fullest moment")
figure.legend(loc="outside right center", frameon=False)
plt.show()

for plan in plans:
    stored = [storage for stage in plan.stages for storage in stage.storage.values()]
    sliced = sum(any(type_.kind == "S" for type_ in storage.placement) for storage in stored)
    print(f"{plan.mesh.num_devices:5d} GPUs: {plan.microbatches} microbatches, {len(plan.recompute)} modules or "
          f"operators recomputed, {sliced} of {len(stored)} tensors stored in slices")  # fmt: skip

# %% [markdown]
# ## Where the time goes
#
# As the step gets shorter, waiting takes more of it: for collectives, and for other stages.

# %%
parts = ["compute", "recompute", "exposed_communication", "bubble", "optimizer"]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
bottom = [0.0] * len(plans)
for part in parts:
    shares = [100 * getattr(p.predicted.breakdown, f"{part}_ns") / p.predicted.step_time_ns for p in plans]
    axes.bar(names, shares, bottom=bottom, label=part.replace("_", " "))
    bottom = [before + share for before, share in zip(bottom, shares, strict=True)]
axes.set(xlabel="GPUs", ylabel="share of a step, %", title="Where a step's time goes")
figure.legend(loc="outside right center", frameon=False)
plt.show()

# %% [markdown]
# ## What more GPUs bring
#
# Left, the predicted step beside a perfect division of the first one. Right, the share of the GPUs' peak that the
# model's own arithmetic uses (6 FLOPs a parameter and token; recomputation does not count). With more of them
# each GPU has less to do, and waits more.

# %%
devices = [mesh.num_devices for mesh in meshes]
steps = [plan.predicted.step_time_ns / 1e9 for plan in plans]
tokens = batch["tokens"].numel()
peak = 989.4e12  # FLOP/s of an H100 in bf16, without sparsity (its data sheet)
used = [6 * parameters * tokens / step / count / peak for step, count in zip(steps, devices, strict=True)]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
left.loglog(devices, steps, "o-", label="predicted")
left.loglog(devices, [steps[0] / count for count in devices], "k:", linewidth=1, label="perfect division")
left.set(xlabel="GPUs", ylabel="step, s", xticks=devices, xticklabels=names, title="A step")
left.legend(frameon=False)
right.semilogx(devices, [100 * share for share in used], "o-")
right.set(xlabel="GPUs", ylabel="peak FLOP/s used, %", xticks=devices, xticklabels=names, ylim=(0, None))
right.set_title("Use of the GPUs")
for axes in (left, right):
    axes.minorticks_off()
plt.show()

print("longest search:", f"{max(seconds):.0f} s")
assert all(later < earlier for earlier, later in itertools.pairwise(steps)), "more GPUs are faster"
assert plans[0].microbatches > plans[1].microbatches, "what does not fit at once"
