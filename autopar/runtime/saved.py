"""What a checkpoint holds of a rank, in the model's names: packed parameters and their optimizer state in slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.packed import parts_of
from autopar.runtime.slices import Path, Sliced, merged, slices_of
from autopar.runtime.stored import StoredParameter

State = dict[str, Any]


class SavedState:
    """`plain`: what has the model's names as it is stored. `slices`: of packed parameters, by where they belong."""

    def __init__(self, parameters: Mapping[str, StoredParameter], model: Mapping[str, Any]) -> None:
        found = {name: [part.name for part in parts_of(name, item.declared)] for name, item in parameters.items()}
        self.sources = {name: names for name, names in found.items() if names}
        self._packed = {name: parameters[name] for name in self.sources}
        self.plain = {name: item for name, item in model.items() if name not in self.sources}
        self.slices: dict[Path, Sliced] = {}
        self._kept: set[str] = set()  # names of what the checkpoint has a state of
        every = (item for name, parameter in self._packed.items() for item in slices_of(parameter, model[name]))
        self.slices |= {("model", name): sliced for name, sliced in merged(every).items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's names, with the shapes that they have there."""
        found = {name: tuple(tensor.shape) for name, tensor in self.plain.items()}
        return found | {path[1]: tuple(sliced.size) for path, sliced in self.slices.items() if path[0] == "model"}

    def add_optimizer(self, state: State) -> State:
        """An optimizer's state in the model's names, but for what is added to the slices."""
        held = state["state"]
        own = {name: item for name, item in held.items() if name not in self.sources}
        for name in (name for name in self.sources if name in held):
            for key, value in held[name].items():
                if _is_cut_like(value, self._packed[name]):
                    self._add(("optimizer", "state"), key, name, value)
                elif isinstance(value, dict) and set(value) == set(self.sources[name]):
                    for source, item in value.items():
                        own.setdefault(source, {}).setdefault(key, item)
                else:
                    self._check_equal(name, key, value)
                    for source in self.sources[name]:
                        own.setdefault(source, {}).setdefault(key, value)
        groups = [{**group, "params": list(self._in_model(group["params"]))} for group in state["param_groups"]]
        return {**state, "state": own, "param_groups": groups}

    def _add(self, place: Path, key: str, name: str, value: Tensor) -> None:
        for source, sliced in merged(slices_of(self._packed[name], value)).items():
            path = (*place, source, key)
            self.slices.setdefault(path, Sliced(sliced.size)).chunks.update(sliced.chunks)

    def _check_equal(self, name: str, key: str, value: Any) -> None:
        """What is kept for a parameter as a whole is taken for each of the model's that it is made of."""
        if isinstance(value, Tensor) and value.dim() > 0:
            raise ProgramError(
                f"expected an optimizer that keeps tensors of a parameter's shape, found {key} {list(value.shape)} of "
                f"{name}, which is made of {', '.join(self.sources[name])}. Save `full_state_dict()` instead, or plan "
                "without substitutions"
            )

    def _in_model(self, names: Iterable[str]) -> dict[str, None]:
        return dict.fromkeys(source for name in names for source in self.sources.get(name, [name]))

    def only_saved(self, state: State, saved: Mapping[str, Any]) -> State:
        """Without the state of parameters that had none when it was saved, since no gradient had reached them.

        Where others of a packed parameter had, it is zero.
        """
        mine = {path: item for path, item in self.slices.items() if path[0] == "optimizer"}
        names = {*state["state"], *(path[2] for path in mine)}
        self._kept = {name for name in names if any(key.startswith(f"optimizer.state.{name}.") for key in saved)}
        for path, sliced in mine.items():
            if path[2] not in self._kept:
                del self.slices[path]
                for tensor in sliced.chunks.values():
                    tensor.zero_()
        return {**state, "state": {name: item for name, item in state["state"].items() if name in self._kept}}

    def as_stored(self, held: State, loaded: State) -> State:
        """What was loaded, in stored names: `held` has the tensors that the slices were read into."""
        state = {name: item for name, item in loaded["state"].items() if name in held["state"]}
        for name, sources in self.sources.items():
            kept = [source for source in sources if source in self._kept]
            if name in held["state"] and kept:
                found = {source: loaded["state"].get(source, {}) for source in kept}
                common = {key: _joined(key, found, sources) for key in found[kept[0]]}  # each a step count of its own
                state[name] = {**held["state"][name], **common}
        groups = [{**group, "params": self._as_stored(group["params"])} for group in loaded["param_groups"]]
        return {**loaded, "state": state, "param_groups": groups}

    def _as_stored(self, names: Iterable[str]) -> list[str]:
        """The stored names of a group's parameters: a packed one is where the first of its pieces is."""
        first: dict[str, list[str]] = {source: [] for sources in self.sources.values() for source in sources}
        for name, sources in self.sources.items():
            first[sources[0]].append(name)
        return [stored for name in names for stored in first.get(name, [name])]


def _joined(key: str, found: Mapping[str, State], sources: Iterable[str]) -> Any:
    """What is kept for all parameters alike that a packed one is made of, or what is for each, by its name."""
    values = [item[key] for item in found.values()]
    if all(_is_equal(value, values[0]) for value in values):
        return deepcopy(values[0])
    return {source: deepcopy(found.get(source, next(iter(found.values())))[key]) for source in sources}


def _is_equal(one: Any, other: Any) -> bool:
    """Of single numbers. Tensors of several are a parameter's own."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and not one.dim() and not other.dim() and bool(one == other)
    return bool(one == other) and not isinstance(one, dict | list | tuple)


def _is_cut_like(value: Any, parameter: StoredParameter) -> bool:
    """Whether a tensor holds something for each element of a parameter. One of no dims does for all alike."""
    return isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == tuple(parameter.declared.shape)
