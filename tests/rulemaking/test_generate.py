"""Generation finds the rules that are known, prunes what follows, and drops what is false at other sizes."""

from __future__ import annotations

from functools import lru_cache

from rulemaking.candidates import anonymous, candidates, sound
from rulemaking.enumeration import Enumeration
from rulemaking.generation import Generation, follows, generated
from rulemaking.statement import parse_rules
from rulemaking.worlds import WORLDS

ONLY = ("linear", "concat", "first", "second", "transpose", "scale", "conv")


@lru_cache(maxsize=1)
def small() -> Generation:
    """Generation at two operators over a few."""
    return generated(2, ONLY, (), workers=1)


def found(text: str) -> bool:
    """Whether a rule, whatever its variables are called, is among the sound ones; its special cases are left out."""
    texts = {anonymous(rule) for rule in small().sound}
    return any(anonymous(rule) in texts for rule in parse_rules(text, ""))


def test_known_rules_are_found() -> None:
    assert found("r: transpose(transpose(x)) => x")
    assert found("r: first[col, ?m](concat[col](x, y)) => x")
    assert found("r: linear(scale[?c](x), w) => linear(x, scale[?c](w))")


def test_rules_of_two_outputs_are_found() -> None:
    """Two parallel products become one, which takes a concatenation, a product and a cut: three operators."""
    enumeration = Enumeration(WORLDS[0])
    enumeration.run(3, ("linear", "concat"))
    merged = "linear(x, concat[row](w1, w2))"
    text = f"r: linear(x, w1), linear(x, w2) => first[col, w1.row]({merged}), second[col, w1.row]({merged})"
    assert anonymous(*parse_rules(text, "")) in {anonymous(rule) for rule in candidates(enumeration, 3)}


def test_what_groups_make_false_is_found_with_its_guard() -> None:
    cuts = [rule for rule in small().sound if "first[channel" in str(rule) and "conv" in str(rule)]
    assert cuts and all(rule.guards == ("?g == 1",) for rule in cuts)


def test_candidates_that_hold_at_square_sizes_alone_are_dropped() -> None:
    """Both sides are well formed where weights are empty, and nowhere else."""
    (square,) = parse_rules("r: linear(x, concat[row](w1, w2)) => linear(x, concat[col](w1, w2))", "")
    assert sound(square) is None


def test_every_sound_rule_follows_from_the_kept_ones() -> None:
    kept = small().kept
    assert 0 < len(kept) < len(small().sound)
    assert all(follows(rule, kept) for rule in small().sound)


def test_no_kept_rule_follows_from_those_before_it() -> None:
    kept = small().kept
    assert not any(follows(rule, kept[:index]) for index, rule in enumerate(kept))
