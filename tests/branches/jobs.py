"""What ranks do in these tests; a light module, since each rank imports it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from autopar.program import load_source


def run_once(rank: int, world: int, source: str, state: Any, batch: Any) -> Any:
    """A step: this rank's bytes by collective, and the running statistics after it."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    with rt.count_bytes() as counted:
        built.train_step(**batch)
    sent = Counter[str]()
    for key, size in counted.items():
        sent[key[0]] += size
    return dict(sent), {name: value for name, value in built.full_state_dict().items() if "running" in name}
