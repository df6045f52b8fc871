"""What an emitted program is written in: blocks, and the parameters, buffers and inputs that they declare.

A block declares its parameters by global shape and placement; `build` gives it this rank's tensors. Then
`self.fc.weight` is the plain local tensor of the parameter's first use, `self.fc.weight_1` that of the
second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autopar.runtime.errors import ProgramError
from autopar.runtime.host_link import LinkRates
from autopar.runtime.mesh import Axis, RankMesh


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How copies of the parameters along an axis meet: "local_sgd" with the updates between two means, after so many
    updates of summed gradients, "adasum" (`copies`), "backup" with the number of copies whose gradients a step goes
    without (`backup`), or by sums in fewer bits (`compressing`): "int8", "topk" with the share of values, "powersgd"
    with the rank."""

    name: str
    axis: str
    period: int = 1
    after: int = 0
    amount: float = 0


@dataclass(frozen=True, slots=True)
class Servers:
    """So many spare ranks that sum gradients (`servers`). parts: by axis over which they do, how many of equal parts of
    a gradient each rank along it sums itself, and each server."""

    count: int
    parts: tuple[tuple[str, tuple[int, int]], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a parameter of the model, which has this shape: `length` elements along `dim` from `start` on.

    name: as in the model, from the module that stores the piece on: "..q.weight" is that of a module beside it, as in
    Python's relative imports. length: None for all of it. transposed: of a matrix, after slicing.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    length: int | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by global shape: where it is stored and in which placements it is used.

    The conversion from `stored` to each of `uses` is paid once a step. It passes through the placements that the
    use names before its own, one step each ("S(0) R -> R R"), or takes the usual steps where it names none.
    Gradients accumulate over the microbatches in the used tensor, then go back the same way.
    `reduce_each_microbatch` sends them back after each microbatch instead (less memory). `regather` frees the
    used tensor between the forward and the backward pass of the enclosing block as well, and converts again for
    each; it implies `reduce_each_microbatch`.
    `compute`: the dtype of the used tensor, where it is not the stored one's. It is cast before it is converted; its
    gradients are cast back before they are added up, over microbatches and over ranks.
    `by_levels`: where a gradient is summed over several axes at the begin of its way, it is reduce-scattered along the
    inner ones, all-reduced along the last, and all-gathered along the inner ones again.
    `by_servers`: those of the uses whose gradient is summed over servers at the begin of its way.
    `pieces`: the slices of the model's parameters that it is made of, one after the other along `packed_dim`, where it
    is none of the model's itself. State dicts have the model's names and shapes all the same.
    `value`: nested lists that a parameter of the loss starts from, where what is loaded is the model's alone.
    `on_host`: what is stored of it, and its gradient, are in the host's memory, where optimizers keep their state of it
    and update it. What is used is brought to the device once a step, or regathered; gradients are sent to the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    stored: str = ""
    uses: tuple[str, ...] = ("",)
    regather: bool = False
    reduce_each_microbatch: bool = False
    requires_grad: bool = True
    compute: torch.dtype | None = None
    by_levels: bool = False
    by_servers: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    packed_dim: int = 0
    value: Any = None
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer or a constant of the model by global shape. Never differentiated; converted at its use.

    `value`: nested lists that hold all of a constant, which no state brings, or what a buffer of the loss starts from;
    a number where all elements of a cache start from it.
    `compute`: the dtype in which the program reads and updates it, where it is stored in another.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    placement: str = ""
    persistent: bool = True
    value: Any = None
    compute: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """An input of the whole step by global shape; microbatches cut `microbatch_dim` before the axes do.

    `compute`: the dtype to which this rank's part is cast.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str = ""
    microbatch_dim: int | None = None
    compute: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The place of an input among the arguments of a step, by its name."""

    name: str


class Fields(dict[str, Any]):
    """The place of a dataclass among the arguments of a step: what its fields are given."""


@dataclass(frozen=True, slots=True)
class Received:
    """A tensor that an earlier stage makes, by the global shape of one microbatch of it.

    It is the one at `position` among what `source`'s forward leaves for other stages, where it has the placement
    `left`; here it arrives as `placement`. `has_gradient`: its gradient goes back the same way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    source: int
    position: int
    left: str
    has_gradient: bool = True


class Parameters(nn.Module):
    """The parameters and buffers of one module of the model: local tensors by name, once built."""

    def __init__(self, /, **declared: Parameter | Buffer | nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            declared_parameters={}, declared_buffers={}, stored_parameters={}, pending_updates={}, late_tensors={},
            model_names={}, set_by_forward=set(),
        )  # fmt: skip
        for name, declaration in declared.items():
            setattr(self, name, declaration)

    declared_parameters: dict[str, Parameter]
    declared_buffers: dict[str, Buffer]
    stored_parameters: dict[str, Any]  # once built: what this rank stores of each
    pending_updates: dict[str, Tensor]
    late_tensors: dict[str, Callable[[], Tensor]]
    model_names: dict[str, str]  # by attribute, where the model calls it otherwise
    set_by_forward: set[str]  # attributes, so far

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter):
            self.declared_parameters[name] = value
        elif isinstance(value, Buffer):
            self.declared_buffers[name] = value
        else:
            super().__setattr__(name, value)

    def __getitem__(self, name: int | str) -> Any:
        """What is named by a number, as in an nn.Sequential."""
        return getattr(self, str(name))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type] # torch allows None

    def __getattr__(self, name: str) -> Any:
        # Reached only when the tensor is not in place: not gathered (yet), or the program was never built.
        late = self.__dict__.get("late_tensors", {}).get(name)
        if late is not None:
            return late()
        if name in self.__dict__.get("declared_parameters", ()) or name in self.__dict__.get("declared_buffers", ()):
            raise ProgramError(f"{name} has no tensor yet: make the program with autopar.runtime.build")
        return super().__getattr__(name)

    def update(self, /, **tensors: Tensor) -> None:
        """Sets buffers and parameters by name; the new values are seen once the backward pass of this microbatch is
        done. Those of parameters are this rank's parts, as these are stored, or whole."""
        self.pending_updates.update({name: value.detach() for name, value in tensors.items()})


def renamed(module: Parameters, /, **names: str) -> Parameters:
    """The module, whose attributes the model calls by other names: those that a module of the runtime has itself."""
    module.model_names.update(names)
    return module


class Numbered(Parameters):
    """Modules of a list of the model, of which this stage has those from number `first` on."""

    def __init__(self, first: int, *modules: nn.Module) -> None:
        super().__init__()
        for number, module in enumerate(modules, first):
            self.add_module(str(number), module)

    def at(self, position: int) -> nn.Module:
        """The module at a position among those that this stage has."""
        return list(self.children())[position]


class Block(Parameters):
    """A module of the model with a forward of its own: the unit of gathering, prefetching and recomputing."""

    def __init__(self, mesh: RankMesh) -> None:
        super().__init__()
        self.__dict__["mesh"] = mesh

    mesh: RankMesh
    is_compiled: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes as this rank sees them and as they cut a batch, outermost first."""
        return self.mesh.batch_axes

    @property
    def microbatch(self) -> int:
        """Number of the microbatch that runs."""
        return self.mesh.progress.microbatch

    @property
    def count(self) -> Tensor | float | None:
        """What a mean over all microbatches divides by; `Program.prepare` sets it for all blocks."""
        return self.mesh.progress.count

    @count.setter
    def count(self, value: Tensor | float) -> None:
        self.mesh.progress.count = value

    @property
    def whole(self) -> dict[str, Tensor]:
        """Sums over all microbatches of what follows from inputs alone; `Program.prepare` sets them."""
        return self.mesh.progress.whole


class Program(Block):
    """The root block of an emitted program; subclasses state the mesh and the inputs they are for."""

    AXES: ClassVar[Mapping[str, int]] = {}
    SHARES: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # by axis, where ranks get different parts of a batch
    JOINED: ClassVar[tuple[tuple[str, ...], ...]] = ()  # axes of which the ranks also talk as those of one
    MICROBATCHES: ClassVar[int] = 1
    TRAINING: ClassVar[bool] = True  # the mode that the model was in when it was traced
    BUFFERS: ClassVar[Mapping[str, Any]] = {}  # first values of those that are known, as nested lists
    INPUTS: ClassVar[tuple[Input, ...]] = ()
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}  # what a step is given, where that is more than its inputs
    TIED: ClassVar[Mapping[str, str]] = {}  # further names of a parameter: {"lm_head.weight": "wte.weight"}
    LOSS_INDEX: ClassVar[int] = 0  # which output is the loss, where forward returns several
    OTHERS: ClassVar[tuple[type[Program], ...]] = ()  # the same for inputs of other shapes, of the same parameters
    FILLING: ClassVar[Mapping[str, float | None]] = {}  # by input, of rows that short batches are filled up with
    ALGORITHM: ClassVar[Algorithm | None] = None  # how copies of the parameters meet, where not by summed gradients
    SERVERS: ClassVar[Servers | None] = None  # spare ranks that sum gradients
    HOST_LINK: ClassVar[LinkRates | None] = None  # a simulated one, of CPU ranks that keep something on the host
    RAN: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # of a traced program, by module: what its statements are

    def prepare(self, microbatches: list[tuple[Tensor, ...]]) -> None:
        """Called before a step's first microbatch with the local inputs of all; override to count them."""


class Stage(Program):
    """A part of a pipeline's model, on ranks of its own: as many as its axes hold, from FIRST_RANK on.

    `forward` takes the local inputs that the stage reads, then what it receives; it returns what it makes of the
    model's outputs (of the dtypes RESULTS), and what it leaves for later stages: two tuples. FIRST: of each list of the
    model that the stage does not have from its begin on, the number of the first module that it has.
    """

    FIRST_RANK: ClassVar[int] = 0
    FIRST: ClassVar[tuple[int, ...]] = ()
    RECEIVED: ClassVar[tuple[Received, ...]] = ()
    RESULTS: ClassVar[tuple[torch.dtype, ...]] = ()

    @classmethod
    def again(
        cls, number: int, first_rank: int, first: tuple[int, ...] = (), received: Sequence[tuple[str, int]] = ()
    ) -> type[Stage]:
        """A stage that does the same with other modules of the model's lists, on other ranks. received: the name of
        each tensor that it receives, and the number of the stage that makes it."""
        pairs = zip(cls.RECEIVED, received, strict=True)
        told = tuple(replace(like, name=name, source=source) for like, (name, source) in pairs)
        own = {"FIRST_RANK": first_rank, "FIRST": first, "RECEIVED": told, "__module__": cls.__module__}
        return type(f"Stage{number}", (cls,), own)


class Pipeline:
    """A program of several stages, in the order in which a microbatch visits them.

    SCHEDULE: the order of forward and backward passes on each submesh, a name that `scheduled` knows.
    INPUTS: those of the model, whose placements the stages state. OUTPUTS: for each output of the model the stage that
    makes it, and its position among what that stage's forward returns.
    """

    STAGES: ClassVar[tuple[type[Stage], ...]] = ()
    SCHEDULE: ClassVar[str] = "1f1b"
    MICROBATCHES: ClassVar[int] = 1
    TRAINING: ClassVar[bool] = True
    INPUTS: ClassVar[tuple[Input, ...]] = ()
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {}
    OUTPUTS: ClassVar[tuple[tuple[int, int], ...]] = ()
    LOSS_INDEX: ClassVar[int] = 0
    TIED: ClassVar[Mapping[str, str]] = {}
    OTHERS: ClassVar[tuple[type[Pipeline], ...]] = ()
    HOST_LINK: ClassVar[LinkRates | None] = None
    FILLING: ClassVar[Mapping[str, float | None]] = {}
