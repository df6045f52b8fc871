"""The command `autopar audit`: its options, and what it prints when."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.auditing.frameworks import FRAMEWORKS
from autopar.auditing.job import PLANS, RECOMPUTATIONS
from autopar.auditing.result import Audit, audit
from autopar.auditing.text import searched_lines
from autopar.ir.mesh import Mesh
from autopar.ir.naming import printable

LoadModel = Callable[[str, bool], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("file", type=Path, help="torchtitan's TOML, Megatron-LM's script, command line or YAML, "
                        "DeepSpeed's JSON, Accelerate's or nanotron's YAML; nothing of it is run")  # fmt: skip
    parser.add_argument("--mesh", help="the devices, such as h100:8x8, where the file does not say them all")
    parser.add_argument("--model", help="a Hugging Face config.json, or module:config, where the file has no sizes")
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), help="where the file's ending and keys do not tell")
    parser.add_argument("--search", choices=("none", *PLANS), default="fast", help="for better configurations")
    parser.add_argument("-o", "--output", type=Path, help="write the file with the better configuration in it")
    for name in ("micro-batch", "global-batch", "seq-len", "vocab-size"):
        parser.add_argument(f"--{name}", type=_count, metavar="N", help="what the file leaves to a script")
    parser.add_argument("--recompute", choices=RECOMPUTATIONS, help="what the model's own code computes again")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, found {text!r}")
    return int(text)


def run(options: argparse.Namespace, load_model: LoadModel) -> int:
    """Prints whether the job is legal at once, then what it takes, then what would be better; 0, or 1 where the job is
    illegal or does not fit."""
    model = options.model
    if model is not None and not model.endswith(".json"):
        model = load_model(model, True)

    told = list[str]()

    def tell(found: Audit) -> None:
        lines = [printable(line) for line in searched_lines(found)] if found.is_searched else str(found).split("\n")
        for line in lines:
            if line not in told:
                print(line, flush=True)
        told.extend(lines)

    found = audit(
        options.file, Mesh.parse(options.mesh) if options.mesh else None, model, framework=options.framework,
        search=None if options.search == "none" else options.search, micro_batch=options.micro_batch,
        global_batch=options.global_batch, seq_len=options.seq_len, vocab_size=options.vocab_size,
        recompute=options.recompute, tell=tell,
    )  # fmt: skip
    tell(found)
    if options.search != "none":
        print(f"  so it is     {found.verdict}")
    if options.output:
        found.write(options.output)
        print(f"  written to   {options.output}", file=sys.stderr)
    return 1 if found.verdict in ("illegal", "does not fit") else 0
