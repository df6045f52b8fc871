"""One emitted class for each distinct block: its declarations, its forward, and the calls of its inner blocks."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.emit.again import ToldAgain
from autopar.emit.attributes import Attributes
from autopar.emit.calls import CallWriter, local_lengths, rank_length
from autopar.emit.literals import constant_text, starts_empty
from autopar.emit.module import Module
from autopar.emit.names import Names, attribute, class_name, escaped, is_number, keywords
from autopar.emit.packed import pieces_text
from autopar.emit.ranges import StatementRanges
from autopar.emit.tree import Region
from autopar.ir.branches import Home
from autopar.ir.graph import IDENTITY, Graph, Node, Stored, Tensor
from autopar.ir.mesh import MICROBATCH
from autopar.ir.naming import is_plain
from autopar.ir.placement import Placement, are_alike, format_placement
from autopar.ir.plan import Redistribute, StagePlan
from autopar.ir.redistribution import Step, apply, before, transfer_bytes
from autopar.ir.statements import Convert, Flat, Operate, Statement, Value
from autopar.ops.communication import inner_communication

INDENT = "    "
LINE = 120


@dataclass(frozen=True)
class Made:
    """An emitted class and how its forward is called: argument values and result values."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def changed_from(self, first: Made) -> list[int]:
        """Positions of the arguments that are others than those of a like block."""
        return [p for p, (own, other) in enumerate(zip(self.inputs, first.inputs, strict=True)) if own != other]


@dataclass
class Classes:
    """The classes written so far, of all stages: the name of each text, and where it is used."""

    texts: dict[tuple[str, str], str] = field(default_factory=dict)  # class of the model, body -> class name
    instances: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    is_traced: bool = False  # each statement names its event in a profiler's trace

    def add(self, key: tuple[str, str], path: str) -> None:
        """Notes a class at a module's path; a new one gets its name, or the first with a number that none has."""
        if key not in self.texts:
            taken, (name, _) = set(self.texts.values()), key
            numbered = (f"{name}_{count}" for count in range(1, len(taken) + 1))
            self.texts[key] = next(other for other in (name, *numbered) if other not in taken)
        self.instances.setdefault(key, []).append(path)


class ClassWriter:
    """Writes every class of a program, or of one stage; equal text is one class."""

    def __init__(self, graph: Graph, stage: StagePlan, flat: Flat, classes: Classes) -> None:
        self.graph, self.stage, self.flat, self.classes = graph, stage, flat, classes
        self.ranges = StatementRanges(graph, stage.axes) if classes.is_traced else None
        self.calls, self.again = CallWriter(graph, stage), ToldAgain(stage)
        self.planned: dict[str, list[Redistribute]] = defaultdict(list)  # by tensor
        for redistribute in stage.redistributes:
            self.planned[redistribute.tensor].append(redistribute)
        self.real = [position for position, axis in enumerate(stage.axes) if axis.name != MICROBATCH]
        self.made: dict[int, Made] = {}  # by id of the region
        self.class_of: dict[str, str] = {}  # module path -> class
        self.containers: dict[str, list[str]] = {}  # module path -> names of its modules
        self.escaping: set[Value] = set()  # values that the whole program leaves
        self.tree = Module("")
        self.attributes = Attributes(self.tree, self._num_uses)
        self.late: set[Value] = set()  # outputs that nothing in the program reads: nobody waits for them
        self.firsts: dict[str, int] = {}  # by path of a list's attributes: the number of its first module, where not 0

    # placements and declarations

    def text(self, placement: Placement) -> str:
        """A placement on the real axes, as the runtime reads it."""
        return format_placement(tuple(placement[position] for position in self.real))

    def uses(self, stored: Stored) -> list[str]:
        """The distinct placements in which a stored tensor is used, on the real axes."""
        own = self.stage.storage[stored.tensor].placement
        return list(dict.fromkeys(self.text(p) for p in self.flat.uses[stored.tensor])) or [self.text(own)]

    def way(self, stored: Stored, use: str) -> str:
        """The use, after the placements that the plan's steps pass through on the way to it, if it names any."""
        now, passed = self.stage.storage[stored.tensor].placement, []
        planned = (r for r in self.planned[stored.tensor] if self.text(r.target) == use)
        for step in next((r.steps for r in planned), ()):
            now = apply(step, now)
            if step.axis in self.real:
                passed.append(self.text(now))
        return " -> ".join(passed) or use

    def _num_uses(self, stored: Stored) -> int:
        return len(self.uses(stored)) if stored.kind == "parameter" else 1

    def attribute(self, stored: Stored, placement: Placement) -> str:
        """The dotted path of attributes to a stored tensor in one of its uses."""
        position = self.uses(stored).index(self.text(placement))
        return self.attributes.path(stored.name) + (f"_{position}" if position else "")

    def declaration(self, stored: Stored) -> str:
        tensor, storage = self.graph.kept(stored.tensor), self.stage.storage[stored.tensor]
        kept = f"{tensor.shape}, torch.{tensor.dtype}"
        compute = self.compute(stored.tensor)
        if stored.kind != "parameter":
            persistent = "" if stored.persistent and stored.kind == "buffer" else ", persistent=False"
            has_value = stored.kind == "constant" or stored.tensor in self.graph.starts
            value = f", value={constant_text(self.graph, stored)}" if has_value else ""
            value = ", value=0.0" if starts_empty(self.graph, stored) else value
            return f"rt.Buffer({kept}, {self.text(storage.placement)!r}{persistent}{value}{compute})"
        ways = tuple(self.way(stored, use) for use in self.uses(stored))
        parts = [kept, f"stored={self.text(storage.placement)!r}", f"uses={ways!r}"]
        if storage.regather:
            parts.append("regather=True")
        elif storage.reduce_each_microbatch:
            parts.append("reduce_each_microbatch=True")
        if any(step.parts > 1 for planned in self.planned[stored.tensor] for step in planned.steps):
            parts.append("by_levels=True")
        if served := self._served(stored):
            parts.append(f"by_servers={served!r}")
        if storage.on_host:
            parts.append("on_host=True")
        if not stored.requires_grad:
            parts.append("requires_grad=False")
        parts += pieces_text(self.graph, stored)
        if stored.tensor in self.graph.starts:
            parts.append(f"value={constant_text(self.graph, stored)}")
        return f"rt.Parameter({', '.join(parts)}{compute})"

    def _served(self, stored: Stored) -> tuple[str, ...]:
        """The uses whose gradient is summed over servers."""
        planned = (item for item in self.planned[stored.tensor] if any(step.is_served for step in item.steps))
        over = {self.text(item.target) for item in planned}
        return tuple(self.way(stored, use) for use in self.uses(stored) if use in over)

    def compute(self, name: str) -> str:
        """The dtype that the program computes with, as an argument where it is not the one that is kept."""
        return f", compute=torch.{self.graph.tensors[name].dtype}" if name in self.graph.kept_dtypes else ""

    # modules

    def module_tree(self, root: Region) -> Module:
        """All modules that own parameters or run code, as a tree of attribute names."""
        top = Module("")
        for stored in self.graph.stored:
            *path, last = stored.name.split(".")
            top.descend(path).stored[last] = stored
        for region in walk(root):
            top.descend(region.path.split(".") if region.path else []).regions.append(region)
        self.tree, self.attributes = top, Attributes(top, self._num_uses)
        self.firsts = {self.attributes.path(path): first for path, first in _lists(top) if first}
        return top

    def write_module(self, module: Module) -> str:
        """Writes the classes of a module that has regions, innermost first; returns the class's name."""
        for child in module.with_regions():
            self.write_module(child)
        given, again = self.first_names(module), self.again.names(module)
        told = [*(f", {name}: int" for name in given.values()), *(f", {name}: bool" for name in again.values())]
        lines = [
            f"{INDENT}def __init__(self, mesh: rt.RankMesh{''.join(told)}) -> None:",
            f"{INDENT * 2}super().__init__(mesh)",
        ]
        own = self.again.own(module)
        lines += [f"{INDENT * 2}self.{name} = {name}" for path, name in again.items() if path in own]
        lines += [f"{INDENT * 2}{line}" for line in self.init_lines(module, {**given, **again})]
        lines += self.part_methods(module)
        for number, region in enumerate(region for region in module.regions if not region.is_part):
            suffix = f"_{number + 1}" if number else ""
            lines += self._constants(region, f"constants{suffix}")
            lines += ["", *self._forward(region, f"forward{suffix}", f"constants{suffix}")]
        body = "\n".join(lines)
        key = (class_name(module.regions[0].class_name), body)
        self.classes.add(key, module.path)
        self.class_of[module.path] = self.classes.texts[key]
        return self.classes.texts[key]

    def first_names(self, module: Module) -> dict[str, str]:
        """For each list in a module that does not begin with number 0, what stands for the number: so classes of stages
        that have other layers are equal."""
        paths = self.first_numbers(module)
        return {path: "first" + (f"_{number}" if number else "") for number, path in enumerate(paths)}

    def first_numbers(self, module: Module) -> dict[str, int]:
        """The number that each list in a module begins with, where that is not 0."""
        return {path: first for path, first in _lists(module) if first}

    def init_lines(self, module: Module, firsts: Mapping[str, str]) -> list[str]:
        """What makes a module's attributes. firsts: the expression for the first number of each list in it, and for
        whether a module is computed again where the class does not say."""
        lines = [
            f"self.{name} = {text}" if is_plain(name) else f"setattr(self, {name!r}, {text})"
            for name, text in self._parts(module, firsts).items()
        ]
        renamed = self.attributes.renamed(module)
        return [*lines, f"rt.renamed(self, {arguments_text(renamed)})"] if renamed else lines

    def _parts(self, module: Module, firsts: Mapping[str, str]) -> dict[str, str]:
        """What makes each attribute of a module."""
        stored = {self._attribute_in(module, name): self.declaration(item) for name, item in module.stored.items()}
        children = module.children.items()
        return stored | {self._attribute_in(module, name): self._construct(item, firsts) for name, item in children}

    def _attribute_in(self, module: Module, name: str) -> str:
        return self.attributes.names[f"{module.path}.{name}" if module.path else name]

    def _construct(self, module: Module, firsts: Mapping[str, str]) -> str:
        if module.regions:
            told = [firsts[path] for path in self.first_names(module)]
            told += [firsts.get(path, str(path in self.stage.recompute)) for path in self.again.names(module)]
            return f"{self.class_of[module.path]}({', '.join(['mesh', *told])})"
        children = module.children
        if _is_list(module):
            runs = ", ".join(self._runs(list(children.values()), firsts))
            first = firsts.get(module.path)
            return f"nn.ModuleList([{runs}])" if first is None else f"rt.Numbered({first}, {runs})"
        made, renamed = f"rt.Parameters({keywords(self._parts(module, firsts))})", self.attributes.renamed(module)
        return f"rt.renamed({made}, {arguments_text(renamed)})" if renamed else made

    def _runs(self, children: list[Module], firsts: Mapping[str, str]) -> list[str]:
        texts = [self._construct(child, firsts) for child in children]
        runs: list[tuple[str, int]] = []
        for text in texts:
            if runs and runs[-1][0] == text:
                runs[-1] = (text, runs[-1][1] + 1)
            else:
                runs.append((text, 1))
        return [text if count == 1 else f"*({text} for _ in range({count}))" for text, count in runs]

    # forward

    def part_methods(self, module: Module) -> list[str]:
        """The methods of a module that run on some ranks alone, and those that the backward pass runs again."""
        lines, told = [], set(self.again.names(module).values())
        for name, regions in (
            ("branch", [region for region in module.regions if region.home is not None]),
            ("again", [region for region in module.regions if region.is_again]),
        ):
            free = (f"{name}_{number}" for number in itertools.count() if f"{name}_{number}" not in told)
            for region, method in zip(regions, free, strict=False):
                lines += ["", *self._forward(region, method)]
        return lines

    def _constants(self, region: Region, method: str) -> list[str]:
        if not region.kept:
            return []
        names = Names({axis.name for axis in self.stage.axes})
        return ["", *self.constants_method(method, region.constants, region.kept, region.path, names)]

    def constants_method(
        self, method: str, statements: Sequence[Statement], wanted: Sequence[Value], path: str, names: Names
    ) -> list[str]:
        """A method of the module at the path that computes values once; again when parameters that they are made of
        are new."""
        body = self.body(statements, path, names)
        of_parameters = any(self._is_parameter(value) for statement in statements for value in statement.reads)
        axes = [axis.name for axis in self.stage.axes if axis.name != MICROBATCH]
        lines = [
            f"{INDENT}@rt.{'folded' if of_parameters else 'computed_once'}",
            f"{INDENT}def {method}(self):",
            *self.axis_lines(body, axes),
            *body,
        ]
        return [*lines, f"{INDENT * 2}return ({', '.join(names[value] for value in wanted)},)"]

    def _is_parameter(self, value: Value) -> bool:
        stored = self.graph.stored_by_tensor.get(value[0])
        return stored is not None and stored.kind == "parameter"

    def _forward(self, region: Region, method: str, constants: str = "") -> list[str]:
        names = Names({axis.name for axis in self.stage.axes})
        arguments = [value for value in region.inputs if not self._owned(value, region.path)]
        for value in arguments:
            names.make(value, self.hint(value))
        kept = ", ".join(names.make(value, _operator(self.graph.producers[value[0]])) for value in region.kept)
        body = [f"{INDENT * 2}{kept}{'' if len(region.kept) > 1 else ','} = self.{constants}()"] if kept else []
        body += self.body(region.items, region.path, names, region.outputs)
        returned = ", ".join(names[value] for value in region.outputs)
        self.made[id(region)] = Made(method, tuple(arguments), tuple(region.outputs))
        signature = ", ".join(["self", *(names[value] for value in arguments)])
        used = [self.stage.axes[position].name for position in self.real]
        lines = [f"{INDENT}def {method}({signature}):"]
        lines += self.axis_lines(body, used)
        returned = returned if not region.is_part else f"({returned},)"
        return [*lines, *body, f"{INDENT * 2}return {returned}"]

    def axis_lines(self, body: list[str], axes: list[str]) -> list[str]:
        text = "\n".join(body)
        found = [axis for axis in axes if re.search(rf"[ (]{axis}[,)]", text)]
        return [f"{INDENT * 2}{axis} = self.mesh[{axis!r}]" for axis in found]

    def body(
        self, items: Iterable[Statement | Region], path: str, names: Names, outputs: Iterable[Value] = ()
    ) -> list[str]:
        """The lines of statements and calls of blocks; `outputs`: what is read of them behind."""
        lines: list[str] = []
        items = list(items)
        position = 0
        while position < len(items):
            item = items[position]
            if isinstance(item, Region):
                count = self._loop_length(items[position:], outputs)
                if count > 1:
                    lines += self._loop(
                        [r for r in items[position : position + count] if isinstance(r, Region)], path, names
                    )
                    position += count
                    continue
                lines.append(self._call_block(item, path, names))
            elif isinstance(item, Convert):
                lines += self._convert(item, path, names)
            else:
                lines.append(self._operate(item, path, names))
            position += 1
        return lines

    def _owned(self, value: Value, path: str) -> bool:
        """Whether the module at the path has the value as an attribute: buffers only as they are stored, since what
        they are converted to is a variable like any other."""
        stored = self.graph.stored_by_tensor.get(value[0])
        if stored is None or (stored.kind != "parameter" and value[1] != self.stage.storage[value[0]].placement):
            return False
        return not path or stored.name.startswith(path + ".")

    def hint(self, value: Value) -> str:
        tensor = self.graph.tensors[value[0]]
        return "x" if tensor.differentiable else value[0].rpartition(".")[2]

    def read(self, value: Value, path: str, names: Names) -> str:
        """The expression for a value: a variable, or an attribute for what the module stores."""
        if value in names:
            return names[value]
        stored = self.graph.stored_by_tensor[value[0]]
        text = "self" + self.below(path, self.attribute(stored, value[1]))
        pairs = zip(value[1], self.stage.axes, strict=True)
        is_summand = any(axis.name == MICROBATCH and type_.kind == "P" for type_, axis in pairs)
        return f"rt.in_first({text}, self.microbatch)" if is_summand else text

    def below(self, path: str, attributes: str) -> str:
        """The expression for a path of attributes, from the module at the path in the model on."""
        above = len(self.attributes.path(path).split(".")) if path else 0
        parts = attributes.split(".") if attributes else []
        lists = [".".join(parts[:number]) for number in range(len(parts))]
        pairs = list(zip(lists, parts, strict=True))[above:]
        return "".join(
            f".at({int(part) - self.firsts[inside]})" if inside in self.firsts else attribute(part)
            for inside, part in pairs
        )

    def _operate(self, item: Operate, path: str, names: Names) -> str:
        call = self.calls.write(item, [self.read(value, path, names) for value in item.reads])
        made = dict(zip(item.node.results, item.makes, strict=True))
        hint = _operator(item.node)
        targets = ["_" if name is None else names.make(made[name], hint) for name in item.node.outputs]
        left = ", ".join(targets) + ("," if len(targets) == 1 and _returns_list(item) else "")
        notes = [note for note in (item.node.source, *self._sent_inside(item)) if note]
        line = f"{self._range(item, path)}{left} = {call}"
        return f"{INDENT * 2}{line}" + (f"  # {'; '.join(map(escaped, notes))}" if notes else "")

    def _range(self, item: Statement, path: str) -> str:
        """Of a traced program, what names a statement's event, before it on its line."""
        return self.ranges.opening(item, path) if self.ranges else ""

    def _sent_inside(self, item: Operate) -> list[str]:
        """What the operator itself communicates: "all_to_all 1,024 B" and so on, each collective once."""
        operands = tuple(placement for _, placement in item.reads)
        notes = []
        both = inner_communication(self.graph, item.node, operands, self.stage.axes)
        for direction, sent in zip(("", "backward "), both, strict=True):
            totals: Counter[str] = Counter()
            for inner in sent:
                totals[inner.collective] += inner.num_bytes
            notes += [f"{direction}{collective} {size:,} B" for collective, size in totals.items()]
        return notes

    def _convert(self, item: Convert, path: str, names: Names) -> list[str]:
        lines = []
        made, placement = item.makes[0], before(item.redistribute.steps, item.redistribute.target)
        tensor = self.graph.tensors[item.redistribute.tensor]
        current = self.read(item.reads[0], path, names) if item.reads else f"self.whole[{tensor.name!r}]"
        name = names.make(made, current.rpartition(".")[2].strip('"[]') if item.reads else tensor.name)
        for step in item.redistribute.steps:
            axis = self.stage.axes[step.axis]
            forward, backward = transfer_bytes(tensor.shape, tensor.itemsize, placement, self.stage.axes, step)
            if axis.name == MICROBATCH:
                text = current
                if step.after.kind == "S":
                    text = f"rt.microbatch({current}, {step.after.dim}, self.microbatch, {axis.size})"
                elif step.after.kind == "P":
                    text = f"rt.in_first({current}, self.microbatch)"
            else:
                is_last = step is item.redistribute.steps[-1]
                late = is_last and made in self.late and (step.before.kind, step.after.kind) == ("P", "I")
                size = self._uneven_length(tensor, placement, step) + (", wait=False" if late else "")
                text = f'redistribute({current}, {axis.name}, "{step.before} -> {step.after}"{size})'
            note = self._note(step.transfers, forward, backward, tensor.differentiable)
            lines.append(f"{INDENT * 2}{self._range(item, path)}{name} = {text}{note}")
            current = name
            placement = (*placement[: step.axis], step.after, *placement[step.axis + 1 :])
        if not item.redistribute.steps:
            lines.append(f"{INDENT * 2}{name} = {current}")
        return lines

    def _uneven_length(self, tensor: Tensor, placement: Placement, step: Step) -> str:
        """The length over the step's axis of the dim that it joins, as an argument where the axes do not divide it."""
        if step.before.kind != "S":
            return ""
        if are_alike(tensor.shape, placement, step.before.dim, self.stage.axes):
            return ""
        length = tensor.shape[step.before.dim]
        pairs = zip(self.stage.axes[: step.axis], placement[: step.axis], strict=True)
        return ", " + rank_length(length, [axis for axis, type_ in pairs if type_ == step.before])

    def _note(self, transfers: object, forward: int, backward: int, differentiable: bool) -> str:
        first, second = (t.collective for t in transfers)  # type: ignore[attr-defined]
        parts = [
            f"{first} {forward:,} B" if first else "",
            f"backward {second} {backward:,} B" if second and differentiable else "",
        ]
        note = "; ".join(part for part in parts if part)
        return f"  # {note}" if note else ""

    def _call_block(self, region: Region, path: str, names: Names) -> str:
        if region.home is not None:
            return self._call_branch(region, region.home, path, names)
        if region.is_again:
            return self._call_again(region, path, names)
        made = self.made[id(region)]
        arguments = ", ".join(self.read(value, path, names) for value in made.inputs)
        for value in made.outputs:
            names.make(value, self.hint(value))
        left = ", ".join(names[value] for value in made.outputs)
        method = "" if made.name == "forward" else f".{made.name}"
        called = f"self{self.below(path, self.attributes.path(region.path))}{method}"
        call = self._called(region, path, called, arguments)
        return f"{INDENT * 2}{left} = {call}" if left else f"{INDENT * 2}{call}"

    def _called(self, region: Region, path: str, called: str, arguments: str) -> str:
        """The call in the module at the path: again in the backward pass where the plan, or the block, says so."""
        again, plain = _under("recomputed", called, arguments), f"{called}({arguments})"
        if region.path in self.again.block_of:
            told = self.again.names(self.tree.descend(path.split(".")))[region.path]
            return f"{again} if self.{told} else {plain}"
        return _under(self._manner(region), called, arguments)

    def _call_branch(self, region: Region, home: Home, path: str, names: Names) -> str:
        """The call of a branch with what it reads, the parameters that it uses, and what it makes."""
        made = self.made[id(region)]
        inputs = [self.read(value, path, names) for value in made.inputs]
        uses = self._uses_text(region, [value for value in region.inputs if value not in made.inputs])
        makes = [self._made_text(value) for value in made.outputs]
        left = ", ".join(names.make(value, self.hint(value)) for value in made.outputs)
        lists = [f"[{', '.join(items)}]" for items in (inputs, uses, makes)]
        called = f"{left}, = rt.owned({home.axis}, {home.coordinate}, self.{made.name}"
        one = f"{INDENT * 2}{', '.join([called, *lists])})"
        if len(one) <= LINE:
            return one
        rest = ",\n".join(f"{INDENT * 3}{line}" for line in _wrapped(lists, LINE - 3 * len(INDENT)))
        return f"{INDENT * 2}{called},\n{rest},\n{INDENT * 2})"

    def _call_again(self, region: Region, path: str, names: Names) -> str:
        """The call of operators that are computed again by themselves."""
        made = self.made[id(region)]
        inputs = [self.read(value, path, names) for value in made.inputs]
        left = "".join(f"{names.make(value, self._made_hint(value))}, " for value in made.outputs).rstrip(" ")
        return f"{INDENT * 2}{left} = rt.remade({', '.join([f'self.{made.name}', *inputs])})"

    def _made_hint(self, value: Value) -> str:
        """What to call a value after: what makes it."""
        producer = self.graph.producers.get(value[0])
        return _operator(producer) if producer is not None and producer.op != IDENTITY else self.hint(value)

    def _uses_text(self, region: Region, values: list[Value]) -> list[str]:
        """The parameters that a branch reads: a module where it reads all of it, else one by one."""
        stored = [(self.graph.stored_by_tensor[name], placement) for name, placement in values]
        read = {self.attribute(item, placement) for item, placement in stored if item.kind == "parameter"}
        found: list[str] = []
        self._cover(self.tree.descend(region.path.split(".") if region.path else []), read, found)
        return [f"self{self.below(region.path, attributes)}" for attributes in found]

    def _cover(self, module: Module, read: set[str], found: list[str]) -> None:
        own = [
            self.attribute(item, placement)
            for item in module.stored.values()
            if item.kind == "parameter"
            for placement in self.flat.uses[item.tensor]
        ]
        found += [name for name in dict.fromkeys(own) if name in read]
        for child in module.children.values():
            inside = self._parameters(child)
            if inside and inside <= read:
                found.append(self.attributes.path(child.path))
            elif inside:
                self._cover(child, read, found)

    def _parameters(self, module: Module) -> set[str]:
        """The attributes of all parameters of a module in all their uses."""
        items = [item for item in module.stored.values() if item.kind == "parameter"]
        own = {self.attribute(item, placement) for item in items for placement in self.flat.uses[item.tensor]}
        return own.union(*map(self._parameters, module.children.values()))

    def _made_text(self, value: Value) -> str:
        """What a rank has of a value, for those that make none of it."""
        tensor = self.graph.tensors[value[0]]
        lengths = ", ".join(map(repr, local_lengths(self.graph, self.stage, value)))
        shape = f"({lengths},)" if len(tensor.shape) == 1 else f"({lengths})"
        differentiable = "" if tensor.differentiable else ", False"
        return f"rt.Zeros({shape}, torch.{tensor.dtype}{differentiable})"

    def _manner(self, region: Region) -> str:
        """The function of the runtime that calls a block, by what the plan says of what it saves; "" for none."""
        if region.path in self.stage.recompute:
            return "recomputed"
        return "copied_out" if region.path in self.stage.copied_out else ""

    def _loop_length(self, items: list[Statement | Region], outputs: Iterable[Value]) -> int:
        """How many of the following regions are equal blocks of one container, each feeding the next.

        Blocks that differ in what is recomputed need only be called alike, but for one change of what calls them: those
        that are called plainly come last.
        """
        first = items[0]
        assert isinstance(first, Region)
        container, _, index = first.path.rpartition(".")
        if not self._may_loop(first) or not is_number(index) or index not in self.containers.get(container, [])[:1]:
            return 1
        count, before, manners = 1, first, {self._manner(first)}
        for region in items[1:]:
            if not isinstance(region, Region) or region.path != f"{container}.{int(index) + count}":
                break
            if not (self._may_loop(region) and self._are_equal(region, first) and self._feeds(before, region, first)):
                break
            if (manner := self._manner(region)) != self._manner(before):
                if "" in manners or len(manners) > 1:
                    break
                manners.add(manner)
            count, before = count + 1, region
        whole = len(self.containers[container]) == count
        behind = {*self.escaping, *outputs, *(value for item in items[count:] for value in self._reads(item))}
        return count if whole and self._only_last_escapes(items[:count], behind) else 1

    def _may_loop(self, region: Region) -> bool:
        return not region.is_part and self.made[id(region)].name == "forward"

    def _reads(self, item: Statement | Region) -> Sequence[Value]:
        return self.made[id(item)].inputs if isinstance(item, Region) else item.reads

    def _are_equal(self, one: Region, other: Region) -> bool:
        """Whether blocks are of one class, but for what is recomputed in them, as they are in the model."""
        inside = (
            {path.removeprefix(region.path) for path in self.stage.recompute if path.startswith(f"{region.path}.")}
            for region in (one, other)
        )
        return self.class_of[one.path] == self.class_of[other.path] or next(inside) != next(inside)

    def _feeds(self, before: Region, region: Region, first: Region) -> bool:
        previous, own, start = self.made[id(before)], self.made[id(region)], self.made[id(first)]
        if len(own.outputs) != len(start.outputs) or len(own.inputs) != len(start.inputs):
            return False
        return [own.inputs[p] for p in own.changed_from(start)] == list(previous.outputs)

    def _only_last_escapes(self, regions: list[Statement | Region], behind: set[Value]) -> bool:
        """Whether blocks leave nothing to what is `behind` them but what the last one makes."""
        blocks = [self.made[id(region)] for region in regions]
        carried = blocks[min(1, len(blocks) - 1)].changed_from(blocks[0])
        same = all(block.changed_from(blocks[0]) == carried for block in blocks[1:])
        made = {value for block in blocks[:-1] for value in block.outputs}
        read_later = {value for block in blocks for p, value in enumerate(block.inputs) if p not in carried}
        return same and not made & read_later and len(carried) == len(blocks[0].outputs) and not made & behind

    def _loop(self, regions: list[Region], path: str, names: Names) -> list[str]:
        first, second, last = (self.made[id(r)] for r in (regions[0], regions[1], regions[-1]))
        carried, lines, targets = second.changed_from(first), [], []
        for position, value in zip(carried, last.outputs, strict=True):
            name = names.make(value, self.hint(value))
            targets.append(name)
            lines.append(f"{INDENT * 2}{name} = {self.read(first.inputs[position], path, names)}")
        inside = dict(zip(carried, targets, strict=True))
        arguments = ", ".join(inside.get(p) or self.read(value, path, names) for p, value in enumerate(first.inputs))
        container = self.attributes.path(regions[0].path.rpartition(".")[0])
        blocks = f"self{self.below(path, container)}"
        manners = [self._manner(region) for region in regions]
        call, some = _under(manners[0], "block", arguments), manners.count(manners[0])
        if some < len(regions):
            call = f"{call} if number < {some} else {_under(manners[-1], 'block', arguments)}"
        loop = f"number, block in enumerate({blocks})" if some < len(regions) else f"block in {blocks}"
        lines.append(f"{INDENT * 2}for {loop}:")
        lines.append(f"{INDENT * 3}{', '.join(targets)} = {call}")
        return lines


def _is_list(module: Module) -> bool:
    """Whether a module holds numbered modules, neighbours, and runs nothing itself."""
    names = list(module.children)
    is_plain_list = bool(names) and is_number(names[0]) and not module.stored and not module.regions
    return is_plain_list and names == [str(int(names[0]) + n) for n in range(len(names))]


def _lists(module: Module) -> Iterator[tuple[str, int]]:
    """The lists in a module, by their paths, with the number of the first module that each has."""
    for child in module.children.values():
        if _is_list(child):
            yield child.path, int(next(iter(child.children)))
        yield from _lists(child)


def _operator(node: Node) -> str:
    """An operator's name, after which what it makes is named."""
    return node.op.split(".")[1].strip("_")


def _under(manner: str, called: str, arguments: str) -> str:
    """The call of a block by a function of the runtime, or plainly."""
    return f"rt.{manner}({', '.join(filter(None, (called, arguments)))})" if manner else f"{called}({arguments})"


def _wrapped(lists: Iterable[str], width: int) -> Iterator[str]:
    """Arguments on lines of their own, long lists on several: all but the last line of a list end with its comma."""
    for text in lists:
        lines = textwrap.wrap(text, width, subsequent_indent=" ", break_long_words=False, break_on_hyphens=False)
        yield "\n".join([lines[0], *(f"{INDENT * 3}{line}" for line in lines[1:])])


def _returns_list(item: Operate) -> bool:
    return item.node.op.split(".")[1] in ("split", "split_with_sizes", "unbind", "chunk", "gathered_linears")


def arguments_text(values: Mapping[str, str]) -> str:
    """Names with strings, as arguments of a call."""
    return keywords({name: repr(value) for name, value in values.items()})


def walk(region: Region) -> Iterable[Region]:
    yield region
    for inner in region.regions():
        yield from walk(inner)
