"""docs/cost_model.md: how times and memory are predicted, what each profile rests on, and how all was checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar import odds
from autopar.cost import collectives, compute, crossing, device, kernels, memory
from autopar.cost.files import SCHEMA, profiles_folder
from autopar.cost.residuals import size_name
from autopar.ops import layout, saved, work, workspace
from docs.markdown import docstring, page, table

ACCURACY = Path(__file__).parents[1] / "benchmarks" / "accuracy"

INTRODUCTION = """
Every plan is scored by one simulator, and the simulator asks this model what an operator, a collective and a tensor
cost. All of it comes from a *cost profile*: a JSON file for one kind of device and its links
([profile.schema.json](../cost_profiles/profile.schema.json)). Each block of a profile says where its figures come
from:

- `measured` on the device, by `autopar profile`
- `published` by others, such as tables of NCCL's times
- `fitted` to published measurements
- `datasheet` of the maker
- `assumed`: a typical figure, because nothing better is known

`print(plan)` names the kinds that a prediction rests on (`costs`), and the plan's file each source with its date. A
mesh names a profile by its name or alias (`h100`), or by the path of a file of your own; `cpu` is measured on the host
at its first use. [The fourth notebook](../notebooks/4_your_own_operator_and_cluster.ipynb) makes a profile.
"""

SIMULATION = """
The simulator plays the plan's forward and backward pass as events: a stream for computation and one for each level of
links, on each group of equal ranks. Overlap, waiting and pipeline bubbles come out of that rather than being assumed.
While a collective is in flight, computation takes as many times longer as the profile's `interference` says of that
level (`overlap_slowdown` of the device where that is more); a collective beside computation is priced as if its ranks
computed all the while. What calling a collective takes the host (`call`) is in no figure of a collective, and hidden
as long as the host runs ahead. Where a collective stops the ranks, as one inside a block does, it starts later by
what they wait for each other after what they have computed since they met (`waits` of the profile); collectives
beside computation stop nobody. Memory is followed through the same events: what autograd saves, gradients, buffers of
collectives, optimizer state.

Where more ranks than a host has cores share these, those that are busy have the cores of those that wait for another
stage (`autopar/simulate/cores.py`): everything takes `max(cores, busy) / ranks` of its time with all of them busy.
Busy is who computes, calls a pass, hands over a message or takes part in a collective; what the network's threads take
for messages on their way counts, too.
"""


KERNELS = """
What products and attention take on a GPU is a table of published measurements, made by
`autopar profile --from FOLDER --into PROFILE -o FILE`. They are bursts of a device at its highest clock; a training
step that lasts runs slower. What an H100 takes for operators that move bytes, for updates, and for attention as PyTorch
runs it was measured by us (`autopar profile --gpu FOLDER`, then `--from FOLDER --only moved`): attention by a formula
of its blocks (`autopar/profiler/published/tiles.py`), and twice as long under a mask that is a tensor, whose scores are
all computed. Where PyTorch does not run cuDNN's attention, a mask asks for its memory-efficient kernel.
"""

RESIDUALS = """
How much longer rows took than predicted, by profiles made without them (a fifth of the shapes; each size of a
collective in turn), by family, by dtype or level, and by predicted time. All rows, by GPU, dtype and size:
`python -m benchmarks.accuracy.gpu_operators` and [its results](../benchmarks/accuracy/gpu_operators.md).
"""


def cost_model() -> str:
    profiles = _profiles()
    return page(
        "The cost model",
        INTRODUCTION,
        "## Operators",
        docstring(compute),
        docstring(work),
        "The families are the rows of the profiles below.",
        "### Kernels of measured profiles",
        docstring(kernels),
        "### Copies",
        docstring(layout),
        "## Collectives",
        docstring(collectives),
        "### Between pipeline stages",
        docstring(crossing),
        "## Memory",
        docstring(memory),
        docstring(saved),
        docstring(workspace),
        "### Of a GPU",
        docstring(device),
        table(("profile", "context and buffers", "fragmentation", "usable", "spread", "where from"), _memory(profiles)),
        "## The step",
        SIMULATION,
        "## How sure predictions are",
        docstring(odds),
        table(
            ("profile", "spread of steps", "two plans are told apart by", "iterations", "where from"), _steps(profiles)
        ),
        "## The shipped profiles",
        "`cpu` is a template here: it is replaced by what is measured on the host.",
        table(
            ("profile", "device", "peak TFLOP/s, float32 / bfloat16 / float16", "memory", "where from"),
            map(_device, profiles),
        ),
        "### Links",
        table(("profile", "level", "bandwidth", "a message", "where from"), _links(profiles)),
        "### Measured and published collectives",
        table(("profile", "collective", "ranks", "sizes", "where from"), _collectives(profiles)),
        "### Operators, by family",
        "Best share of the peak that a family's curve reaches, forward: of FLOP/s where it is bound by compute, of\n"
        "memory bandwidth where it is bound by memory. In *italics*: assumed.",
        _families(profiles),
        "### Kernels of GPUs, by shape",
        KERNELS,
        table(("profile", "table", "shapes of the grid", "where from"), _tables(profiles)),
        RESIDUALS,
        table(("profile", "family", "kind", "predicted", "rows", "median", "90% of rows"), _residuals(profiles)),
        "Measured by others, beside what is predicted without having seen them (microseconds):",
        table(("GPU", "kernel", "shape", "measured", "predicted"), _beside()),
        "## How predictions were checked",
        "Each row is a committed measurement, made anew by its command; targets were set before measuring.\n"
        "[The third notebook](../notebooks/3_how_the_cost_model_was_checked.ipynb) draws them.",
        table(("what", "how many", "error", "target", "", "command"), _checks()),
    )


def _profiles() -> list[Any]:
    paths = sorted(path for path in Path(str(profiles_folder())).glob("*.json") if path.name != SCHEMA)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _device(profile: Any) -> tuple[str, ...]:
    facts = profile["facts"]
    peaks = " / ".join(f"{facts['peak_flops'][name] / 1e12:.4g}" for name in ("float32", "bfloat16", "float16"))
    memory_text = f"{facts['capacity_bytes'] / 1e9:.3g} GB, {facts['memory_bandwidth'] / 1e9:.4g} GB/s"
    names = ", ".join(f"`{name}`" for name in (profile["name"], *profile.get("aliases", ())))
    return names, profile["title"], peaks, memory_text, _source(facts)


def _memory(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    for profile in (profile for profile in profiles if profile.get("memory")):
        own = profile["memory"]
        sizes = [own[f"{name}_bytes"] >> 20 for name in ("context", "workspace", "communicator")]
        beside = f"{sizes[0]:,} + {sizes[1]} MiB, {sizes[2]} MiB a communicator"
        usable = f"{own['tight_share']:.0%}"
        yield f"`{profile['name']}`", beside, f"{own['fragmentation']}", usable, f"{own['spread']}", _source(own)


def _steps(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    for profile in (profile for profile in profiles if profile.get("steps")):
        own = profile["steps"]
        figures = f"{own['spread']:.1%}", f"{own['resolution']:.1%}", str(own["count"])
        yield f"`{profile['name']}`", *figures, _source(own)


def _source(block: Any) -> str:
    found = block["provenance"]
    return f"{found['kind']}: {found['source']} ({found['date']})"


def _links(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    for profile in profiles:
        for link in profile["links"]:
            level = " ".join([link["level"].replace("_", " "), *filter(None, [link.get("network")])])
            bandwidth, message = f"{link['bandwidth'] / 1e9:.4g} GB/s", f"{link['alpha_ns'] / 1e3:.3g} µs"
            yield f"`{profile['name']}`", level, bandwidth, message, _source(link)


def _collectives(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    """One row for the groups of a profile that share a source."""
    for profile in profiles:
        groups: dict[tuple[str, str], list[Any]] = {}
        for item in profile["collectives"]:
            groups.setdefault((item["collective"], _source(item)), []).append(item)
        for (name, source), items in groups.items():
            ranks = sorted({item.get("nodes", 1) * item.get("inside", item.get("ranks", 1)) for item in items})
            sizes = [size for item in items for size, _ in item["points"]]
            span = f"{min(sizes):,} to {max(sizes):,} bytes"
            yield f"`{profile['name']}`", name, ", ".join(map(str, ranks)), span, source


def _families(profiles: list[Any]) -> str:
    names = list(dict.fromkeys(item["family"] for profile in profiles for item in profile["operators"]))
    cells = {(profile["name"], item["family"]): _reached(item) for profile in profiles for item in profile["operators"]}
    rows = [(f"`{name}`", *(cells.get((p["name"], name), "") for p in profiles)) for name in names]
    return table(("family", *(f"`{profile['name']}`" for profile in profiles)), rows)


def _reached(item: Any) -> str:
    best = max(share for _, share in item["forward"])
    text = f"{100 * best:.3g} % of {item['bound']}"
    return f"*{text}*" if item["provenance"]["kind"] == "assumed" else text


def _tables(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    """Those that measured something; layouts and directions that are told in terms of them follow in one cell."""
    for profile in profiles:
        of_others: dict[str, list[str]] = {}
        for item in profile.get("tables", ()):
            if "like" in item:
                of_others.setdefault(item["like"], []).append(f"{item['name']} {item.get('times', 1)} ×")
        for item in profile.get("tables", ()):
            if "like" not in item:
                shape = " × ".join(str(len(axis)) for axis in item["axes"])
                others = "".join(f"; {told}" for told in of_others.get(item["name"], ()))
                yield f"`{profile['name']}`", item["name"] + others, shape, _source(item)


def _residuals(profiles: list[Any]) -> Iterator[tuple[str, ...]]:
    for profile in profiles:
        for item in profile.get("residuals", ()):
            low, middle, high = (f"{math.expm1(log):+.1%}" for log in item["quantiles"])
            size, count = size_name(item["from_ns"]), f"{item['count']:,}"
            yield f"`{profile['name']}`", item["family"], item["kind"], size, count, middle, f"{low} to {high}"


def _beside() -> Iterator[tuple[str, ...]]:
    """Single operators, sorted by GPU and size."""
    for gpu, software, shape, measured, predicted in sorted(_read("gpu_operators")["shown"]):
        kind = "batch, q, kv, heads, kv heads, width, causal" if len(shape) > 3 else "m, n, k"
        yield gpu, software, f"{kind}: {', '.join(map(str, shape))}", f"{measured:,}", f"{predicted:,}"


def _checks() -> Iterator[tuple[str, ...]]:
    cpu, memory_, stages = _read("cpu"), _read("memory"), _read("stage_memory")
    published, collectives = _read("published"), _read("gpu_collectives")
    command = "`python -m benchmarks.accuracy.cpu`"
    for name, label in (("mape", "mean"), ("worst", "worst")):
        found, target = cpu["summary"][name], cpu["targets"][name]
        yield f"CPU steps of two ranks, {label}", str(cpu["summary"]["pairs"]), *_verdict(found, target), command
    losses = [loss["share"] for loss in cpu["predicted_best_slower_by"].values()]
    verdict = _verdict(max(0.0, *losses), cpu["targets"]["best_plan"])
    yield "CPU, plan predicted as fastest: slower than the fastest, worst", f"{len(losses)} models", *verdict, command
    found, target = cpu["summary"]["spearman"], cpu["targets"]["spearman"]
    met = "met" if found >= target else "**missed**"
    yield (
        "CPU steps, rank correlation",
        str(cpu["summary"]["pairs"]),
        f"{found:.3f}",
        f"at least {target}",
        met,
        command,
    )
    for rows, what, script in ((memory_["rows"], "one stage", "memory"), (stages["rows"], "stages", "stage_memory")):
        worst = max(abs(row["error"]) for row in rows)
        by = f"`python -m benchmarks.accuracy.{script}`"
        yield f"peak memory, {what}, worst", str(len(rows)), f"{worst:.2%}", "", "", by
    exact = sum(row["sent"] == row["predicted_sent"] for row in memory_["rows"])
    count = str(len(memory_["rows"]))
    yield "bytes of every collective", count, f"exact in {exact}", "", "", "`python -m benchmarks.accuracy.memory`"
    errors = published["errors"]["all"]
    for name, label in (("mape", "mean"), ("worst", "worst")):
        verdict = _verdict(errors[name], published["targets"][name])
        yield (
            f"A100 iterations, {label}",
            f"{errors['rows']:.0f}",
            *verdict,
            "`python -m benchmarks.accuracy.published`",
        )
    for gpu in ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM5-141GB", "B200-SXM6-180GB"):
        yield from _operator_checks(gpu)
    for what, label in (("shipped profiles", "with what is shipped"), ("sizes left out", "of sizes left out")):
        yield from _collective_checks(collectives[what]["by gpu and collective"], collectives["targets"], label)


def _collective_checks(
    groups: Mapping[str, Mapping[str, float]], targets: Mapping[str, float], label: str
) -> Iterator[tuple[str, ...]]:
    """The worst of all GPUs and collectives, by each figure that has a target."""
    for figure, target in targets.items():
        name, found = max(groups.items(), key=lambda item: item[1][figure])
        many = f"{sum(group['rows'] for group in groups.values()):.0f}"
        what = f"GPU collectives inside a node {label}, {figure}, worst of {len(groups)} ({name})"
        yield what, many, *_verdict(found[figure], target), "`python -m benchmarks.accuracy.gpu_collectives`"


def _operator_checks(gpu: str) -> Iterator[tuple[str, ...]]:
    """Of shapes that were left out, median and 90th percentile."""
    by = "`python -m benchmarks.accuracy.gpu_operators FOLDER --cross-validate`"
    for row in _read("gpu_operators")["rows"]:
        if row["gpu"] == gpu and row["target"] and not row["software"]:
            for name, target in zip(("median", "p90"), row["target"], strict=True):
                what = f"{gpu}, {row['family']}, bfloat16, {row['size']}: {name}"
                yield what, f"{row['rows']:,}", *_verdict(row[name], target), by


def _read(name: str) -> Any:
    return json.loads((ACCURACY / f"{name}.json").read_text(encoding="utf-8"))


def _verdict(found: float, target: float) -> tuple[str, str, str]:
    return f"{found:.2%}", f"{target:.0%}", "met" if found <= target else "**missed**"


__all__ = ["cost_model"]
