"""The command `autopar ladder`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from autopar.cli.commands import load_model
from autopar.cost.memory import OPTIMIZERS
from autopar.errors import PlanError
from autopar.ladders import StateStore, exported, ladder
from autopar.ladders.elastic import mirror_price, save_elastic
from autopar.ladders.exports import EXPORTERS


def add(parser: argparse.ArgumentParser, name: str) -> None:
    """Its options."""
    parser.add_argument("model", help="module:config, where module has build(config) and example_inputs(config)")
    parser.add_argument("--meta", action="store_true", help="build without weights (for models that do not fit here)")
    parser.add_argument("--mesh", action="append", required=True, help="as often as needed: h100:8x8 or a100:4x8")
    parser.add_argument("--batch", type=int, action="append", help="a global batch, as often as needed")
    parser.add_argument("--price", action="append", default=[], metavar="KIND=MONEY", help="of a device hour")
    parser.add_argument("--tokens", type=float, help="to train on: says what to rent by --deadline or --budget")
    parser.add_argument("--deadline", type=float, help="hours")
    parser.add_argument("--budget", type=float, help="money, as prices are")
    parser.add_argument("--optimizer", choices=(*OPTIMIZERS, "none"), default="adamw")
    parser.add_argument("--precision", choices=("bf16",), help="bf16 compute with float32 master weights")
    parser.add_argument("--search", choices=("fast", "default", "thorough"), help="searches each rung by itself")
    parser.add_argument("-o", "--output", type=Path, help="a folder for ladder.json, ladder.html and the plans")
    parser.add_argument(
        "--export", choices=EXPORTERS, action="append", default=[], help="what a scheduler reads, to -o"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="the programs too, to -o: nodes may go and come while they train"
    )
    for name, default in (("write", StateStore.write_bytes_s), ("read", StateStore.read_bytes_s)):
        parser.add_argument(
            f"--{name}-rate", type=float, default=default, metavar="BYTES",
            help=f"a second, that a node {name}s of checkpoints; default {default:g}",
        )  # fmt: skip
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Plans all rungs and prints them."""
    if (options.export or options.elastic) and options.output is None:
        raise PlanError("expected -o beside --export and --elastic, a folder to write to, found none")
    store = StateStore(options.write_rate, options.read_rate)
    model, inputs = load_model(options.model, options.meta)
    found = ladder(
        model, inputs, options.mesh, global_batches=options.batch, prices=dict(map(_price, options.price)),
        deadline=options.deadline, budget=options.budget, tokens=options.tokens, optimizer=options.optimizer,
        precision=options.precision, search=options.search,
    )  # fmt: skip
    found = replace(found, store=store)
    if options.output is not None:
        found.save(options.output)
        for name in options.export:
            (options.output / f"{name}.json").write_text(exported(found, name, store), encoding="utf-8")
    print(found)
    if options.elastic:
        save_elastic(found, options.output, model, inputs)
        for rung in found.fitting:
            print(f"  {rung.mesh}: {mirror_price(rung)}")
        print(f"on each node: autopar launch {options.output} --elastic --rendezvous HOST:PORT")
    return 0


def _price(text: str) -> tuple[str, float]:
    kind, _, money = text.partition("=")
    try:
        return kind, float(money)
    except ValueError:
        raise PlanError(f"expected --price as KIND=MONEY, such as h100=2.5, found {text!r}") from None
