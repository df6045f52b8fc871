"""What `serve` returns: plans of all steps with one emitted source, ready to save, launch or build."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.emit import emit
from autopar.ir.faults import faults_told
from autopar.ir.plan import Plan
from autopar.ir.writing import write_whole
from autopar.program import load_source
from autopar.serving.curve import BatchLatency, LatencyCurve
from autopar.serving.planning import Steps
from autopar.serving.script import SCRIPT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.serving import Server


class ServedProgram:
    """A sharded decoder that serves: `decode` and `prefill` are its plans, `curve` what was predicted of each batch."""

    def __init__(
        self, steps: Steps, curve: LatencyCurve, max_length: int, state: Mapping[str, Any] | None, checked: str
    ) -> None:  # fmt: skip
        """state: the weights by name, None where there are none. checked: what came of holding it against the model."""
        self.curve, self.max_length, self.checked_against_eager = curve, max_length, checked
        self._steps, self._state = steps, state
        self.source = emit(*steps.decode, list(steps.prefill.values()))

    @property
    def decode(self) -> Plan:
        """The plan of a step that adds a token to each sequence."""
        return self._steps.decode[1]

    @property
    def prefill(self) -> dict[int, Plan]:
        """The plans of steps that take a chunk of each prompt, by its length."""
        return {steps: plan for steps, (_, plan) in self._steps.prefill.items()}

    @property
    def max_batch(self) -> int:
        """How many sequences run at once."""
        return self._steps.batch

    @property
    def latency(self) -> BatchLatency:
        """What is predicted of this batch."""
        return self._steps.latency()

    def __str__(self) -> str:
        own = self.latency
        assert own.decode is not None
        prompts = ", ".join(f"{step.predicted_ns / 1e6:.3g} ms for {n}" for n, step in own.prefill.items())
        return (
            f"{self.decode.model} on {self.decode.mesh} as {own.layout}: {self.max_batch} sequences of up to "
            f"{self.max_length} positions\n"
            f"  decode      {own.decode.predicted_ns / 1e6:.3g} ms a step, {own.tokens_s:,.0f} tokens a second\n"
            f"  prefill     {prompts} positions of each prompt\n"
            f"  memory      {own.peak_bytes:,} of {self.decode.memory_limit:,} bytes a device, the cache included\n"
            f"  checked against the model without a cache: {self.checked_against_eager}"
        )

    @faults_told()
    def save(self, folder: str | Path) -> Path:
        """Writes program.py, the plans, curve.json, serve.py and weights, each whole or not at all."""
        folder = Path(folder)
        write_whole(folder / "program.py", self.source)
        write_whole(folder / "plan.json", self.decode.to_json())
        for steps, plan in self.prefill.items():
            write_whole(folder / f"prefill_{steps}.json", plan.to_json())
        write_whole(folder / "curve.json", json.dumps([asdict(point) for point in self.curve.points], indent=1))
        write_whole(folder / "serve.py", SCRIPT.format(world=self.decode.mesh.num_devices, max_length=self.max_length))
        if self._state is not None:
            part = folder / "weights.pt.part"
            torch.save(dict(self._state), part)
            part.replace(folder / "weights.pt")
        return folder

    @faults_told()
    def build(self, device_mesh: DeviceMesh | None = None, device: str | None = None) -> Server:
        """This rank's server inside torchrun: real shards only, with the model's weights when it has any."""
        from autopar import runtime
        from autopar.runtime.serving import Server

        rank = runtime.build(load_source(self.source).Program, device_mesh, device=device)
        if self._state is not None:
            rank.init_from(self._state, broadcast=False)
        return Server(rank, self.max_length)


def state_of(model: torch.nn.Module) -> dict[str, Any] | None:
    """A decoder's tensors by name; None when on meta. The cache is not among them: it begins empty."""
    named: Sequence[tuple[str, torch.Tensor]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(),
    ]
    return None if any(x.is_meta for _, x in named) else {name: x.detach() for name, x in named}
