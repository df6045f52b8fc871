"""A served decoder on this rank: prompts into slots of the cache, tokens out, all ranks alike.

The program's batch are slots, each a sequence of its own length. A prompt takes a free slot, in chunks of the prompt
lengths that the program was planned for; then each decode step adds a token to every sequence that runs, while others
wait. A sequence that ended leaves its slot to the next prompt (continuous batching, Orca, OSDI'22): nothing is moved or
cleared, since a query sees no further than its own sequence has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.rank import Rank

Choose = Callable[[Tensor], Tensor]
"""From logits (sequences, vocabulary) to the next token of each."""


class Server:
    """A rank of a served program, with what its cache holds. All ranks call the same methods with the same arguments.

    max_length: how many positions a sequence may have.
    """

    def __init__(self, rank: Rank, max_length: int) -> None:
        self.rank, self.max_length = rank, max_length
        steps = {_tokens_shape(one)[1]: one for one in (rank, *rank._others)}
        self._decode, self._prefill = steps[1], {n: steps[n] for n in sorted(steps) if n > 1}
        self.max_batch = _tokens_shape(rank)[0]
        self._cached: dict[int, int] = {}  # by slot: how many positions it has

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """The lengths of chunks that prompts go in."""
        return tuple(self._prefill)

    @property
    def cached(self) -> dict[int, int]:
        """By slot that is taken: how many positions of its sequence are cached."""
        return dict(self._cached)

    @property
    def free(self) -> list[int]:
        """Slots without a sequence."""
        return [slot for slot in range(self.max_batch) if slot not in self._cached]

    def release(self, slots: Iterable[int]) -> None:
        """Frees slots; their sequences are forgotten."""
        for slot in slots:
            self._cached.pop(slot, None)

    def prefill(self, prompts: Mapping[int, Sequence[int] | Tensor]) -> dict[int, Tensor]:
        """Puts prompts into slots, over what these held. Returns the logits after each one's last token, by slot.

        Sequences in other slots stay as they are. Raises ProgramError for slots that are not there and prompts that
        are empty or do not fit.
        """
        left = {slot: _listed(tokens) for slot, tokens in prompts.items()}
        for slot, tokens in left.items():
            self._check(slot, len(tokens))
        self._cached.update(dict.fromkeys(left, 0))
        found: dict[int, Tensor] = {}
        while left:
            steps = self._chunk(max(map(len, left.values())))
            part = {slot: tokens[:steps] for slot, tokens in left.items()}
            logits = self._run(self._prefill[steps], steps, part)
            left = {slot: tokens[steps:] for slot, tokens in left.items()}
            found |= {slot: logits[slot] for slot, tokens in left.items() if not tokens}
            left = {slot: tokens for slot, tokens in left.items() if tokens}
        return found

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Adds a token to the sequences of these slots. Returns the logits after it, by slot.

        Raises ProgramError for a slot without a sequence, or whose sequence is as long as it may be.
        """
        for slot in tokens:
            if slot not in self._cached:
                raise ProgramError(f"expected slots that prefill has filled, found {slot}; those are {self._cached}")
            self._check(slot, self._cached[slot] + 1)
        logits = self._run(self._decode, 1, {slot: [int(token)] for slot, token in tokens.items()})
        return {slot: logits[slot] for slot in tokens}

    def generate(
        self, prompts: Sequence[Sequence[int] | Tensor], max_new_tokens: int, *,
        eos_token_id: int | Sequence[int] | None = None, choose: Choose | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """The tokens that follow each prompt, as many as asked for, or up to and with the first that ends it.

        Prompts may be more than slots: the next one takes the slot of a sequence that ended. choose: how tokens are
        taken, the likeliest where it is not given (`sampler`); what the first rank takes holds for all. Raises
        ProgramError, before anything runs, for a prompt that does not fit with its new tokens, and for taken slots.
        """
        ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        waiting = deque((number, _listed(prompt)) for number, prompt in enumerate(prompts))
        if self._cached:
            raise ProgramError(f"expected free slots, found sequences in {list(self._cached)}; release them first")
        for _, prompt in waiting:
            self._check(0, len(prompt) + max_new_tokens - 1)
        found: list[list[int]] = [[] for _ in waiting]
        running: dict[int, int] = {}  # by slot: the number of its prompt
        if max_new_tokens < 1:
            return found
        while waiting or running:
            new = dict(zip(self.free, _taken(waiting, len(self.free)), strict=False))
            running |= {slot: number for slot, (number, _) in new.items()}
            logits = self.prefill({slot: prompt for slot, (_, prompt) in new.items()}) if new else {}
            last = {slot: found[number][-1] for slot, number in running.items() if slot not in new}
            logits |= self.decode(last) if last else {}
            for slot, token in self.chosen(logits, choose).items():
                own = found[running[slot]]
                own.append(token)
                if token in ends or len(own) == max_new_tokens:
                    del running[slot]
                    self.release([slot])
        return found

    def chosen(self, logits: Mapping[int, Tensor], choose: Choose | None = None) -> dict[int, int]:
        """The next token by slot: what the first rank takes, the same on all."""
        slots = sorted(logits)
        tokens = (choose or likeliest)(torch.stack([logits[slot] for slot in slots])).to(torch.int64)
        if self.rank.num_ranks > 1:
            dist.broadcast(tokens, 0)
        return dict(zip(slots, tokens.tolist(), strict=True))

    def _run(self, program: Rank, steps: int, new: Mapping[int, list[int]]) -> Tensor:
        """One step. new: by slot, its new tokens, which are put at the end of its row."""
        rows = [new.get(slot, []) for slot in range(self.max_batch)]  # as lists: an operator a slot takes as long as it
        tokens = torch.tensor([[0] * (steps - len(own)) + own for own in rows])
        starts = torch.tensor([self._cached[slot] if own else 0 for slot, own in enumerate(rows)])
        lengths = torch.tensor([len(own) for own in rows])
        with torch.no_grad():
            logits: Tensor = program(tokens=tokens, starts=starts, lengths=lengths)
        for slot, own in new.items():
            self._cached[slot] += len(own)
        return logits

    def _chunk(self, longest: int) -> int:
        """The shortest chunk that all of what is left fits in, or else the longest."""
        return next((steps for steps in self._prefill if steps >= longest), max(self._prefill))

    def _check(self, slot: int, positions: int) -> None:
        if not 0 <= slot < self.max_batch:
            raise ProgramError(
                f"expected slots from 0 to {self.max_batch - 1}, found {slot}; plan for a larger max_batch"
            )
        if not 0 < positions <= self.max_length:
            raise ProgramError(
                f"expected sequences of 1 to {self.max_length} positions, found {positions} in slot {slot}; plan for a "
                "larger max_length, or ask for fewer new tokens"
            )


def likeliest(logits: Tensor) -> Tensor:
    """Greedy: the token with the largest logit of each row."""
    return logits.float().argmax(-1)


def sampler(generator: torch.Generator, temperature: float = 1.0, top_k: int | None = None) -> Choose:
    """Draws tokens by their probabilities at a temperature, among the `top_k` likeliest where that is given."""

    def choose(logits: Tensor) -> Tensor:
        scores = logits.float() / temperature
        if top_k is not None:
            least = scores.topk(min(top_k, scores.shape[-1]), -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    return choose


def _listed(tokens: Sequence[int] | Tensor) -> list[int]:
    return [int(token) for token in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]


def _taken(waiting: deque[tuple[int, list[int]]], count: int) -> list[tuple[int, list[int]]]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _tokens_shape(rank: Rank) -> tuple[int, ...]:
    return next(spec.shape for spec in rank.programs[0].INPUTS if spec.name == "tokens")
