"""One rank's part of a program: builds it, trains it, clips it, and loads and saves its weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime import agreement, copying, outside, randomness, state
from autopar.runtime.batch_rules import SuggestedRate, suggested_rate
from autopar.runtime.batches import Batches
from autopar.runtime.compiling import Compile, checked_options, compile_blocks, taken_wrapper, watch_for_wrapper
from autopar.runtime.constants import forget_constants
from autopar.runtime.copies import ParameterCopies, floats_of
from autopar.runtime.declare import Pipeline, Program
from autopar.runtime.errors import ProgramError
from autopar.runtime.filling import filled_up
from autopar.runtime.inputs import by_name, join_outputs, shard_shape, split_named
from autopar.runtime.kept import Contents, Kept
from autopar.runtime.local import Local
from autopar.runtime.mesh import RankMesh
from autopar.runtime.stashing import PIPEDREAM
from autopar.runtime.stored import StoredParameter
from autopar.runtime.weights import initial, loading, saving
from autopar.runtime.weights.naming import Layout, Rename, as_function
from autopar.runtime.weights.parts import FilePart

Microbatches = list[tuple[Tensor, ...]]
"""The local inputs of each microbatch."""


class Rank(Kept):
    """An `nn.Module` whose parameters are DTensors under the single-device model's names."""

    def __init__(self, program: Program, mesh: RankMesh, shared: Sequence[Local] = ()) -> None:
        """shared: what stores the parameters already, for the same program on inputs of other shapes."""
        super().__init__()
        local = Local(program, mesh, others=shared)
        own = state.ProgramState(local.parameters, local.buffers, program.TIED, mesh)
        self._take([local], own, mesh, program.TRAINING, is_main=not shared)
        self._take_others([Rank(other(mesh), mesh, [local]) for other in program.OTHERS])

    def _take_others(self, others: Sequence[Rank]) -> None:
        self.__dict__["_others"] = others
        for other in others:
            other.__dict__["_copies"] = self._copies  # they count their updates together

    _others: Sequence[Rank]  # the same for inputs of other shapes; they share what is stored
    _locals: list[Local]  # the program, or this rank's stages of it
    _state: state.ProgramState
    _mesh: RankMesh

    def _take(
        self, parts: list[Local], state: state.ProgramState, mesh: RankMesh, training: bool, is_main: bool
    ) -> None:  # fmt: skip
        self.__dict__.update(_locals=parts, _state=state, _mesh=mesh)  # not as submodules: names are the model's
        self.training = training
        for name, parameter in state.parameters.items():
            owner, _, last = name.rpartition(".")
            _submodule(self, owner)._parameters[last] = parameter.tensor
        for name, buffer in state.buffers.items():
            owner, _, last = name.rpartition(".")
            module = _submodule(self, owner)
            module._buffers[last] = buffer.tensor
            if not buffer.declared.persistent:
                module._non_persistent_buffers_set.add(last)
        nothing = nn.Parameter(torch.empty(0, device=mesh.device))
        algorithm = next((part.program.ALGORITHM for part in parts), None)
        has_copies = algorithm is not None and algorithm.name != PIPEDREAM and training
        copies = ParameterCopies(algorithm, state) if algorithm is not None and has_copies else None
        self.__dict__.update(
            _contents=Contents(self), _nothing=nothing, _checked_steps=0, _parts_in_files={}, _copies=copies
        )
        if is_main:
            outside.register(state, nothing)

    _contents: Contents
    _copies: ParameterCopies | None  # of the parameters, where they meet otherwise than by the sum of their gradients
    _nothing: nn.Parameter
    _checked_steps: int

    @property
    def num_stages(self) -> int:
        """Number of stages of the program, on all ranks."""
        return 1

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's parameters. Where none is trained, an empty tensor too: optimizers refuse to have nothing."""
        found = list(super().parameters(recurse))
        yield from found
        if not any(parameter.requires_grad for parameter in found):
            yield self._nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Rank:
        """Another rank of the same program with equal weights and buffers, as averages of weights need it."""
        self.unite_copies()
        copy = self._built_again()
        with torch.no_grad():
            for name, parameter in self._state.parameters.items():
                copy._state.parameters[name].local.copy_(parameter.local)
                copy._state.parameters[name].tensor.requires_grad_(parameter.tensor.requires_grad)
            for name, buffer in self._state.buffers.items():
                if buffer.is_set:
                    copy._state.buffers[name].local.copy_(buffer.local)
        memo[id(self)] = copy
        return copy

    def _built_again(self) -> Rank:
        return Rank(type(self._locals[0].program)(self._mesh), self._mesh)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ProgramError: process groups are no data."""
        raise ProgramError(
            "expected to save what a rank holds, found the rank itself, which has process groups; save "
            "rank.full_state_dict(), or use rt.save_checkpoint"
        )

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles the blocks in place, with the arguments of `torch.compile`; `torch.compile(rank)` does the same.

        Compiled are the operators between redistributions; see `runtime.compiling`. Raises ProgramError for
        fullgraph=True.
        """
        checked_options(options)
        self._compile(lambda function: torch.compile(function, *args, **options))

    def _compile(self, compiler: Compile) -> None:
        if any(copying.copies_out(part.program) for part in self._locals):
            raise ProgramError(
                "expected to compile a program that keeps on the device what it saves, found activations that wait on "
                'the host; run it as it is, or plan with offload="none"'
            )
        if any(part.program.ALGORITHM is not None and part.program.ALGORITHM.name == "backup" for part in self._locals):
            raise ProgramError(
                "expected to compile a program whose ranks wait for each other, found one under backup; run it as it "
                "is, or plan without the algorithm"
            )
        for part in (part for rank in (self, *self._others) for part in rank._locals):
            compile_blocks(part.program, compiler)

    def train_step(self, *inputs: Tensor, local: bool = False, **named_inputs: Tensor) -> Tensor:
        """Runs forward and backward over the global batch, or over this rank's shard of it if `local`.

        Returns the loss of the whole batch, equal on all ranks; the parameters have their gradients then,
        added to those that they had before.
        """
        inputs, named_inputs = self._filled_up(inputs, named_inputs, local)
        fitting = self._fitting(inputs, named_inputs, local)
        if fitting is not self:
            return fitting.train_step(*inputs, local=local, **named_inputs)
        with torch.inference_mode(False), torch.enable_grad(), self._own_precision():
            microbatches = self._prepare(inputs, named_inputs, local, trains=True)
            if self._copies is not None:
                self._copies.begin_step()
            for parameter in self._state.parameters.values():
                parameter.begin_step()
            passes = partial(self._passes, microbatches)
            loss = passes() if self._copies is None else self._copies.step(passes)
            for parameter in self._state.parameters.values():
                parameter.publish_gradient()
        return loss

    def _passes(self, microbatches: list[Microbatches]) -> Tensor:
        """All of a step but its end. Returns the loss of the batch."""
        for part, parts in zip(self._locals, microbatches, strict=True):
            part.begin_step(parts)
        losses = self._train(microbatches)
        for part in self._locals:
            part.end_step()
        with torch.no_grad():
            return self._finish(losses)

    @contextmanager
    def _own_precision(self) -> Iterator[None]:
        """Autocast would change some operators and not the buffers between them: the plan says what is computed in."""
        kind = self._mesh.device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        warnings.warn(
            "autocast is off inside of train_step and calls: the program computes in the precision that it was planned "
            'with. For bfloat16, plan with precision="bf16"', stacklevel=4,
        )  # fmt: skip
        with torch.autocast(kind, enabled=False):
            yield

    def _filled_up(self, inputs: Any, named_inputs: Any, local: bool | Tensor) -> tuple[Any, Any]:
        """A global batch of fewer rows than were planned for, with rows that count for nothing."""
        if local is not False or not self._declared.FILLING:
            return inputs, named_inputs
        found = filled_up(self.programs, by_name(self._declared, inputs, named_inputs))
        return (inputs, named_inputs) if found is None else ((), found)

    def _fitting(self, inputs: Any, named_inputs: Any, local: bool | Tensor) -> Rank:
        """The rank that runs inputs of these shapes. Raises ProgramError, on all ranks where they must agree, for
        shapes that the program was not planned for."""
        if not self._others:
            return self
        ranks = [self, *self._others]
        if isinstance(local, Tensor):
            named_inputs, local = {**named_inputs, "local": local}, False
        values = by_name(self._declared, inputs, named_inputs)
        fits = [number for number, rank in enumerate(ranks) if rank._has_shapes(values, local)]
        if local or self.num_stages > 1:  # a rank may have none of them, or a part that is the same of several
            every = agreement.gathered(fits, self.num_ranks)
            fits = [number for number in fits if all(number in other for other in every)]
        if len(fits) != 1:
            known = " or ".join(dict.fromkeys(_shown_shapes(rank._declared) for rank in ranks))
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in values.items() if isinstance(x, Tensor))
            what = "this rank's part of inputs of" if local else "inputs of"
            raise ProgramError(
                f"expected {what} {known}, equally on all ranks, found {shapes}; plan with shapes=[…] for these as well"
            )
        self._contents.check_use(is_called=False)
        self._check_own()
        return ranks[fits[0]]

    def _has_shapes(self, values: Mapping[str, Any], local: bool) -> bool:
        """Whether the inputs that are there are of the shapes that the program, or this rank's part of it, takes."""
        if not local:
            taken = {spec.name: spec.shape for spec in self._declared.INPUTS}
            return all(not isinstance(x, Tensor) or x.shape == taken[name] for name, x in values.items())
        return all(
            not isinstance(values[spec.name], Tensor)
            or values[spec.name].shape == shard_shape(spec, part.program.MICROBATCHES, part.mesh)
            for part in self._locals
            for spec in part.program.INPUTS
        )

    def _prepare(self, inputs: Any, named_inputs: Any, local: bool | Tensor, trains: bool) -> list[Microbatches]:
        """The local inputs of each microbatch, for each part of the program that runs here.

        A tensor given as `local` is the model's input of that name.
        """
        if isinstance(local, Tensor):
            named_inputs, local = {**named_inputs, "local": local}, False
        compiler = taken_wrapper(self)
        if compiler is not None:
            self._compile(compiler)
        inputs = [_plain(value) for value in inputs]
        values = by_name(self._declared, inputs, {name: _plain(value) for name, value in named_inputs.items()})
        microbatches = self._checked(values, local, trains)
        for part in self._locals:
            part.refresh_buffers()
        randomness.begin_step()
        return microbatches

    def _checked(self, values: Mapping[str, Any], local: bool, trains: bool) -> list[Microbatches]:
        """Refuses what is wrong here; in the first steps, what is on another rank, and what differs between ranks.

        A stage has tensors that others lack, and a shard is one rank's. In later steps, a rank refuses these alone.
        """
        ready = partial(self._ready, values, local, trains)
        if self._checked_steps >= agreement.CHECKED_STEPS:
            return ready()
        declared = self._declared
        agreement.check_batch(values, local, None if issubclass(declared, Pipeline) else declared, self._mesh)
        microbatches = agreement.together(ready, self.num_ranks)
        if not self._checked_steps:
            agreement.check_stored([*self._state.parameters.values(), *self._state.buffers.values()], self.num_ranks)
        self.__dict__["_checked_steps"] += 1
        return microbatches

    def _ready(self, values: Mapping[str, Any], local: bool, trains: bool) -> list[Microbatches]:
        """The microbatches, where this rank may run them. Raises ProgramError."""
        self._contents.check_use(is_called=not trains)
        self._check_own()
        self._state.check_set()
        if trains:
            self._check_frozen()
        return self._split(values, local)

    @property
    def _declared(self) -> type[Program] | type[Pipeline]:
        """The class that names the inputs."""
        return type(self._locals[0].program)

    def _split(self, values: Mapping[str, Tensor], local: bool) -> list[Microbatches]:
        return [split_named(type(self._locals[0].program), values, self._mesh, local)]

    def _check_frozen(self) -> None:
        """Raises ProgramError for a parameter that was frozen when it was planned, and is not any more."""
        for name, parameter in self._state.parameters.items():
            if parameter.tensor.requires_grad and not parameter.declared.requires_grad:
                raise ProgramError(
                    f"expected {name} to need no gradient, as when it was planned, found requires_grad=True; "
                    "plan again with a model in which it does"
                )

    def _check_own(self) -> None:
        """Raises ProgramError for what was replaced, added or taken away: the program would not see that."""
        replaced = self._contents.changed()
        replaced += [name for name, item in self._state.parameters.items() if not item.is_in_place]
        if replaced:
            raise ProgramError(
                f"expected the parameters and buffers that the program was built with, found others in the places of "
                f"{', '.join(replaced)}, which it does not compute with (load_state_dict(assign=True), setattr, del, "
                "add_module, parameter.data = …). Copy values into them instead: parameter.copy_(…) under "
                "torch.no_grad(), load_state_dict, load_full_state_dict or init_from; a device is given to rt.build"
            )

    def _train(self, microbatches: list[Microbatches]) -> list[Tensor]:
        """All passes of a step. Returns the microbatches' losses, which may still be on their way."""
        return [self._train_microbatch(*item) for item in enumerate(microbatches[0])]

    def _train_microbatch(self, index: int, inputs: tuple[Tensor, ...]) -> Tensor:
        (part,) = self._locals
        try:
            loss = loss_of(part.forward(index, inputs), part.program.LOSS_INDEX)
            part.backward(index, loss.backward)
        finally:
            part.end_pass()
        return loss.detach()

    def _finish(self, losses: list[Tensor]) -> Tensor:
        """What is left to do when all gradients are home; the loss of the batch, as every rank gets it."""
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)

    @torch.no_grad()
    def forward(self, *inputs: Tensor, local: bool = False, **named_inputs: Tensor) -> Any:
        """Runs the forward pass alone, without gradients, and returns what the program returns."""
        inputs, named_inputs = self._filled_up(inputs, named_inputs, local)
        fitting = self._fitting(inputs, named_inputs, local)
        if fitting is not self:
            return fitting(*inputs, local=local, **named_inputs)
        self.unite_copies()
        with self._own_precision():
            microbatches = self._prepare(inputs, named_inputs, local, trains=False)
            for part, parts in zip(self._locals, microbatches, strict=True):
                part.begin_step(parts)
            outputs = self._run(microbatches)
            for part in self._locals:
                part.finish_late()
            return self._join(outputs)

    def _run(self, microbatches: list[Microbatches]) -> list[Any]:
        (part,) = self._locals
        return [self._run_microbatch(part, *item) for item in enumerate(microbatches[0])]

    def _run_microbatch(self, part: Local, index: int, inputs: tuple[Tensor, ...]) -> Any:
        try:
            return part.forward(index, inputs)
        finally:
            part.end_pass()

    def _join(self, outputs: list[Any]) -> Any:
        """One result of those of all microbatches."""
        return join_outputs(outputs, ())

    @property
    def num_ranks(self) -> int:
        """Number of ranks that run the program."""
        return self._mesh.size

    @property
    def stored_parameters(self) -> dict[str, StoredParameter]:
        """What this rank stores, by stored name, of which a packed one is none of the model's."""
        return self._state.parameters

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a collective waits for a rank; None where the groups were given."""
        return self._mesh.timeout_s

    @property
    def number(self) -> int:
        """This rank's, among all that run the program."""
        return dist.get_rank() if dist.is_initialized() and self.num_ranks > 1 else 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._mesh.device

    @property
    def programs(self) -> list[type[Program] | type[Pipeline]]:
        """What is run here: the program, and the same for inputs of each other shape."""
        return [rank._declared for rank in (self, *self._others)]

    @property
    def reads_inputs(self) -> bool:
        """Whether a stage of this rank reads any input of the model."""
        return any(part.program.INPUTS for part in self._locals)

    def batches(
        self, loader: Iterable[Any], *, local: bool = False, epochs: int | None = 1, short: str = "refuse"
    ) -> Batches:  # fmt: skip
        """The batches of a DataLoader, or of any iterable of dicts or tuples, as `train_step(**batch)` takes them.

        Each is the global batch, equal on all ranks; or this rank's part, if `local`, as for train_step. One is read
        ahead of a loader with workers. Ranks whose stages read no input read none. epochs: passes over the loader, None
        for no end. short: whether a last batch of rows that were not planned (see `parallelize(shapes=…)`) is refused
        before anything runs, or left out ("drop"). The result has `state_dict` and `load_state_dict`, for `extra=` of
        checkpoints.
        """
        return Batches(self, loader, local=local, epochs=epochs, short=short)

    def forget_constants(self) -> None:
        """After weights or buffers were set: computes again, at the next step, what the program keeps of buffers."""
        if self._copies is not None:
            self._copies.loaded()
        for part in (part for rank in (self, *self._others) for part in rank._locals):
            forget_constants(part.program)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Returns the norm before, a 0-dim tensor that is equal on all ranks: the single-device norm.
        """
        return self._state.clip_grad_norm(float(max_norm), float(norm_type))

    def suggested_learning_rate(
        self,
        base: float,
        base_batch: int,
        *,
        optimizer: Any = "adamw",
        rule: str | None = None,
        batch: int | None = None,
    ) -> SuggestedRate:
        """A learning rate for this program's batch, from one (`base`) that was found for steps of `base_batch` samples.

        optimizer: one of torch.optim, its class or its name: SGD's rate grows with the samples of a step, Adam's and
        its kind's with their square root. rule: "linear" or "square root", whatever the optimizer. batch: the samples
        of a step, where a loop accumulates several batches. The result is a number by `float`, says how it came about
        by `str`, and is warmed up by `at(step, warmup_steps)`: from `base` on (Goyal et al., 2017; Krizhevsky, 2014;
        Hoffer et al., 2017). Raises ProgramError for an optimizer without a known rule.
        """
        own = next((spec.shape[0] for spec in self.programs[0].INPUTS if spec.shape), 1)
        return suggested_rate(base, base_batch, own if batch is None else batch, optimizer, rule)

    def unite_copies(self, optimizer: Any = None) -> None:
        """Under an algorithm that trains copies of the parameters, such as local SGD: all take their mean, and that of
        what the optimizer keeps of them. Other programs have nothing to do.

        Whatever reads the weights of the model does so first: calls, `full_state_dict`, `state_dict`, safetensors and
        checkpoints. All ranks call it together.
        """
        if self._copies is not None:
            self._copies.unite(floats_of(optimizer) if optimizer is not None else ())

    @property
    def agreed_wishes(self) -> Callable[[Sequence[bool]], list[bool]] | None:
        """Under backup, what tells other ranks of two wishes without waiting for them (`Watch`); else None."""
        return self._copies.first.agreed if self._copies is not None and self._copies.first is not None else None

    def update_with(self, optimizer: Any) -> None:
        """Under an algorithm that updates weights within a step, "pipedream": by this optimizer of all of
        `rank.parameters()`, one of elements, such as AdamW. Raises ProgramError, also for a program without such."""
        raise ProgramError(
            f"expected a program that updates its weights within steps ({PIPEDREAM}), found one that leaves that to "
            "optimizer.step()"
        )

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """See `torch.nn.Module.state_dict`; copies of the parameters that differ take their mean (`unite_copies`)."""
        self.unite_copies()
        return super().state_dict(*args, **options)

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers by single-device name, tied names too, on every rank."""
        self.unite_copies()
        return self._state.full(cpu_offload=cpu_offload)

    def load_full_state_dict(self, tensors: Mapping[str, Tensor], *, broadcast: bool = False) -> None:
        """Loads whole tensors by single-device name; if `broadcast`, those that the mesh's first rank has.

        Raises ProgramError that lists the names that are missing or unexpected and the shapes that differ.
        """
        self._state.load(tensors, broadcast=broadcast)
        self.forget_constants()

    def init_from(self, model: nn.Module | Mapping[str, Tensor], *, broadcast: bool = True) -> None:
        """Starts from a single-device model's weights, or its tensors by name (those it has no use for are left).

        What the loss stores starts from its values when it was planned, where it is not among them.

        With `broadcast`, the weights that the mesh's first rank has are taken everywhere, whatever the seeds.
        """
        if isinstance(model, nn.Module):
            tensors = model.state_dict() | dict(model.named_parameters()) | dict(model.named_buffers())
        else:
            tensors = dict(model)
        known = self._state.names
        given = {k: v for k, v in tensors.items() if k in known}
        if not broadcast:
            agreement.check_weights(given, self.num_ranks)
        self.load_full_state_dict(self._state.initial() | given, broadcast=broadcast)

    def load_safetensors(
        self, path: str | Path, *, layout: str | None = None, rename: Rename = None, rotary: str = "interleaved",
        head_dim: int | None = None, strict: bool = True, convert: bool = False,
    ) -> loading.LoadedWeights:  # fmt: skip
        """Loads Hugging Face's files: a folder, an index or one file. This rank reads its slices alone.

        layout: "huggingface" or "meta", where files have the other's names than the model; Meta's and torchtitan's come
        with rows of queries and keys for `rotary` embeddings of interleaved pairs, or of "halves" where both do so.
        rename: from the model's names to the files'. convert: to dtypes that do not hold all values of the files'.
        Raises ProgramError, with nothing loaded, for tensors that are missing or of another shape or dtype, and if
        `strict` for those that the program has no use for. Prints as what was loaded, converted and left out.
        """
        form = Layout(layout, rotary, head_dim, as_function(rename))
        told, parts = loading.load(self._state, self.num_ranks, path, form, strict=strict, convert=convert)
        self.__dict__["_parts_in_files"] = parts
        self.forget_constants()
        return told

    def init_weights(
        self, model: nn.Module, *, seed: int = 0, init: Callable[[Any], object] | None = None
    ) -> None:  # fmt: skip
        """Starts from the model's own initialisation: its code runs on each rank, which keeps its shards alone.

        model: on the meta device. The values are those of one CPU after `model.to_empty(device="cpu")`,
        `torch.manual_seed(seed)` and `init(model)`, by default `init_weights()` where the model has one, else
        `reset_parameters()` of each module, from the inside out. Raises ProgramError on what it does not set, or that
        needs more than a tensor at a time.
        """
        agreement.together(lambda: initial.initialise(self._state, model, seed, init), self.num_ranks)
        self.unite_tied()
        self.forget_constants()

    def save_safetensors(
        self, folder: str | Path, *, layout: str | None = None, rename: Rename = None, rotary: str = "interleaved",
        head_dim: int | None = None, dtype: torch.dtype | None = None, max_shard_bytes: int = saving.SHARD_BYTES,
    ) -> Path:  # fmt: skip
        """Writes Hugging Face's files to a folder without weights, whole or not at all; each rank writes its slices.

        Tensors are named as they were in what `load_safetensors` read, else as in the model; or as `layout` and
        `rename` say, see there. dtype: of floating-point tensors. Tied ones are written once. A config is not written:
        `config.save_pretrained(folder)` does so. Returns the folder; raises ProgramError on all ranks.
        """
        self.unite_copies()
        form = Layout(layout, rotary, head_dim, as_function(rename))
        parts = self._parts_in_files if layout is None and rename is None else {}
        parts = saving.in_files(self._state, parts, form)
        return saving.save(
            self._state, self.num_ranks, self.number, folder, parts, dtype=dtype, max_shard_bytes=max_shard_bytes
        )

    _parts_in_files: dict[str, list[FilePart]]  # where files had the model's tensors that were loaded

    def unite_tied(self) -> None:
        """After setting parameters by hand: those that several stages store get the values that the first of them has.

        Loading does so by itself.
        """

    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by single-device name, on every rank; parameters without one are left out."""
        return self._state.full_gradients()


def loss_of(outputs: Any, index: int) -> Tensor:
    """The loss among what the forward pass returns. Raises ProgramError when it is no scalar."""
    loss = outputs if isinstance(outputs, Tensor) else outputs[index]
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ProgramError(f"expected the forward pass to return a scalar loss, found {found}")
    return loss


def _shown_shapes(declared: type[Program] | type[Pipeline]) -> str:
    return ", ".join(f"{spec.name} {tuple(spec.shape)}" for spec in declared.INPUTS)


def _plain(value: Any) -> Any:
    """An input that autograd may save: one that was made in inference mode is copied."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a path of the model's, made where there is none. Not by attribute: a rank has methods, too."""
    module = root
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        if found is None:
            module._modules[name] = found = Kept()
            found.training = root.training
        module = found
    return module


watch_for_wrapper(Rank)
