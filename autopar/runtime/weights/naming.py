"""Which tensors of files make up each tensor of a model, where the two are named or packed differently.

own          the model's names, as in what `save_pretrained` writes of the same class
prefixed     with or without what a model puts before its names: "model.layers.0…" and "layers.0…"
tied         another name of the same tensor: "lm_head.weight" for "model.embed_tokens.weight"
experts      one tensor an expert, where the model stacks them, and the other way round
meta         the names of Meta's checkpoints and of torchtitan, with rows of queries and keys in their order
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.runtime.errors import ProgramError
from autopar.runtime.weights.parts import FilePart, same, whole

Rename = Callable[[str], str] | Mapping[str, str] | None
"""From the model's names to the files'; names that a mapping lacks stay as they are."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

LAYOUTS = (None, "huggingface", "meta")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the files name tensors. name: None for the model's own names. renamed: by the user, from the model's name to
    the file's. head_dim: of the attention, where rows of queries and keys are in another order (`rotary`)."""

    name: str | None = None
    rotary: str = "interleaved"
    head_dim: int | None = None
    renamed: Callable[[str], str] | None = None

    def check(self) -> None:
        """Raises ProgramError for an option that there is none of."""
        if self.name not in LAYOUTS:
            raise ProgramError(f'expected layout None, "huggingface" or "meta", found {self.name!r}')
        if self.rotary not in ("interleaved", "halves"):
            raise ProgramError(f'expected rotary "interleaved" or "halves", found {self.rotary!r}')


def as_function(rename: Rename) -> Callable[[str], str] | None:
    """A function from the model's names to the files'. It raises ProgramError where `rename` gives no name."""
    if rename is None:
        return None
    names = rename if callable(rename) else dict(rename)

    def renamed(name: str) -> str:
        found = names(name) if callable(names) else names.get(name, name)
        if not isinstance(found, str):
            raise ProgramError(f"expected rename= to give what the files call {name}, as text, found {found!r}")
        return found

    return renamed


@dataclass(slots=True)
class Resolved:
    """For each of the model's tensors its parts; what is missing of it, and what no tensor of the model takes."""

    parts: dict[str, list[FilePart]] = field(default_factory=dict)
    copies: dict[str, list[FilePart]] = field(default_factory=dict)  # of tied tensors: the same under another name
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def resolve(model: Shapes, tied: Mapping[str, str], files: Shapes, layout: Layout) -> Resolved:
    """Finds the model's tensors in files. tied: further names of some."""
    names = {name: [name, *(other for other, own in tied.items() if own == name)] for name in model}
    every = {name: list(forms(names[name], shape, layout)) for name, shape in model.items()}
    lacking = [ways for ways in every.values() if not any(part.key in files for form in ways for part in form)]
    prefix = _find_prefix({part.key for ways in lacking for form in ways for part in form}, files)
    found = Resolved()
    taken: set[str] = set()
    for name, ways in every.items():
        present = [form for way in ways if (form := _prefixed(way, prefix, files)) is not None]
        if not present:
            found.missing.append(name)
            continue
        found.parts[name] = present[0]
        if name in tied.values() and len(present) > 1:
            found.copies[name] = present[1]
        taken |= {part.key for form in present for part in form}
    found.unexpected = [key for key in files if key not in taken and not is_computed(key, files[key])]
    return found


def forms(names: Iterable[str], shape: Shape, layout: Layout) -> Iterator[list[FilePart]]:
    """The ways in which files may have a tensor, by each of its names, the likeliest first."""
    for name in names:
        called = name if layout.renamed is None else layout.renamed(name)
        if called != name:
            yield [same(called, shape)]
            continue
        if layout.name is not None and (form := _translated(name, shape, layout)) is not None:
            yield form
            continue
        for spelled in _spellings(name):
            yield [same(spelled, shape)]
            yield from _experts(spelled, shape)


def in_layout(name: str, shape: Shape, layout: Layout) -> list[FilePart]:
    """How files of a layout have a tensor, to write it: where the layout says nothing of it, as the model does."""
    return next(forms([name], shape, layout))


COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rope\.freqs|freqs_cis|position_ids|masked_bias)$")


def is_computed(key: str, shape: Shape) -> bool:
    """Whether an older file holds what models compute themselves: rotary frequencies, masks of causal attention."""
    is_mask = key.endswith("attn.bias") and len(shape) == 4 and shape[:2] == (1, 1)
    return is_mask or COMPUTED.search(key) is not None


# Prefixes ----------------------------------------

Prefix = tuple[str, str]
"""What is taken away at the front of a model's name, and what is put there."""


def _find_prefix(names: Iterable[str], files: Shapes) -> Prefix:
    """The prefix by which most of the names are found. Raises ProgramError for two as good."""
    counts: Counter[Prefix] = Counter()
    ends: dict[str, list[str]] = {}
    for key in files:
        for prefix, end in _cuts(key):
            ends.setdefault(end, []).append(prefix)
    for name in names:
        counts.update(("", prefix) for prefix in ends.get(name, ()))
        counts.update((prefix, "") for prefix, end in _cuts(name) if end in files)
    best = counts.most_common(2)
    if len(best) == 2 and best[0][1] == best[1][1]:
        (one, count), (other, _) = best
        raise ProgramError(
            f"expected one set of names in the files, found {count} of the model's tensors as {_told(one)} and as many "
            f"as {_told(other)}; say which by rename=, a function from the model's names to the files'"
        )
    return best[0][0] if best else ("", "")


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Each beginning of a name up to a dot, and the rest."""
    for position, letter in enumerate(name):
        if letter == ".":
            yield name[: position + 1], name[position + 1 :]


def _told(prefix: Prefix) -> str:
    away, front = prefix
    return f'"{front}…"' if front else f'without "{away}"'


def _prefixed(form: list[FilePart], prefix: Prefix, files: Shapes) -> list[FilePart] | None:
    """A form with the keys that files have, as they are or by the prefix; None where they lack one."""
    away, front = prefix
    found = []
    for part in form:
        other = front + part.key.removeprefix(away) if part.key.startswith(away) else None
        key = part.key if part.key in files else other
        if key is None or key not in files:
            return None
        found.append(FilePart(key, part.shape, part.source, part.target, part.paired))
    return found


# Experts ----------------------------------------

#: of a stacked tensor that holds two of each expert along its rows, and of one that holds one: the experts' own names
GATE_AND_UP = (("gate_proj", "up_proj"), ("w1", "w3"), ("fc1", "fc3"))
DOWN = (("down_proj",), ("w2",), ("fc2",))
STACKED = {"gate_up_proj": GATE_AND_UP, "down_proj": DOWN}
_STACKED_NAME = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)(?:\.weight)?$")
_ONE_NAME = re.compile(r"^(.*\bexperts)\.(\d+)\.(\w+)\.weight$")


def _spellings(name: str) -> list[str]:
    """Mixtral's files call the module of experts otherwise than `transformers` does."""
    return [name, name.replace(".mlp.", ".block_sparse_moe.")] if ".mlp." in name else [name]


def _experts(name: str, shape: Shape) -> Iterator[list[FilePart]]:
    stacked, one = _STACKED_NAME.match(name), _ONE_NAME.match(name)
    if stacked is not None and len(shape) == 3:
        for own in STACKED[stacked[2]]:
            yield list(_each_expert(stacked[1], own, shape))
    if one is not None and len(shape) == 2:
        yield from _stacked_expert(one[1], int(one[2]), one[3], shape)


def _each_expert(base: str, own: tuple[str, ...], shape: Shape) -> Iterator[FilePart]:
    count, rows, columns = shape
    size = rows // len(own)
    for expert in range(count):
        for number, name in enumerate(own):
            target = (slice(expert, expert + 1), slice(number * size, (number + 1) * size), slice(0, columns))
            yield FilePart(f"{base}.{expert}.{name}.weight", (size, columns), whole((size, columns)), target)


def _stacked_expert(base: str, expert: int, own: str, shape: Shape) -> Iterator[list[FilePart]]:
    """The number of experts is the file's to say; -1 stands for it."""
    for stacked, sets in STACKED.items():
        for names in sets:
            if own in names:
                rows = shape[0]
                start = names.index(own) * rows
                source = (slice(expert, expert + 1), slice(start, start + rows), slice(0, shape[1]))
                yield [FilePart(f"{base}.{stacked}", (-1, rows * len(names), shape[1]), source, whole(shape))]


# Meta's names ----------------------------------------

#: Hugging Face's name, Meta's, and whether rows are in the order of rotary pairs; # is a layer's number
META_NAMES = (
    ("model.embed_tokens.weight", "tok_embeddings.weight", False),
    ("model.norm.weight", "norm.weight", False),
    ("lm_head.weight", "output.weight", False),
    ("model.layers.#.input_layernorm.weight", "layers.#.attention_norm.weight", False),
    ("model.layers.#.post_attention_layernorm.weight", "layers.#.ffn_norm.weight", False),
    *((f"model.layers.#.self_attn.{hf}_proj.{kind}", f"layers.#.attention.{meta}.{kind}", hf in "qk")
      for hf, meta in (("q", "wq"), ("k", "wk"), ("v", "wv"), ("o", "wo")) for kind in ("weight", "bias")),
    *((f"model.layers.#.self_attn.{name}.weight", f"layers.#.attention.{name}.weight", True)
      for name in ("q_norm", "k_norm")),
    *((f"model.layers.#.mlp.{hf}_proj.weight", f"layers.#.feed_forward.{meta}.weight", False)
      for hf, meta in (("gate", "w1"), ("down", "w2"), ("up", "w3"))),
    ("model.layers.#.mlp.gate.weight", "layers.#.moe.router.gate.weight", False),
)  # fmt: skip
_META_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_META_EXPERT = re.compile(r"^layers\.(\d+)\.moe\.experts\.(w[123])$")
_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def _translated(name: str, shape: Shape, layout: Layout) -> list[FilePart] | None:
    """A tensor under the other's name; None where the layout has none for it, or the model has the layout's names."""
    number = _LAYER.search(name)
    general = _LAYER.sub("#", name)
    to_meta = layout.name == "meta"
    for hugging, meta, is_rotary in META_NAMES:
        own, other = (hugging, meta) if to_meta else (meta, hugging)
        if general in (own, own.removeprefix("model.")) and (to_meta or general != other):
            key = other.replace("#", number[0]) if number is not None else other
            paired = _head_dim(name, shape, layout) if is_rotary and layout.rotary == "interleaved" else 0
            return [same(key, shape, paired if to_meta else -paired)]
    stacked = _STACKED_NAME.match(name) if to_meta else _META_EXPERT.match(name)
    if stacked is not None and len(shape) == 3:
        if to_meta:
            return list(_stacked_in_meta(number[0], stacked[2], shape)) if number is not None else None
        base = f"model.layers.{stacked[1]}.mlp.experts"
        return list(_each_expert(base, (_META_EXPERTS[stacked[2]],), shape))
    return None


def _stacked_in_meta(layer: str, kind: str, shape: Shape) -> Iterator[FilePart]:
    own = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
    count, rows, columns = shape
    size = rows // len(own)
    for position, name in enumerate(own):
        target = (slice(0, count), slice(position * size, (position + 1) * size), slice(0, columns))
        there = (count, size, columns)
        yield FilePart(f"layers.{layer}.moe.experts.{name}", there, whole(there), target)


def _head_dim(name: str, shape: Shape, layout: Layout) -> int:
    head = layout.head_dim
    if head is None or head % 2 or shape[0] % head:
        raise ProgramError(
            f"expected the even length of a head, by which the {shape[0]} rows of {name} divide, to bring them into "
            f'the order of the files, found {head}; give head_dim=, or rotary="halves" where both rotate halves'
        )
    return head
