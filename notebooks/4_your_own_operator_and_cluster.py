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
# # Bringing your own operator and your own cluster
#
# autopar knows torch's operators and a few clusters. Two things that it cannot know are an operator that you wrote and
# the links that you bought. Both are a few lines.

# %%
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, "..")  # the folder of the repository, for its example models

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cost.files import profiles_folder
from models import gpt

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## An operator of your own
#
# Below is a gated layer as one operator, as one would write it around a kernel of one's own, with its gradient. To
# torch and to autopar it is a black box.


# %%
@torch.library.custom_op("mylib::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """x (batch, seq, width), gate and up (hidden, width) → (batch, seq, hidden)."""
    return F.silu(x @ gate.T) * (x @ up.T)


@gated.register_fake
def _(x, gate, up):
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient):
    with torch.enable_grad():
        operands = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        x, gate, up = operands
        return torch.autograd.grad(F.silu(x @ gate.T) * (x @ up.T), operands, gradient)


gated.register_autograd(backward, setup_context=remember)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Parameter(torch.randn(hidden, width) / width**0.5) for _ in range(2))
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(gated(self.norm(x), self.gate, self.up))


class Stack(nn.Module):
    def __init__(self, width, hidden, depth):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


with torch.device("meta"):
    model, batch = Stack(4096, 16384, depth=8), (torch.empty(8, 2048, 4096),)
mesh = autopar.Mesh("h100", devices_per_node=4)

# %% [markdown]
# Without a rule the operator runs replicated: every GPU does all of its work and keeps all of its weights. The plan
# says so, under *coverage*.

# %%
search = autopar.SearchBudget(seconds=10.0, gap=0.01, stages=False, substitutions=False, proposals=0)
before = autopar.parallelize(model, mesh, batch, precision="bf16", search=search).plan
print("\n".join(str(before).splitlines()[:8]))

# %% [markdown]
# A rule names the dims of each operand and result. A lower-case letter may be split: what has the letter is sharded
# along it, what lacks it is replicated, and a result that lacks it is a sum of parts. An upper-case letter is never
# split. Here `b` and `s` may be split (samples, positions) and `h` (hidden units: rows of both weights). `D` may not:
# each part would be a sum of its own, and `silu` of a sum is not the sum of `silu`s.

# %%
RULE = "b s D, h D, h D -> b s h"

# %% [markdown]
# A wrong rule gives wrong results, so try it first: run the operator on slices, put the results together, compare.

# %%
x, gate, up = torch.randn(2, 6, 8), torch.randn(12, 8), torch.randn(12, 8)
whole = gated(x, gate, up)
by_hidden = torch.cat([gated(x, g, u) for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)], dim=2)
by_sample = torch.cat([gated(part, gate, up) for part in x.chunk(2)])
by_position = torch.cat([gated(part, gate, up) for part in x.chunk(2, dim=1)], dim=1)
for found in (by_hidden, by_sample, by_position):
    torch.testing.assert_close(found, whole)

autopar.register_rule("mylib.gated.default", RULE)
after = autopar.parallelize(model, mesh, batch, precision="bf16", search=search).plan
print("\n".join(str(after).splitlines()[:8]))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
names = ["without the rule", "with the rule"]
for part in ("compute", "exposed_communication", "optimizer"):
    widths = [getattr(plan.predicted.breakdown, f"{part}_ns") / 1e6 for plan in (before, after)]
    starts = [sum(bar.get_width() for bar in left.patches[row::2]) for row in range(2)]
    left.barh(names, widths, left=starts, label=part.replace("_", " "))
left.set(xlabel="predicted step, ms")
figure.legend(loc="outside lower center", ncols=3, frameon=False)
bars = right.barh(names, [plan.predicted.peak_bytes / 1e9 for plan in (before, after)])
right.bar_label(bars, fmt="%.1f GB")
right.margins(x=0.2)
right.set(xlabel="peak memory of a GPU, GB", yticklabels=[])
figure.suptitle("One line for an operator of one's own")
plt.show()

# %% [markdown]
# What is predicted of the operator is a lower limit: autopar sees the tensors that it reads and writes, and not what
# it computes between them. Split over four GPUs it saves more than the picture shows. The emitted program imports the
# module that defines the operator, so that under `torchrun` its name exists.
#
# ## A cluster of your own
#
# A mesh names a *cost profile*: a JSON file with what a device and its links can do, each block with where its figures
# come from. `cpu` is measured on the computer at hand, others are shipped (`a100`, `h100`, `h200`, `v100`), and any
# other is named by the path of its file.

# %%
shipped = json.loads((profiles_folder() / "h100.json").read_text())
for link in shipped["links"]:
    print(f"{link['level']}: {link['bandwidth'] / 1e9:g} GB/s, {link['alpha_ns'] / 1e3:g} µs a message")
    print(f"    {link['provenance']['kind']}: {link['provenance']['source']}")

# %% [markdown]
# Where there are GPUs, measuring is best. In a job of the cluster, this measures every collective along axes inside a
# node and across nodes, and writes the profile with them:
#
#     torchrun --nnodes 2 --nproc-per-node 8 -m autopar profile --collectives --into h100 -o mine.json
#
# Before the cluster exists, a data sheet has to do. Say that a copy of `h100` has a slower network: Ethernet of 100
# Gb/s a GPU instead of InfiniBand of 400. The provenance travels into every plan made with it.

# %%
os.chdir(tempfile.mkdtemp())  # where the files of this notebook go


def cluster(gigabits):
    """A profile like h100's but for the network, at 80 % of its data sheet's bandwidth, like the others; its path."""
    profile = json.loads(json.dumps(shipped)) | {"name": f"h100-{gigabits}g", "aliases": []}
    link = next(link for link in profile["links"] if link["level"] == "inter_node")
    link["bandwidth"] = 0.8 * gigabits * 1e9 / 8
    source = f"{gigabits} Gb/s of network a GPU, 80% taken as reachable"
    link["provenance"] = {"kind": "datasheet", "source": source, "date": "2026-11-22"}
    path = f"h100-{gigabits}g.json"
    Path(path).write_text(json.dumps(profile))
    return path


mesh = autopar.Mesh(cluster(100), nodes=2, devices_per_node=2)
config = gpt.Config(50257, 1024, num_layers=8, hidden_size=2048, num_heads=16, batch_size=64)
with torch.device("meta"):
    model = gpt.build(config)
batch = {name: tensor.to("meta") for name, tensor in gpt.example_inputs(config).items()}
plan = autopar.template_plan(model, mesh, batch, dp=4, zero=3, precision="bf16")
print("\n".join(str(plan).splitlines()[:4]))
print({block: source for block, source in plan.sources.items() if "inter_node" in block})

# %% [markdown]
# What is a faster network worth? The answer depends on how the model is split: three ways by hand, and what the search
# makes of each network. Two nodes of two GPUs, a GPT of 0.6 billion parameters.

# %%
ways = {
    "data parallel over all, ZeRO-3": dict(dp=4, zero=3),
    "tensor parallel inside a node": dict(dp=2, tp=2),
    "a stage a node": dict(dp=2, pp=2, microbatches=8),
}
gigabits = [10, 100, 400]
budget = autopar.SearchBudget(seconds=4.0, gap=0.05, substitutions=False, proposals=0)
times, found = {name: [] for name in [*ways, "found by the search"]}, []
for speed in gigabits:
    mesh = autopar.Mesh(cluster(speed), nodes=2, devices_per_node=2)
    for name, how in ways.items():
        by_hand = autopar.template_plan(model, mesh, batch, precision="bf16", **how)
        times[name].append(by_hand.predicted.step_time_ns / 1e6)
    found.append(autopar.parallelize(model, mesh, batch, precision="bf16", search=budget).plan)
    times["found by the search"].append(found[-1].predicted.step_time_ns / 1e6)

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, values), marker in zip(times.items(), "osD*", strict=True):
    axes.loglog(gigabits, values, marker=marker, linewidth=2 if "found" in name else 1.2, label=name)
axes.minorticks_off()
ticks = [100, 200, 500, 1000, 2000, 5000]
ticks = [tick for tick in ticks if 0.7 * min(map(min, times.values())) < tick < 1.4 * max(map(max, times.values()))]
axes.set(xticks=gigabits, xticklabels=gigabits, yticks=ticks, yticklabels=ticks)
axes.set(xlabel="network of a GPU, Gb/s", ylabel="predicted step, ms", title="What the network is worth")
axes.legend(frameon=False)
plt.show()

for speed, plan in zip(gigabits, found, strict=True):
    print(f"{speed:4d} Gb/s: {str(plan).splitlines()[0]}")
assert all(min(values) == values[-1] for values in times.values())

# %% [markdown]
# Next: [from one GPU to 1,024](5_from_one_gpu_to_1024.ipynb).
