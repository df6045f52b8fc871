"""From a saved model to a trained one: trained on 4 ranks, interrupted, gone on with on 2 under another plan, exported.

    python -m benchmarks.weights.walk

In a new folder, a small Qwen3 of random weights and a tokenizer trained on Python's standard library, both saved by
save_pretrained, learn that library's sources. The run is ended by SIGTERM after 23 of its 50 steps. The exported model
is loaded by AutoModelForCausalLM in one process: its loss on the evaluation's text must be what the last rank program
logged, and each of its logits that of a program of two ranks which has read the same files. Writes walk.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.facts import facts

STDLIB = Path(sysconfig.get_paths()["stdlib"])
HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
STEPS, STOP_AFTER = 50, 23
MODEL = """import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Config:
    pass


def build(config):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("base"))


def example_inputs(config):
    ids = torch.randint(1000, (8, 32))
    return {"input_ids": ids, "labels": ids.clone()}
"""
ALONE = """from model import Config, build, example_inputs as of_training


def example_inputs(config):
    return {"input_ids": of_training(config)["input_ids"]}
"""
SAVE = """import tokenizers, transformers
from glob import glob
from sysconfig import get_paths
texts = sorted(glob(get_paths()["stdlib"] + "/*.py"))
bpe = tokenizers.ByteLevelBPETokenizer()
bpe.train(texts, vocab_size=1000, special_tokens=["<|endoftext|>"])
transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False,
).save_pretrained("base")
config = transformers.Qwen3Config(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=1000, use_cache=False,
)
transformers.Qwen3ForCausalLM(config).save_pretrained("base")
"""
CHECK = """import torch, transformers
kept = torch.load("logits.pt")
tokenizer = transformers.AutoTokenizer.from_pretrained("trained")
text = open("eval.py", encoding="utf-8").read()
ids = torch.cat([batch["input_ids"].flatten() for batch, _ in kept])
assert ids.tolist() == (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[: len(ids)], "other tokens"
for folder in ("base", "trained"):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        outputs = [model(input_ids=batch["input_ids"], labels=batch["input_ids"]) for batch, _ in kept]
    own = [logits if torch.is_tensor(logits) else logits[0] for _, logits in kept]
    apart = max((output.logits - logits).abs().max().item() for output, logits in zip(outputs, own))
    print(folder, torch.stack([output.loss for output in outputs]).mean().item(), apart, sum(x.numel() for x in own))
"""
COMMON = (
    f"--weights base --text {{texts}} --eval-text eval.py --eval-batches 4 --eval-every 10 --steps {STEPS} "
    "--warmup-steps 5 --schedule cosine --lr 3e-3 --checkpoints checkpoints --save-every 10 --log-file log.jsonl"
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PLANS = {
    "four": ("model", "4", "dp=2,tp=2,zero=3"), "two": ("model", "2", "pp=2,microbatches=2"),
    "logits": ("alone", "2", "tp=2"),
}  # fmt: skip


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
            [*TORCHRUN, "4", "four/train.py", *common()], cwd=folder, env=environment(), stdout=output, stderr=output
        )
        while process.poll() is None and len(logged(folder)) < STOP_AFTER:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait()
    return len(logged(folder))


def common() -> list[str]:
    """The options of both runs: to train on modules of the standard library, by the tokenizer beside the weights."""
    names = ("ast.py", "argparse.py", "inspect.py", "typing.py")
    return COMMON.format(texts=" ".join(str(STDLIB / name) for name in names)).split()


def logged(folder: Path) -> list[dict[str, float]]:
    """The figures of each step so far."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def main(folder: Path) -> None:
    """Writes walk.md."""
    begin = time.perf_counter()
    (folder / "model.py").write_text(MODEL)
    (folder / "alone.py").write_text(ALONE)
    (folder / "eval.py").write_bytes((STDLIB / "dis.py").read_bytes())
    run(folder, sys.executable, "-c", SAVE)
    for name, (model, count, template) in PLANS.items():
        plan = ["--mesh", f"cpu:{count}", "--template", template, "-o", f"{name}.json"]
        plan += ["--mode", "inference"] if model == "alone" else []
        run(folder, sys.executable, "-m", "autopar", "plan", model, "--meta", *plan)
        run(folder, sys.executable, "-m", "autopar", "emit", model, f"{name}.json", "--meta", "-o", name)
    done = interrupted(folder)
    resumed = run(folder, *TORCHRUN, "2", "two/train.py", *common(), "--export", "trained").splitlines()
    read = ("--weights", "trained", "--text", "eval.py", "--steps", "4", "--outputs", "logits.pt")
    run(folder, *TORCHRUN, "2", "logits/evaluate.py", *read)
    checked = {line.split()[0]: line.split()[1:] for line in run(folder, sys.executable, "-c", CHECK).splitlines()}
    losses = {name: found[0] for name, found in checked.items()}
    apart, count = checked["trained"][1:]
    figures = logged(folder)
    assert [item["step"] for item in figures] == list(range(STEPS)), "each step once, none left out"
    last = figures[-1]["eval_loss"]
    assert abs(float(losses["trained"]) - last) < 1e-4 * last, (losses, last)
    assert float(apart) < 1e-5, f"logits differ by {apart}"
    told = facts("benchmarks.weights.walk")
    text = [
        "# From a saved model to a trained one", "", f"`{told['command']}`, {told['machine']}, {told['date']}", "",
        f"- ended by SIGTERM after {done} steps on 4 ranks ({PLANS['four'][2]})",
        f"- on 2 ranks ({PLANS['two'][2]}): {resumed[0]}",
        f"- the last step: `{resumed[-1]}`",
        f"- the evaluation's loss in one process, of the model that was begun with: {float(losses['base']):.6f}",
        f"- of what was exported, by AutoModelForCausalLM.from_pretrained: {float(losses['trained']):.6f}, "
        f"logged by the ranks: {last:.6f}",
        f"- the {int(count):,} logits of that model, and of the program of 2 ranks ({PLANS['logits'][2]}) that read "
        f"the same files, differ by at most {float(apart):.1e}",
        f"- 11 commands in {time.perf_counter() - begin:.0f} s",
    ]  # fmt: skip
    (HERE / "walk.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
