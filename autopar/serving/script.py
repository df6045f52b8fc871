"""The script that is saved beside a served program: prompts from a file, answers to standard output."""

SCRIPT = '''"""Generates from prompts: torchrun --nproc-per-node {world} serve.py --prompts prompts.txt --new-tokens 32

Each line of the file is a prompt: token numbers, or text with --tokenizer FOLDER. A server of requests calls
`server.prefill`, `server.decode` and `server.release` in the same way on all ranks.
"""

import argparse
import time
from pathlib import Path

import torch

import program
from autopar import runtime as rt
from autopar.runtime.serving import Server, sampler

HERE = Path(__file__).parent
MAX_LENGTH = {max_length}


def build(weights: Path | None) -> Server:
    rank = rt.build(program.Program)
    if weights is not None:
        told = rank.load_safetensors(weights)
        if rank.number == 0:
            print(told)
    else:
        rank.init_from(torch.load(HERE / "weights.pt", weights_only=True), broadcast=False)
    return Server(rank, MAX_LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--tokenizer", type=Path, help="a folder of save_pretrained's; without it, prompts are numbers")
    parser.add_argument("--weights", type=Path, help="a folder of safetensors, in the place of weights.pt")
    parser.add_argument("--eos", type=int, nargs="*", default=[], help="tokens that end a sequence")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    tokenizer = None
    if options.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    prompts = [tokenizer(line)["input_ids"] if tokenizer else list(map(int, line.split())) for line in lines if line]
    server = build(options.weights)
    choose = sampler(torch.Generator().manual_seed(0), options.temperature) if options.temperature else None
    start = time.perf_counter()
    found = server.generate(prompts, options.new_tokens, eos_token_id=options.eos, choose=choose)
    seconds = time.perf_counter() - start
    if server.rank.number == 0:
        for tokens in found:
            print(tokenizer.decode(tokens) if tokenizer else " ".join(map(str, tokens)))
        print(f"# {{sum(map(len, found)) / seconds:.1f}} tokens a second")


if __name__ == "__main__":
    main()
'''
