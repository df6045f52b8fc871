"""Architectures of the transformers library under templates and random plans, and what each operator keeps.

    python -m tests.equivalence.sweep [NAME …] [--plans 3] [--staged 1] [--seed 0] [--templates dp …]

In float64, on ranks that are threads: loss, gradients, buffers after two steps, bytes (`random_programs.check`); what
operators keep for their backward pass is held against torch (`tests.cost.kept`). A model that has NaN or cannot run
on one device is no case and is told. Ends with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autopar import Mesh
from autopar.errors import AutoparError, InternalError
from autopar.pipeline import template_of_graph
from autopar.simulate import traffic
from tests.cost.kept import held_in
from tests.equivalence.architectures import ARCHITECTURES, Architecture
from tests.equivalence.families import FAMILIES
from tests.equivalence.on_threads import loss_in
from tests.random_programs.cases import Written
from tests.random_programs.check import Subject, Tensors, plan_problems
from tests.random_programs.kinds.judge import REFUSED, judged_subject

TEMPLATES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "recompute": {"dp": 2, "recompute": "full"},
    "microbatches": {"dp": 2, "microbatches": 2},
    "pp": {"pp": 2, "microbatches": 2},
    "dp_tp": {"dp": 2, "tp": 2, "zero": 1},
}
SINGLE_TOLERANCE = 2e-4
"""Of models that compute in float32 here or there, whatever their parameters are."""


@dataclass(frozen=True, eq=False)
class ArchitectureSubject(Subject):
    """One of them, in float64; in float32 where it computes in nothing else."""

    architecture: Architecture = ARCHITECTURES[0]

    @cached_property
    def _built(self) -> tuple[nn.Module, dict[str, Any]]:
        model, batch = self.architecture.build(is_double=True)
        try:
            model(**batch)
        except RuntimeError:
            return self.architecture.build()
        return self.architecture.build(is_double=True)

    @cached_property
    def model(self) -> nn.Module:
        return self._built[0]

    @property
    def batch(self) -> Tensors:  # type: ignore[override]
        """Anew at each call, where a model writes into it."""
        return {key: x.clone() if isinstance(x, Tensor) else x for key, x in self._built[1].items()}

    @cached_property
    def tolerance(self) -> float:  # type: ignore[override]
        is_double = all(one.dtype != "float32" for one in self.graph.tensors.values())
        return super().tolerance if is_double else SINGLE_TOLERANCE

    def loss_of(self, found: Any) -> Tensor:
        return loss_in(found)


def swept(name: str, subject: Subject, seed: int, plans: int, staged: int, templates: list[str]) -> Iterator[
    tuple[str, str]
]:  # fmt: skip
    """What comes of each plan, and of what is kept: the name, and what is wrong with it; nothing where nothing is."""
    for found in judged_subject(subject, f"{name} {seed}", plans, staged):
        yield found
        if found[0] == f"{name} {seed}":
            return  # cannot be traced
    for template in templates:
        yield f"{name} {template}", _of_template(subject, template)
    for one in held_in(name, subject):
        yield f"{name} kept", str(one) if one.is_wrong else ""


def _of_template(subject: Subject, name: str) -> str:
    options = TEMPLATES[name]
    world = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    try:
        plan = template_of_graph(subject.graph, Mesh("cpu", devices_per_node=world), **options)
        with subject.as_routed():
            sent = traffic(subject.graph, plan) if len(plan.stages) == 1 else None
        return "\n".join(plan_problems(subject, plan, sent))
    except InternalError as error:
        return f"InternalError: {error}"
    except AutoparError as error:
        return f"{REFUSED}{error}"
    except Exception as error:  # told, and the others still run
        return f"{type(error).__name__}: {error}"


def main() -> int:
    """Runs them; prints what is wrong or refused, and a line for each architecture."""
    options = _options()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    total = Counter[str]()
    for number, architecture in enumerate((*ARCHITECTURES, *FAMILIES)):
        name = f"{architecture.name}{architecture.head}"
        if options.names and not any(one in (name, architecture.name, architecture.kind) for one in options.names):
            continue
        if number < options.start:
            continue
        began, counts = time.process_time(), Counter[str]()
        subject = ArchitectureSubject(
            Written("", (), False, options.seed),
            architecture=architecture,  # type: ignore[arg-type]
        )
        for what, text in swept(name, subject, options.seed, options.plans, options.staged, options.templates):
            result = "equal" if not text else "refused" if text.startswith(REFUSED) else "wrong"
            result = "kept" if (result, what) == ("equal", f"{name} kept") else result
            counts[result] += 1
            if text:
                print(f"  {result}: {what}: {text[: options.width]}", flush=True)
        total += counts
        print(f"{number} {name}: {dict(sorted(counts.items()))} ({time.process_time() - began:.1f} s)", flush=True)
    print(dict(sorted(total.items())))
    return int(total["wrong"] > 0 or not total)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="architectures or kinds of them; all where none is given")
    parser.add_argument("--plans", type=int, default=3, help="how many random ones of one stage")
    parser.add_argument("--staged", type=int, default=1, help="how many random ones of several stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--templates", nargs="*", default=[*TEMPLATES], choices=[*TEMPLATES])
    parser.add_argument("--start", type=int, default=0, help="the number of the first architecture")
    parser.add_argument("--width", type=int, default=600, help="how much of a text is printed")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
