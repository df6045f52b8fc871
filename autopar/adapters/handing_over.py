"""A module whose parameters and buffers are a rank's from now on, and as it was given, to be planned again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from autopar.runtime import ProgramError, Rank


class HandedOver:
    """A module with a rank's parameters in the places of its own, which are freed; those of other stages are None.
    Raises ProgramError where the rank stores several of them together."""

    def __init__(self, module: nn.Module, rank: Rank) -> None:
        self.module, self.rank = module, rank
        self._given = [
            (inner, name, parameter, f"{path}.{name}".lstrip("."))
            for path, inner in module.named_modules(remove_duplicate=False)
            for name, parameter in inner._parameters.items()
            if parameter is not None
        ]
        self._buffers = [
            (inner, name, buffer)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        own = dict(rank.named_parameters(remove_duplicate=False))
        packed = set(own) - {full for *_, full in self._given}
        if packed:
            raise ProgramError(
                f"expected the module's parameters, found {', '.join(sorted(packed))} stored together; plan with "
                "options={'search': autopar.SearchBudget(substitutions=False)}"
            )
        by_tie: dict[int, nn.Parameter | None] = {}
        for _, _, parameter, full in self._given:
            by_tie[id(parameter)] = by_tie.get(id(parameter)) or own.get(full)
        meta: dict[int, nn.Parameter] = {}
        for index, (inner, name, parameter, full) in enumerate(self._given):
            inner._parameters[name] = by_tie[id(parameter)]
            if id(parameter) not in meta:
                meta[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            self._given[index] = inner, name, meta[id(parameter)], full
        self._put_buffers()

    def _put_buffers(self) -> None:
        for full, buffer in self.rank.named_buffers():
            owner, _, name = full.rpartition(".")
            self.module.get_submodule(owner)._buffers[name] = buffer

    def given_buffers(self) -> dict[str, Tensor]:
        """The module's own, as they were, by name."""
        with self.as_given():
            return dict(self.module.named_buffers())

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """The module with whole parameters, without values, and its own buffers."""
        held = [(inner._parameters, name, inner._parameters[name]) for inner, name, *_ in self._given]
        buffers = [(inner._buffers, name, inner._buffers[name]) for inner, name, _ in self._buffers]
        try:
            for inner, name, parameter, _ in self._given:
                inner._parameters[name] = parameter
            for inner, name, buffer in self._buffers:
                inner._buffers[name] = buffer
            yield
        finally:
            for parameters, name, item in held:
                parameters[name] = item
            for store, name, kept in buffers:
                store[name] = kept
