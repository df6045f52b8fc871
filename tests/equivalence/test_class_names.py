"""Whatever a model's classes, files and modules are called: the emitted source is Python, and says nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.emit.names import escaped
from autopar.program import load_source

CODE = '"""\nPath("written").touch()\n"""'
NAMES = (
    "class",
    "None",
    "Program",
    "Stage0",
    "Stage10",
    "torch",
    "rt",
    "nn",
    "range",
    "enumerate",
    "super",
    "Block",
    "print",
    "Foo[int]",
    "__Hidden",
    "__",
    "",
    "123",
    "a b",
    "Класс",
    "ﬁ",
    "²",
    "x" * 300,
    "\\",
    "\\N{BULLET}",
    '"',
    "'''",
    CODE,
    "a\x0c\u2028\u2029\x85b",
    "\u202eevil",
    "{0}",
    "%s",
)


def layer(name: str, size: int = 8, gain: float = 1.0) -> nn.Module:
    """A module of a class of that name, with one that runs inside of it."""

    def __init__(self: Any) -> None:
        nn.Module.__init__(self)
        self.inner, self.own = nn.Linear(size, size), nn.Parameter(torch.full((size,), gain))

    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.own * gain

    return type(name, (nn.Module,), {"__init__": __init__, "forward": forward})()


def loss(self: Any, x: Tensor) -> Tensor:
    for module in self.layers:
        x = module(x)
    return x.pow(2).mean()


def model_of(names: tuple[str, ...], root: str = "Root") -> nn.Module:
    torch.manual_seed(0)
    model = type(root, (nn.Module,), {"forward": loss})()
    model.layers = nn.ModuleList(layer(name, gain=1.0 + number) for number, name in enumerate(names))
    return model


def check(model: nn.Module) -> str:
    """Compares loss and gradients with the model's own; returns the source."""
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}
    program = autopar.parallelize(model, autopar.Mesh("h100"), batch, search="fast")
    assert autopar.Plan.from_json(program.plan.to_json()) == program.plan
    assert {type(item).__name__ for item in ast.parse(program.source).body} <= {
        "Expr", "Import", "ImportFrom", "Assign", "ClassDef",
    }  # fmt: skip
    rank = program.build(device="cpu")
    assert rank.train_step(**batch).item() == pytest.approx(model(**batch).item(), rel=1e-6)
    model(**batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(rank.full_gradients()[name], parameter.grad, rtol=1e-5, atol=1e-7)
    return program.source


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_class_of_any_name_is_emitted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(model_of((name, name), root=name))
    assert not Path("written").exists()


def test_classes_that_would_get_the_name_of_another_are_kept_apart() -> None:
    """Two classes Foo that differ are Foo and Foo_1, which a third is called itself."""
    source = check(model_of(("Foo", "Foo", "Foo_1", "Foo", "Foo[1]", "Foo{1}")))
    names = [item.name for item in ast.parse(source).body if isinstance(item, ast.ClassDef)]
    assert len(names) == len({*names}) == 7


def test_a_file_of_any_name_is_a_comment(tmp_path: Path) -> None:
    """The source lines that statements name are those of files that somebody else called so."""
    path = tmp_path / 'm\n    import os  # """ \\N{x} \u2028.py'
    path.write_text(Path(__file__).read_text())
    namespace: dict[str, Any] = {"__name__": "elsewhere", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    source = check(namespace["model_of"](("Layer", "Layer")))
    assert r"m\n    import os" in source  # named, in a comment of one line
    assert not any(line.strip().startswith("import os") for line in source.splitlines())


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_escaped_text_stays_in_its_docstring_and_comment(name: str) -> None:
    text = escaped(name)
    module = load_source(f'"""{text}"""\nvalue = 1  # {text}\n')
    assert module.__doc__ == name and module.value == 1
