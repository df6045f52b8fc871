"""How many layers each stage of a pipeline has, as each software deals them out.

Megatron-LM (transformer_block.get_num_layers_to_build and arguments.validate_args) gives all stages as many, but for
ends that are said by number or count as layers themselves, or reads a layout; torchtitan
(generate_llm_fqn_per_model_part) deals out layers and ends by weight, earlier stages one more where they do not divide.
"""

from __future__ import annotations

import re

from autopar.errors import PlanError


def dealt(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage where what is before and behind them counts as so many: as many as can be, earlier stages
    one more where that does not divide."""
    each, more = divmod(layers + first + last, stages)
    found = [each + (number < more) for number in range(stages)]
    found[0] -= first
    found[-1] -= last
    return tuple(found)


def with_ends(layers: int, ranks: int, first: int | None, last: int | None) -> tuple[int, ...] | None:
    """Layers of each rank where the first and the last have so many and the others share what is left; None where it
    does not divide."""
    middle = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (rest % middle if middle else rest):
        return None
    each = (rest // middle,) * middle if middle else ()
    return (*(() if first is None else (first,)), *each, *(() if last is None else (last,)))


def in_chunks(of_ranks: tuple[int, ...], chunks: int) -> tuple[int, ...] | None:
    """Layers of each stage, in the order in which they run, where each rank has so many chunks of as many; None where
    they do not divide."""
    if any(count % chunks for count in of_ranks):
        return None
    return tuple(count // chunks for count in of_ranks) * chunks


_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_REPEATED = re.compile(r"([EtmL|])\*(\d+)")


def laid_out(text: str) -> tuple[int, ...]:
    """Layers of each stage of Megatron-LM's layout, such as "Et*3|(tt|)*29|L": stages end at bars, `t` is a layer, and
    a letter or group may be repeated. Raises PlanError where it is none."""
    bare = re.sub(r"[\s,\"']", "", text)
    while (group := _GROUP.search(bare)) is not None:
        bare = bare[: group.start()] + group[1] * int(group[2] or 1) + bare[group.end() :]
    bare = _REPEATED.sub(lambda found: found[1] * int(found[2]), bare)
    if not re.fullmatch(r"[EtmL|]+", bare):
        raise PlanError(f"expected a layout of E, t, m, L and |, such as 'Et*3|(tt|)*29|L', found {text!r}")
    return tuple(stage.count("t") for stage in bare.split("|"))
