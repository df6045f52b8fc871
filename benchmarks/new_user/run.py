"""A new user's first hour, replayed: the README's path, a path from Hugging Face, mistakes; with a terminal, without
one, and in a notebook. Each step with its time and what is seen.

    python -m benchmarks.new_user.run [--measure] [--output benchmarks/new_user/results.md]

Steps run in a new folder outside the repository, in this environment. With --measure the profile of this host is
measured, twice, in a cache of its own (three minutes each, on a busy host six); without it, the one that is there
serves. A terminal is one of `script`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.facts import facts

ROOT = Path(__file__).resolve().parents[2]
HUGGING_FACE = """import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Config:
    hidden, layers, batch, seq = 256, 4, 8, 128


def build(config):
    sizes = dict(hidden_size=config.hidden, intermediate_size=2 * config.hidden, num_hidden_layers=config.layers)
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_attention_heads=4, num_key_value_heads=2, **sizes))


def example_inputs(config):
    ids = torch.randint(2048, (config.batch, config.seq))
    return {"input_ids": ids, "labels": ids.clone()}
"""
LOGITS = """from hf import Config, build, torch


def example_inputs(config):
    return {"input_ids": torch.randint(2048, (config.batch, config.seq))}
"""
NOTEBOOK = """import os, sys, time, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(text) for text in (
    "import autopar, mynet\\nmodel, batch = mynet.build(mynet.Config), mynet.example_inputs(mynet.Config)",
    "program = autopar.parallelize(model, autopar.Mesh('cpu', devices_per_node=2), batch)",
    "print(program.plan)", "program.plan",
)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=1800).execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text") or f"[{', '.join(output.get('data', {}))}]")
"""
PATH = """autopar plan mynet --mesh cpu:2 --constraint stages=1 -o plan.json
autopar explain plan.json layers.0.up
autopar plan mynet --mesh cpu:2 --constraint stages=1 --constraint 'layers.0.up.weight used=R' -o pinned.json
autopar diff plan.json pinned.json
autopar emit mynet pinned.json -o out
torchrun --nproc-per-node 2 out/train.py"""
FROM_HUGGING_FACE = """autopar plan hf --meta --precision bf16 --mesh cpu:2 -o hf.json
autopar emit hf --meta hf.json -o hf_out
torchrun --nproc-per-node 2 hf_out/train.py --steps 5
torchrun --nproc-per-node 2 hf_out/train.py --steps 5
autopar plan logits --meta --precision bf16 --mode inference --mesh cpu:2 -o logits.json
autopar emit logits --meta logits.json -o logits_out
torchrun --nproc-per-node 2 logits_out/evaluate.py
autopar emit logits logits.json -o weights_out
torchrun --nproc-per-node 2 weights_out/evaluate.py"""
MISTAKES = """autopar --version
autopar plan mynet --mesh cpu:2 --search fast --optimizer sgd
autopar plan mynet --mesh cpu:2 --template pp=2,microbatches=2 --split speed
autopar plan mynet --mesh cpu:2 --split speed
autopar plan mynet --mesh cpu:2 --memory-limit 0
autopar plan mynet --mesh cpu:2 --memory-limit 1
autopar plan mynet.py --mesh cpu:2
autopar plan empty --mesh cpu:2
autopar plan noconfig --mesh cpu:2
autopar plan nobuild --mesh cpu:2
autopar plan noinputs --mesh cpu:2
autopar plan nosuch --mesh cpu:2
autopar plan mynet --mesh nosuch:8
autopar explain plan.json nothing.here
autopar explain plan.json layers.0.up.wieght
autopar show plan.json | head -1"""


class Seen(NamedTuple):
    """A step: where, the command, its exit status and seconds, and what it printed."""

    where: str
    command: str
    status: int
    seconds: float
    text: str


def prepare(folder: Path) -> None:
    """The README's file, a model of Hugging Face's, and modules with a mistake each."""
    section = (ROOT / "README.md").read_text().split("## From your own model file to a trained step\n")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    source = found[1]
    texts = {
        "mynet": source, "hf": HUGGING_FACE, "logits": LOGITS, "notebook": NOTEBOOK, "empty": "",
        "noconfig": source.replace("class Config:", "class Settings:"),
        "nobuild": source.replace("    return Net(", "    Net("),
        "noinputs": re.sub(r'    return \{"rows".*', "    return None", source),
    }  # fmt: skip
    for name, text in texts.items():
        folder.joinpath(f"{name}.py").write_text(text)


def run(where: str, command: str, folder: Path, **more: str) -> Seen:
    """where: "pipe" or "terminal"."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, **more}
    in_terminal = ["script", "-qec", f"stty cols 120; {command}", "/dev/null"]
    whole = in_terminal if where == "terminal" else ["bash", "-c", command]
    began = time.monotonic()
    done = subprocess.run(
        whole, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return Seen(where, command, done.returncode, time.monotonic() - began, done.stdout)


def steps(folder: Path, measures: bool) -> Iterator[Seen]:
    caches = [folder / "cache of a pipe", folder / "cache of a notebook"]
    if measures:
        yield run("pipe", "autopar plan mynet --mesh cpu:2 --search fast", folder, XDG_CACHE_HOME=str(caches[0]))
    for command in PATH.splitlines():
        yield run("pipe", command, folder)
    for command in (*PATH.splitlines()[:4], "autopar show plan.json"):
        yield run("terminal", command, folder)
    for command in FROM_HUGGING_FACE.splitlines():
        yield run("pipe", command, folder)
    for command in MISTAKES.splitlines():
        yield run("pipe", command, folder)
    more = {"XDG_CACHE_HOME": str(caches[1])} if measures else {}
    seen = run("pipe", f"{shlex.quote(sys.executable)} notebook.py", folder, **more)
    yield seen._replace(where="notebook", command="parallelize, print(program.plan), program.plan")


def plain(text: str) -> list[str]:
    """Lines as they are left on a screen."""
    lines = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n"))
    return [line.rstrip() for line in lines if line.strip()]


def told(seen: Seen) -> str:
    """A section of the record: long texts with their first and last lines."""
    lines = plain(seen.text)
    shown = lines if len(lines) <= 14 else [*lines[:10], f"… {len(lines) - 12} lines …", *lines[-2:]]
    head = f"**{seen.where}** `{seen.command}` — {seen.seconds:.1f} s, status {seen.status}"
    return "\n".join([head, "", "```text", *(line[:200] for line in shown), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        found = []
        for seen in steps(folder, options.measure):
            found.append(seen._replace(text=seen.text.replace(str(folder), "~")))
            print(f"{seen.where:9} {seen.seconds:6.1f} s  {seen.status}  {seen.command}", flush=True)
    machine = facts("benchmarks.new_user.run")
    head = ["# A new user's first hour", "", *(f"{key}: {value}  " for key, value in machine.items()), ""]
    text = "\n".join([*head, *map(told, found)])
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
