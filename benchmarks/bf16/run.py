"""How far logits of models with rotary positions are from float32 in bfloat16, at 2,048 tokens: transformers' own and a
program's.

    python -m benchmarks.bf16.run

Two layers each, with attention that looks at places; relative errors of the far half of positions, in the mean.
`tests/trace/test_wide.py` asserts that the program's are no larger.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from benchmarks.facts import facts, write_record
from tests.trace.test_wide import errors_of, rotary


def main() -> None:
    warnings.simplefilter("ignore")
    found = {}
    for name in rotary():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = errors_of(name, folder)
        print(f"{name.ljust(10)} transformers {found[name][0]:.5f}, program {found[name][1]:.5f}", flush=True)
    rows = [f"| {name} | {theirs:.5f} | {ours:.5f} | {ours / theirs:.3f} |" for name, (theirs, ours) in found.items()]
    text = "\n".join(["| model | transformers in bf16 | program in bf16 | ratio |", "|---|---|---|---|", *rows])
    write_record(Path(__file__).with_name("results"), facts("benchmarks.bf16.run"), {"errors": found}, text)


if __name__ == "__main__":
    main()
