"""Shell scripts are read as data: assignments and arrays are followed, nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.auditing.shell import Script, read_script

SCRIPTS = {
    "TP=8\nrun --tp $TP ${TP} \"$TP\"": ["run", "--tp", "8", "8", "8"],
    "A=(--a 1 # one\n  # --b 2\n  --c 3)\nrun ${A[@]} end": ["run", "--a", "1", "--c", "3", "end"],
    "A=(\"--a 1\" '--b 2')\nrun ${A[@]}": ["run", "--a", "1", "--b", "2"],
    "A=(\"--a 1\" '--b 2')\nrun \"${A[@]}\"": ["run", "--a 1", "--b 2"],
    "A=(--a)\nA+=(--b)\nB=(--c \"${A[@]}\")\nrun ${B[*]}": ["run", "--c", "--a", "--b"],
    "O=\"--a 1 \\\n  --b 2\"\nrun $O \\\n  --c 3 2>&1 | tee log": ["run", "--a", "1", "--b", "2", "--c", "3"],
    "N=4\nG=8\nrun $((N*$G)) $(( ($N + 4) / 2 ))": ["run", "32", "4"],
    "export N=${N:-2}; run ${M:-\"x y\"} ${N}": ["run", "x", "y", "2"],
    "D=fp8\nif [[ \"$D\" == \"fp8\" ]]; then\n A=(--f)\nelse\n A=(--g)\nfi\nrun ${A[@]}": ["run", "--f"],
    "D=bf\nif [ \"$D\" = fp8 ]; then\n A=(--f)\nelif [[ $D == bf ]]; then\n A=(--b)\nelse\n A=(--g)\nfi\nrun ${A[@]}":
        ["run", "--b"],
    "run --path=$HOME/x $(rm -rf /) `date` $1": ["run", "--path=\ufffd/x", "\ufffd", "\ufffd", "\ufffd"],
    "run 'a $B' \"it's\" a\\ b": ["run", "a $B", "it's", "a b"],
}  # fmt: skip


def words(script: Script) -> list[str]:
    return [word.text for command in script.commands for word in command.words if word.text != "tee"]


@pytest.mark.parametrize("text", SCRIPTS)
def test_the_words_of_a_command(text: str) -> None:
    command = next(one for one in read_script(text).commands if one.words[0].text == "run")
    assert [word.text for word in command.words] == SCRIPTS[text]


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_word_stands_where_it_says(text: str) -> None:
    for command in read_script(text).commands:
        for word in command.words:
            assert word.span is None or text[slice(*word.span)] == word.text


def test_branches_that_only_running_would_tell_are_left_out_and_named() -> None:
    script = read_script('if [ -n "${KEY}" ]; then\n run --key\nfi\nfor i in 1 2; do\n run $i\ndone\nrun --end\n')
    assert words(script) == ["run", "--end"]
    assert [what for _, what in script.not_followed] == ['if [ -n "${KEY}" ]; then', "for i in 1 2; do"]


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    read_script(f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\n. {mark}\nrun $X $Y\n")
    assert not mark.exists()


@pytest.mark.parametrize("text", ["", "$", "${", "$((", "A=(", "'",
    '"', "if", "run ${A", "run $(", "\\", "fi", "A=$((1/0)) run",
                                  "case x in a) b;; esac", "run <<EOF\nx\nEOF\n", "((i++))"])  # fmt: skip
def test_any_text_comes_to_an_end(text: str) -> None:
    read_script(text)
