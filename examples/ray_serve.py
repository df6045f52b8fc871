"""Serves a decoder of transformers with Ray Serve, in batches that wait as long as the plan's window says.

    pip install "autopar[trainer]" "ray[serve]"
    python examples/ray_serve.py --model FOLDER --mesh cpu:1x1 --bound-ms 4000
    curl localhost:8000 -d '{"tokens": [1, 2, 3]}'

Ray Serve takes requests, queues them and starts replicas, each with a device of its own; autopar plans the steps, says
how many requests go into a batch and how long the first may wait for others, at the rate at which they come. A decoder
that several devices share is driven alike on all ranks, as the `serve.py` that `autopar.serve` saves does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import autopar
from autopar.colocation import BatchingWindow, request_curve, windows
from autopar.serving import ServedProgram

RATES_S = tuple(2.0**exponent for exponent in range(-4, 15))
"""Requests a second for which windows are looked up; the last are those that a replica can just take."""
RECENT = 64
"""Arrivals by which the rate is measured. Halved, windows follow a burst sooner, and chance more."""


def window_table(program: ServedProgram, prompt_length: int, new_tokens: int, bound_ms: float) -> list[BatchingWindow]:
    """By rate, how a replica of this program batches so that 99 of 100 requests are answered within the bound.

    The program has one batch, in which fewer requests take as long. Raises InfeasibleError for a bound that is too low.
    """
    curve = request_curve([asdict(program.latency)], prompt_length, new_tokens)
    return windows(curve, RATES_S, round(bound_ms * 1e6))


class Arrivals:
    """The rate of the last requests, and the window for it: that of the next higher rate in the table."""

    def __init__(self, table: Sequence[BatchingWindow]) -> None:
        self._table, self._times = table, deque[float](maxlen=RECENT)

    def at(self, seconds: float) -> BatchingWindow:
        """A request came at that time. Returns the window from now on."""
        self._times.append(seconds)
        passed = seconds - self._times[0]
        rate = (len(self._times) - 1) / passed if passed > 0 else 0.0
        return next((one for one in self._table if one.rate_s >= rate), self._table[-1])


class Replica:
    """A device with the program, and what it is asked for."""

    def __init__(
        self, program: ServedProgram, table: Sequence[BatchingWindow], new_tokens: int, vocabulary: int
    ) -> None:
        self.arrivals, self._new, self._vocabulary = Arrivals(table), new_tokens, vocabulary
        self._server = program.build()

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens that follow each prompt; a batch at a time."""
        return self._server.generate(prompts, self._new)

    def checked(self, body: Any) -> list[int]:
        """The tokens of a request. Raises ValueError for what is no prompt, before others share a batch with it."""
        tokens, most = body.get("tokens") if isinstance(body, dict) else None, self._server.max_length - self._new + 1
        is_text = isinstance(tokens, list) and all(type(one) is int and 0 <= one < self._vocabulary for one in tokens)
        if not is_text or not 0 < len(tokens) <= most:
            raise ValueError(
                f'expected {{"tokens": [...]}} with 1 to {most} numbers below {self._vocabulary}, found '
                f"{str(body)[:80]}; tokenize the text, or start the server with a larger --length"
            )
        return tokens


def planned(options: argparse.Namespace) -> tuple[ServedProgram, int]:
    """The program of a replica, and how many tokens its model knows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model)
    mesh = autopar.Mesh.parse(options.mesh)
    program = autopar.serve(
        model, mesh, max_batch=options.batch, max_length=options.length, prompt_lengths=[options.prompt]
    )
    return program, int(model.config.vocab_size)


def application(options: argparse.Namespace) -> Any:
    """The deployment, bound."""
    from ray import serve

    @serve.deployment(num_replicas=options.replicas, max_ongoing_requests=4 * options.batch)
    class Decoder:
        """Requests one by one, run together."""

        def __init__(self) -> None:
            program, vocabulary = planned(options)
            table = window_table(program, options.prompt, options.new_tokens, options.bound_ms)
            self._replica = Replica(program, table, options.new_tokens, vocabulary)

        @serve.batch
        async def together(self, prompts: list[list[int]]) -> list[list[int]]:
            """In a thread, so that requests come in meanwhile."""
            return await asyncio.to_thread(self._replica.answers, prompts)

        async def __call__(self, request: Any) -> dict[str, Any]:
            """The tokens after a prompt's, or what is wrong with it."""
            try:
                tokens = self._replica.checked(await request.json())
            except ValueError as error:
                return {"error": str(error)}
            now = self._replica.arrivals.at(time.monotonic())
            self.together.set_max_batch_size(now.batch)
            self.together.set_batch_wait_timeout_s(now.wait_ns / 1e9)
            return {"tokens": await self.together(tokens)}

    return Decoder.bind()


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or name of transformers'")
    parser.add_argument("--mesh", default="cpu:1x1", help="one device of a kind")
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--length", type=int, default=1024, help="positions of a prompt and what follows it")
    parser.add_argument("--prompt", type=int, default=256, help="of a usual prompt, for which windows are found")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--bound-ms", type=float, default=4000.0, help="from a request to its answer")
    parser.add_argument("--replicas", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    """Serves until it is stopped."""
    from ray import serve

    serve.run(application(parsed()), blocking=True)


if __name__ == "__main__":
    main()
