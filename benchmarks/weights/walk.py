"""From a saved model to a trained one: trained on 4 ranks, interrupted, gone on with on 2 under another plan, exported.

    python -m benchmarks.weights.walk

A small Qwen3 of random weights, saved by save_pretrained, learns this repository's guide byte by byte, in a new folder.
The run is ended by SIGTERM after 23 of its 50 steps. The exported model is loaded by AutoModelForCausalLM in one
process, whose loss on the evaluation's text must be what the last rank program logged. Writes walk.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.facts import facts

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
STEPS, STOP_AFTER = 50, 23
MODEL = """import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Config:
    pass


def build(config):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))


def example_inputs(config):
    ids = torch.randint(256, (8, 32))
    return {"input_ids": ids, "labels": ids.clone()}
"""
SAVE = """import transformers
config = transformers.Qwen3Config(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=256, use_cache=False,
)
transformers.Qwen3ForCausalLM(config).save_pretrained("base")
"""
CHECK = """import torch, transformers
ids = torch.tensor(list(open("eval.txt", "rb").read())).view(4, 8, 32)
for folder in ("base", "trained"):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        print(folder, torch.stack([model(input_ids=part, labels=part).loss for part in ids]).mean().item())
"""
COMMON = (
    f"--weights base --text text.md --eval-text eval.txt --eval-batches 4 --eval-every 10 --steps {STEPS} "
    "--warmup-steps 5 --schedule cosine --lr 3e-3 --checkpoints checkpoints --save-every 10 --log-file log.jsonl"
).split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PLANS = {"four": ("4", "dp=2,tp=2,zero=3"), "two": ("2", "pp=2,microbatches=2")}


def run(folder: Path, *command: str) -> str:
    """A command in the folder; what it printed. Raises where it fails."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def environment() -> dict[str, str]:
    """As here, with the repository and the folder to import from."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}.", "OMP_NUM_THREADS": "1"}


def interrupted(folder: Path) -> int:
    """Trains on four ranks until a step is logged, then sends SIGTERM; the steps that were done."""
    with open(folder / "four.txt", "w") as output:
        process = subprocess.Popen(
            [*TORCHRUN, "4", "four/train.py", *COMMON], cwd=folder, env=environment(), stdout=output, stderr=output
        )
        while process.poll() is None and len(logged(folder)) < STOP_AFTER:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait()
    return len(logged(folder))


def logged(folder: Path) -> list[dict[str, float]]:
    """The figures of each step so far."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def main(folder: Path) -> None:
    """Writes walk.md."""
    begin = time.perf_counter()
    (folder / "model.py").write_text(MODEL)
    (folder / "text.md").write_bytes((ROOT / "docs" / "guide.md").read_bytes())
    (folder / "eval.txt").write_bytes((ROOT / "README.md").read_bytes()[:1024])
    run(folder, sys.executable, "-c", SAVE)
    for name, (count, template) in PLANS.items():
        plan = ("--mesh", f"cpu:{count}", "--template", template, "-o", f"{name}.json")
        run(folder, sys.executable, "-m", "autopar", "plan", "model", "--meta", *plan)
        run(folder, sys.executable, "-m", "autopar", "emit", "model", f"{name}.json", "--meta", "-o", name)
    done = interrupted(folder)
    resumed = run(folder, *TORCHRUN, "2", "two/train.py", *COMMON, "--export", "trained").splitlines()
    losses = dict(line.split() for line in run(folder, sys.executable, "-c", CHECK).splitlines())
    figures = logged(folder)
    assert [item["step"] for item in figures] == list(range(STEPS)), "each step once, none left out"
    last = figures[-1]["eval_loss"]
    assert abs(float(losses["trained"]) - last) < 1e-4 * last, (losses, last)
    told = facts("benchmarks.weights.walk")
    text = [
        "# From a saved model to a trained one", "", f"`{told['command']}`, {told['machine']}, {told['date']}", "",
        f"- ended by SIGTERM after {done} steps on 4 ranks ({PLANS['four'][1]})",
        f"- on 2 ranks ({PLANS['two'][1]}): {resumed[0]}",
        f"- the last step: `{resumed[-1]}`",
        f"- the evaluation's loss in one process, of the model that was begun with: {float(losses['base']):.6f}",
        f"- of what was exported, by AutoModelForCausalLM.from_pretrained: {float(losses['trained']):.6f}, "
        f"logged by the ranks: {last:.6f}",
        f"- 8 commands in {time.perf_counter() - begin:.0f} s",
    ]  # fmt: skip
    (HERE / "walk.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
