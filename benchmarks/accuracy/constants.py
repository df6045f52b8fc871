"""The constants that are fitted to published iterations: of the A100 profile, and of the software that was measured.

The host's belong to Megatron-DeepSpeed, whatever the device, and what its nodes send to each other to the cluster that
was measured. No profile that plans are made with has either: they are in `megatron_deepspeed.json`, and
`measured_system` joins them to the shipped profile.

| constant          | meaning                                                                         |
|-------------------|---------------------------------------------------------------------------------|
| matmul_efficiency | share of peak that a large product reaches                                      |
| matmul_half_flops | FLOPs of the product that reaches half of that                                  |
| memory_efficiency | share of the memory bandwidth that a large elementwise kernel reaches           |
| cross_entropy     | the same of the loss's kernels, as far as they move what the operator table says |
| optimizer         | the same of the optimizer                                                       |
| operator_ns, gradient_ns, collective_ns, pass_ns | of the host, see `autopar.cost.profile.Host`     |
| node_bandwidth    | bytes a second that the 8 GPUs of a node send to other nodes together            |

The values in `CONSTANTS` are what one expects beforehand: data sheets, and experience with such systems. They are the
prior of the fit, which a constant leaves as far as the rows ask for it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.cost.profile import Curve, Host, OperatorCurve, Profile, Provenance, profile_from_json, profile_to_json
from autopar.profiler.text import profile_text

CONSTANTS = {
    "matmul_efficiency": 0.8,
    "matmul_half_flops": 3e9,
    "memory_efficiency": 0.8,
    "cross_entropy": 0.5,
    "optimizer": 0.8,
    "operator_ns": 40e3,
    "gradient_ns": 20e3,
    "collective_ns": 50e3,
    "pass_ns": 1e6,
    "node_bandwidth": 80e9,
}

MOST = dict.fromkeys(("matmul_efficiency", "memory_efficiency", "cross_entropy", "optimizer"), 0.95)
"""No kernel goes beyond the data sheet."""

FLOPS = tuple(10.0**power for power in range(6, 14))
BYTES = tuple(10.0**power for power in range(4, 11))
HALF_BYTES = 2.5e6  # the kernel that takes as long to start as to move its bytes: about a microsecond at 2 TB/s
MATRIX = ("matmul", "attention", "convolution")
SOFTWARE = Path(__file__).with_name("megatron_deepspeed.json")


def with_constants(profile: Profile, constants: Mapping[str, float], source: str = "") -> Profile:
    """The profile under these constants; what they do not say stays. Products have the curve, not measured tables."""
    provenance = Provenance("fitted", source, datetime.date.today().isoformat())
    names = ("operator_ns", "gradient_ns", "collective_ns", "pass_ns")
    host = Host(*(round(constants[name]) for name in names), provenance=provenance)
    far = replace(
        profile.links["inter_node"], node_bandwidth=float(f"{constants['node_bandwidth']:.4g}"), provenance=provenance
    )
    operators = {family: _curve(old, constants, provenance) for family, old in profile.operators.items()}
    links = {**profile.links, "inter_node": far}
    facts = replace(profile.facts, sustained_clock=1.0)  # the curve is of whole iterations, and no burst
    return replace(profile, facts=facts, host=host, links=links, operators=operators, tables={}, _shared={})


def _curve(old: OperatorCurve, constants: Mapping[str, float], provenance: Provenance) -> OperatorCurve:
    if old.family in MATRIX[1:]:
        return old
    if old.family == "matmul":
        knots = _saturating(FLOPS, constants["matmul_efficiency"], constants["matmul_half_flops"])
    else:
        own = constants.get(old.family, constants["memory_efficiency"])
        knots = _saturating(BYTES, own, HALF_BYTES)
    return replace(old, forward=knots, backward=knots, provenance=provenance)


def _saturating(works: tuple[float, ...], most: float, half: float) -> Curve:
    return Curve(tuple((work, float(f"{most * work / (work + half):.4g}")) for work in works))


def measured_system(profile: Profile, path: Path = SOFTWARE) -> Profile:
    """The profile, with what launching costs the software that was measured, and what its nodes sent."""
    software = json.loads(path.read_text(encoding="utf-8"))
    network = software.pop("inter_node")
    data = {**_without_defaults(profile_to_json(profile)), "tables": [], **software}
    data["links"] = [{**link, **network} if link["level"] == "inter_node" else link for link in data["links"]]
    data["facts"]["sustained_clock"] = 1.0  # the curve of products is of whole iterations, and no burst
    return profile_from_json(data, str(path))


def shipped_constants(profile: Profile) -> dict[str, float]:
    """The constants that a profile made by `with_constants` was made from; the expected ones of another profile."""
    if profile.host is None:
        return dict(CONSTANTS)
    found: dict[str, float] = {}
    (least_work, least), (most_work, most) = (profile.operators["matmul"].forward.knots[n] for n in (0, -1))
    # 1/e = (1 + half/work)/most, at both ends
    inverse = (1 / least - 1 / most) / (1 / least_work - 1 / most_work)
    found["matmul_efficiency"] = 1 / (1 / most - inverse / most_work)
    found["matmul_half_flops"] = inverse * found["matmul_efficiency"]
    for name, family in (
        ("memory_efficiency", "pointwise"),
        ("cross_entropy", "cross_entropy"),
        ("optimizer", "optimizer"),
    ):
        work, share = profile.operators[family].forward.knots[-1]
        found[name] = share * (1 + HALF_BYTES / work)
    found |= {
        name: float(getattr(profile.host, name)) for name in ("operator_ns", "gradient_ns", "collective_ns", "pass_ns")
    }
    found["node_bandwidth"] = float(profile.links["inter_node"].node_bandwidth or CONSTANTS["node_bandwidth"])
    return found


def write_constants(path: Path, constants: Mapping[str, float], rows: str) -> None:
    """Writes the profile at `path` anew under these constants, and the host's where `measured_system` finds them."""
    profile = profile_from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    source = (
        f"{len(CONSTANTS)} constants fitted to {rows}: iteration times of Megatron-DeepSpeed GPT training published at "
        "github.com/VIA-Research/vTrain (MIT), by benchmarks/accuracy/published.py; the host's four stay "
        "with that software, and the network's with that cluster"
    )
    fitted = with_constants(profile, constants, source)
    far = json.loads(json.dumps(profile_to_json(fitted)))["links"]
    network = next(link for link in far if link["level"] == "inter_node")
    made = replace(fitted, facts=profile.facts, tables=profile.tables, links=profile.links)
    data: dict[str, Any] = _without_defaults(profile_to_json(made))
    software = {
        "host": data.pop("host"),
        "inter_node": {name: network[name] for name in ("node_bandwidth", "provenance")},
    }
    path.write_text(profile_text(data) + "\n", encoding="utf-8")
    SOFTWARE.write_text(json.dumps(software, indent=2) + "\n", encoding="utf-8")


def _without_defaults(data: Any) -> Any:
    """Tuples as lists, and links without what they do not state."""
    data = json.loads(json.dumps(data))
    data["links"] = [
        {name: value for name, value in link.items() if value not in (None, 0, [])} for link in data["links"]
    ]
    return data
