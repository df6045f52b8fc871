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
# # Reading a plan
#
# A plan says how a model is split, why, and what that is predicted to cost. This one is for GPT-2 XL (1.6 billion
# parameters) on four H100s in one server. Planning needs neither the GPUs nor the weights: the model is on torch's
# `meta` device, where tensors have shapes and no data.
# It has one stage, and the model's graph as it was written: by default, query, key and value would be one product
# ([substitutions](../docs/guide.md#substitutions)).

# %%
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, "..")  # the folder of the repository, for its example models

import matplotlib.pyplot as plt
import torch

import autopar
from models import gpt

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

with torch.device("meta"):
    config = gpt.gpt2_xl()
    config = gpt.Config(**{**vars(config), "batch_size": 16})
    model, batch = gpt.build(config), gpt.example_inputs(config)
batch = {name: tensor.to("meta") for name, tensor in batch.items()}
mesh = autopar.Mesh("h100", devices_per_node=4)

one_stage = autopar.SearchBudget(seconds=10.0, gap=0.01, stages=False, substitutions=False, proposals=0)
plan = autopar.parallelize(model, mesh, batch, precision="bf16", search=one_stage).plan
print(plan)

# %% [markdown]
# **The first line** names the model, the devices, and the axes that they are seen as. **Step time** is one optimizer
# step on the whole batch; its parts add up. **Memory** is the peak of one device and what it consists of at that
# moment. **Traffic** is what a rank hands to each collective: an emitted program sends exactly that. **Costs** says
# what the prediction rests on; for an H100 that is a datasheet, so take the times as estimates.
#
# Below, each parameter has two placements on each axis: how it is *stored* between steps, and how operators *use* it.
#
# | letter | a rank of the axis holds | and of the gradient |
# |---|---|---|
# | `S(d)` | a slice along dim d | the same slice |
# | `R` | everything | a summand |
# | `I` | everything | everything |
# | `P` | a summand | everything |
#
# Stored `I`, used `R` is data parallelism; stored `S`, used `R` is ZeRO; used `S(0)` and then `S(1)` is Megatron's
# pair.
#
# ## Memory over the step
#
# `plan.timeline()` is the simulated step. Its lanes are groups of ranks that do the same; this plan has one.

# %%
timeline = plan.timeline()
lane = timeline.lanes[0]
samples = lane.memory_samples(timeline.step_time_ns, 400)
largest = sorted(samples.by_kind, key=lambda kind: -max(samples.by_kind[kind]))
shown, rest = largest[:6], largest[6:]
sizes = [[size / 1e9 for size in samples.by_kind[kind]] for kind in shown]
sizes.append([sum(column) / 1e9 for column in zip(*(samples.by_kind[kind] for kind in rest), strict=True)])

figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
axes.stackplot([time / 1e6 for time in samples.times_ns], sizes, labels=[*shown, "other"])
axes.axhline(plan.predicted.peak_bytes / 1e9, color="black", linewidth=0.8, linestyle=":")
axes.set(xlabel="time in the step, ms", ylabel="memory of a device, GB", title="What a device holds, and when")
axes.margins(x=0)
figure.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Activations grow during the forward pass and shrink during the backward pass; parameters and the optimizer's state
# are there all the time. The dotted line is the peak that `print(plan)` names.
#
# ## Who waits for whom
#
# The simulator plays computation and communication on streams of their own. Where a collective runs beside computation
# it costs nothing; where computation stands still for it, the plan calls it *exposed*.

# %%
COLOURS = {
    "forward": "#56B4E9", "recompute": "#999999", "backward": "#0072B2", "optimizer": "#009E73",
    "parameters": "#F0E442", "gradients": "#D55E00", "activations": "#CC79A7", "send": "#000000",
}  # fmt: skip


def group(kind):
    """The colour's name: "gradient reduce_scatter" is about gradients."""
    word = kind.split()[0]
    return kind if kind in COLOURS else f"{word}s" if f"{word}s" in COLOURS else "activations"


def draw(axes, timeline, begin_ms, end_ms):
    """Every stream of every lane as a row, each task as a bar in its kind's colour."""
    rows, bars = {}, defaultdict(list)
    for lane in timeline.lanes:
        name = f"ranks {lane.ranks.start}–{lane.ranks.stop - 1}" if len(lane.ranks) > 1 else f"rank {lane.ranks.start}"
        for piece in lane.pieces:
            for stream, _, start, end, kind in piece.tasks:
                row = rows.setdefault(f"{name} {stream.replace('_', ' ')}", len(rows))
                bars[group(kind), row].append(((piece.begin_ns + start) / 1e6, (end - start) / 1e6))
    for (kind, row), spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS[kind], linewidth=0)
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlim=(begin_ms, end_ms), xlabel="time in the step, ms")
    axes.invert_yaxis()
    names = [name for name in COLOURS if name in {kind for kind, _ in bars}]
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names]
    axes.figure.legend(patches, names, loc="outside lower center", ncols=len(names), frameon=False)


step_ms = timeline.step_time_ns / 1e6
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
draw(axes, timeline, 0, step_ms)
axes.set_title("One step of the plan")
plt.show()

figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
draw(axes, timeline, 0.6 * step_ms, 0.65 * step_ms)
axes.set_title("A twentieth of it, in the backward pass")
plt.show()
print("exposed:", {kind: f"{ns / 1e6:.2f} ms" for kind, ns in timeline.exposed.items()})

# %% [markdown]
# `timeline.save("trace.json")` writes the same for [Perfetto](https://ui.perfetto.dev), and `plan.report("plan.html")`
# a page with all of this, to click through.

# %%
folder = Path(tempfile.mkdtemp())
timeline.save(folder / "trace.json")
plan.report(folder / "plan.html")
print({path.name: f"{path.stat().st_size / 1e3:.0f} kB" for path in folder.iterdir()})

# %% [markdown]
# ## Why this one?
#
# `plan.explain` shows what each decision was taken against.

# %%
print(plan.explain("layers.0.mlp.up"))

# %% [markdown]
# The same as a picture: the cheapest other way for some parameters, with everything else as it is. Bars are what a
# step would take longer; the labels say what it would be.

# %%
names = [f"layers.0.{name}.bias" for name in ("attention.query", "attention.output", "mlp.up", "mlp.down")]
graph_name = {name: tensor for tensor, name in plan.parameters.items()}
choices = {choice.name: choice for choice in plan.choices if choice.kind == "stored"}
rows = [
    (name.removeprefix("layers.0."), other) for name in names for other in choices[graph_name[name]].alternatives[:3]
]
figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
positions = range(len(rows))
bars = axes.barh(positions, [other.extra_ns / 1e6 for _, other in rows])
axes.bar_label(bars, [f" {other.option}, {other.extra_bytes / 1e9:+.2f} GB" for _, other in rows], fontsize=8)
axes.set(
    yticks=positions, yticklabels=[name for name, _ in rows], xlabel="longer step, ms, in all equal layers together"
)
axes.margins(x=0.5)
axes.invert_yaxis()
axes.set_title("What the next best choices would cost")
plt.show()

# %% [markdown]
# ## What differs between two plans
#
# `diff` compares: here with a plan written by hand, Megatron's way of splitting layers over all four.

# %%
by_hand = autopar.template_plan(model, mesh, batch, tp=4, precision="bf16")
print(plan.diff(by_hand))

# %% [markdown]
# ## A plan of several stages
#
# Pipeline stages show as lanes of their own. In these, a microbatch goes down the stages and its gradient comes back
# up; white is time in which a stage waits, the *bubble*.

# %%
stages = autopar.template_plan(
    model, mesh, batch, pp=4, microbatches=8, schedule="1f1b", recompute="full", precision="bf16"
)
print("\n".join(str(stages).splitlines()[:4]))
figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
draw(axes, stages.timeline(), 0, stages.predicted.step_time_ns / 1e6)
axes.set_title("Four stages of one GPU, eight microbatches, 1F1B")
plt.show()

# %% [markdown]
# Next: [how the cost model was checked](3_how_the_cost_model_was_checked.ipynb).
