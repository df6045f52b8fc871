"""The command line: each command's output and exit status, and one message instead of a traceback for bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar import cli
from autopar.cli import commands
from autopar.ir.constraint import Constraint
from autopar.profiler import host, load_profile
from autopar.show.text import used_placements
from tests.test_house import ROOT

pytestmark = pytest.mark.sweep

MODEL, MESH = "models.mlp", "h100:2"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder that it runs in


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from models import mlp

    path = tmp_path_factory.mktemp("plans") / "plan.json"
    mesh = autopar.Mesh.parse(MESH)
    autopar.template_plan(mlp.build(mlp.Config()), mesh, mlp.example_inputs(mlp.Config()), dp=2).save(path)
    return path


def test_plan_writes_the_plan_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["plan", MODEL, "--mesh", MESH, "--search", "fast", "-o", str(path)]) == 0
    plan = autopar.Plan.load(path)
    printed = capsys.readouterr()
    assert printed.out == f"{plan}\n"
    assert printed.err == "", "no progress where stderr is no terminal"
    assert str(plan.mesh) == "h100:1x2"
    assert plan.memory_limit == load_profile("h100").usable_bytes > 60e9, "what tensors may take of a device"


def test_plan_of_a_compiled_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", MODEL, "--mesh", MESH, "--search", "fast", "--runs", "compiled"]
    assert cli.main([*command, "-o", str(tmp_path / "plan.json")]) == 0
    assert autopar.Plan.load(tmp_path / "plan.json").runs == "compiled"
    capsys.readouterr()
    assert cli.main([*command, "--template", "dp=2"]) == 2
    assert "a template's program runs eagerly" in capsys.readouterr().err


def test_plan_by_template_under_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", f"{MODEL}:Config", "--mesh", MESH, "--template", "dp=2,zero=3", "--memory-limit", "1.8MB"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "MLP on h100:1x2 as (dp=2), train" in printed
    assert "of 1.8 MB a device" in printed
    assert "gathered per use" in printed


def test_plan_keeps_to_constraints(tmp_path: Path) -> None:
    """Equal layers decide together, but for the one that a constraint is about."""
    path = tmp_path / "plan.json"
    command = ["plan", "models.gpt", "--mesh", MESH, "--search", "fast", "-o", str(path), "--constraint", "stages=1"]
    assert cli.main([*command, "--constraint", "layers.1.mlp.up.weight used=S(0) axis=d0"]) == 0
    plan = autopar.Plan.load(path)
    used = {name: uses for name, uses in used_placements(plan.stage).items() if name.endswith("mlp.up.weight")}
    assert used["layers.1.mlp.up.weight"] == {"[S(0)]"} != used["layers.0.mlp.up.weight"]


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("layers.0.up.weight used=S(0),R axis=d1", Constraint("layers.0.up.weight", ("S(0)", "R"), "used", "d1")),
        ("layers.* stored=S zero=3 min_dims=2 soft", Constraint("layers.*", ("S",), "stored", None, True, 3, 2)),
        ("stages=2 microbatches=8", Constraint(stages=2, microbatches=8)),
        ("layers.[0-3] recompute=full", Constraint("layers.[0-3]", recompute="full")),
        ("input=S(0)", Constraint("*", ("S(0)",), "input")),
    ],
)
def test_constraints_are_read(text: str, constraint: Constraint) -> None:
    assert cli.parse_constraint(text) == constraint


def test_show_explain_and_diff(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(plan_file)]) == 0
    assert capsys.readouterr().out == f"{autopar.Plan.load(plan_file)}\n"
    assert cli.main(["explain", str(plan_file), "layers.0"]) == 0
    assert "parameter layers.0.weight: stored [I], used [R]" in capsys.readouterr().out
    other = tmp_path / "other.json"
    assert cli.main(["plan", MODEL, "--mesh", MESH, "--template", "dp=2,zero=3", "-o", str(other)]) == 0
    capsys.readouterr()
    assert cli.main(["diff", str(plan_file), str(other)]) == 0
    assert "layers.*.weight: [I] | [S(0)] gathered per use" in capsys.readouterr().out
    assert cli.main(["diff", str(plan_file), str(plan_file)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step time", "peak"]


def test_diff_tells_what_is_used_otherwise_though_it_is_stored_alike() -> None:
    from models import mlp

    config = mlp.Config()
    stored = [Constraint(stages=1), Constraint("*weight", ("S(0)",), "stored")]
    whole, split = (
        autopar.parallelize(
            mlp.build(config), autopar.Mesh.parse(MESH), mlp.example_inputs(config), search="fast",
            constraints=[*stored, Constraint("layers.0.weight", (type_,), "used", axis="d0")],
        ).plan
        for type_ in ("R", "S(0)")
    )  # fmt: skip
    assert "layers.0.weight: used [R] | [S(0)]" in whole.diff(split).splitlines()


def test_simulate_prints_the_prediction_and_writes_a_trace(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert cli.main(["simulate", MODEL, str(plan_file), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = str(autopar.Plan.load(plan_file)).splitlines()
    assert printed[1:5] == shown[1:5], "what the plan says, simulated again"
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    last = max(event["ts"] + event["dur"] for event in spans)
    assert round(last * 1000) == autopar.Plan.load(plan_file).predicted.step_time_ns
    assert {"forward", "backward", "gradient all_reduce", "optimizer"} <= {event["cat"] for event in spans}


def test_simulate_takes_plans_of_several_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They cannot be emitted yet."""
    file, trace = tmp_path / "stages.json", tmp_path / "trace.json"
    assert (
        cli.main(["plan", "models.gpt", "--mesh", "a100:2", "--template", "pp=2,microbatches=2", "-o", str(file)]) == 0
    )
    assert cli.main(["simulate", "models.gpt", str(file), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "bubble" in printed and "exposed     send" in printed
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    assert {(1, "rank 0"), (1, "compute"), (1, "send intra_node"), (3, "rank 1"), (3, "compute")} <= lanes
    assert cli.main(["emit", "models.gpt", str(file), "-o", str(tmp_path / "out")]) == 0
    assert "class Program(rt.Pipeline)" in (tmp_path / "out" / "program.py").read_text()


def test_timeline_of_a_plan_from_a_file_says_how_to_get_one(plan_file: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=r"found one read from a file.*plan=plan\)\.plan\.timeline\(\)"):
        autopar.Plan.load(plan_file).timeline()


def test_emit_writes_the_program_and_says_how_to_start_it(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["emit", MODEL, str(plan_file), "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"torchrun --nproc-per-node 2 {tmp_path / 'train.py'}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "plan.json", "train.py", "weights.pt"}
    assert (tmp_path / "plan.json").read_text() == plan_file.read_text()


def test_emit_takes_other_shapes_of_batches(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shape is a program of its own; what is misspelled is said."""
    emit = ["emit", MODEL, str(plan_file), "-o", str(tmp_path)]
    shapes = {name: (2, *x.shape[1:]) for name, x in cli.load_model(MODEL)[1].items()}
    text = ",".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
    assert cli.main([*emit, "--shape", text]) == 0
    assert "Program.OTHERS = (Program1,)" in (tmp_path / "program.py").read_text()
    capsys.readouterr()
    assert cli.main([*emit, "--pad", "nothing=-100"]) == 2
    assert "found nothing" in capsys.readouterr().err
    for option, wrong in (("--shape", "x=2x"), ("--pad", "labels")):
        with pytest.raises(SystemExit):
            cli.main([*emit, option, wrong])
        assert f"found '{wrong}'" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.whole  # `run` starts ranks in the test of inference below, and training loops run in tests/pages
def test_run_trains_with_torchrun(plan_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", MODEL, str(plan_file), "-o", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert len(re.findall(r"^step \d+ loss \d+\.\d+ norm ", printed, re.MULTILINE)) == 10


def test_run_refuses_a_plan_of_several_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["plan", MODEL, "--mesh", "h100:2x1", "--template", "dp=2", "-o", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["emit", MODEL, str(path), "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("torchrun --nnodes 2 --nproc-per-node 1 ")
    assert cli.main(["run", MODEL, str(path), "-o", str(tmp_path)]) == 2
    assert (
        "autopar: expected a plan for one node, found one for h100:2x1; take `autopar emit`" in capsys.readouterr().err
    )


def test_verify_accepts_the_plan_and_refuses_it_for_another_model(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", MODEL, str(plan_file)]) == 0
    assert capsys.readouterr().out == "the plan is well typed for this model\n"
    assert cli.main(["verify", "models.gpt", str(plan_file)]) == 2
    assert capsys.readouterr().err.startswith("autopar: expected a plan for this model (GPT, fingerprint ")


def test_models_on_meta_are_planned_without_weights(tmp_path: Path, plan_file: Path) -> None:
    assert cli.main(["emit", MODEL, str(plan_file), "--meta", "-o", str(tmp_path)]) == 0
    assert not (tmp_path / "weights.pt").exists()


def test_profile_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measuring itself is tests/profiler's; here it is replaced by figures that are known."""
    figures = json.loads((ROOT / "cost_profiles" / "cpu.json").read_text())
    monkeypatch.setattr(host, "measure_host", lambda points, windows, pause_s: figures)
    path = tmp_path / "mine.json"
    assert cli.main(["profile", "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "float32     100 GFLOP/s a rank" in printed
    assert f"written to {path}; plan with it: --mesh {path}:4" in printed
    assert cli.main(["plan", MODEL, "--mesh", f"{path}:2", "--template", "dp=2"]) == 0


PLAN = ["plan", MODEL, "--mesh", MESH]
BAD = {
    "no such module": (
        ["plan", "models.nope", "--mesh", MESH],
        "found 'models.nope': ModuleNotFoundError: No module named 'models.nope'\nrun",
    ),
    "no such config": (["plan", "models.gpt:tiny", "--mesh", MESH], "found no tiny\nconfigs that it has: Config, gpt2"),
    "no builder": (["plan", "json:dumps", "--mesh", MESH], "found no build and no example_inputs\nconfigs"),
    "a file's name": (
        ["plan", "models/gpt.py", "--mesh", MESH],
        "found a file's name, 'models/gpt.py'\nwrite models.gpt:C",
    ),
    "split of a search": ([*PLAN, "--split", "speed"], "expected --split beside --template, found none"),
    "malformed mesh": (["plan", MODEL, "--mesh", "h100:2x2x2"], 'expected a mesh such as "h100:8x8" or "cpu:4"'),
    "unknown profile": (["plan", MODEL, "--mesh", "tpu:2"], "expected a known cost profile (a100"),
    "limit too low": ([*PLAN, "--memory-limit", "10kB"], "the smallest limit that can be met is "),
    "unknown template": ([*PLAN, "--template", "dp=2,ab=3"], "expected --template as items such as dp=2, with dp, tp"),
    "malformed template": ([*PLAN, "--template", "dp=two"], "found 'dp=two'"),
    "template unlike mesh": ([*PLAN, "--template", "dp=4"], "expected dp × tp × pp = 2 devices"),
    "template and constraint": (
        [*PLAN, "--template", "dp=2", "--constraint", "stages=1"],
        "or --constraint, found both",
    ),
    "constraint on nothing": ([*PLAN, "--constraint", "layers.0.wieght used=R"], "there is layers.0.weight, layers."),
    "no plan": (["show", "no/such.json"], "expected a plan file at no/such.json, found none that can be read"),
    "not a plan": (["show", "pyproject.toml"], "pyproject.toml: expected a plan as JSON; at the top level"),
    "unwritable": ([*PLAN, "--template", "dp=2", "-o", "README.md/plan.json"], "README.md"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_message_and_status_2(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD[case]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("autopar: ")
    assert message in printed.err
    assert "Traceback" not in printed.err


MODULES = {
    "raises": ("raise RuntimeError('no\\nluck')", "found 'broken:Config': RuntimeError: no luck"),
    "is no Python": ("def :", "found 'broken:Config': SyntaxError: "),
    "has no Config": ("def build(c): ...\ndef example_inputs(c): ...", "found no Config\nconfigs that it has: none"),
    "builds nothing": ("Config = 1\ndef build(c): ...\ndef example_inputs(c): ...", "found NoneType\nend it with"),
    "cannot build": ("Config = 1\ndef build(c): c.size\ndef example_inputs(c): ...", "found AttributeError: 'int' obj"),
    "has no inputs": (
        "import torch\nConfig = 1\ndef build(c): return torch.nn.Linear(1, 1)\ndef example_inputs(c): ...",
        "expected broken.example_inputs(config) to return one global batch, found None",
    ),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_module_that_is_no_model_is_told_in_two_lines(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(MODULES[case][0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert cli.main(["plan", "broken:Config", "--mesh", MESH]) == 2
    told = capsys.readouterr().err
    assert MODULES[case][1] in told and len(told.splitlines()) == 2


def test_optimizer_and_split_are_those_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    asked = ["--template", "pp=2,microbatches=2", "--split", "speed", "--optimizer", "sgd"]
    assert cli.main(["plan", "models.gpt:Config", "--meta", "--mesh", MESH, *asked, "-o", str(path)]) == 0
    assert autopar.Plan.load(path).optimizer == "sgd"


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "parallelize", interrupted)
    assert cli.main([*PLAN]) == 130
    assert capsys.readouterr().err == "autopar: interrupted\n"


def test_a_reader_that_has_enough_is_no_error(plan_file: Path) -> None:
    command = f"{sys.executable} -m autopar show {plan_file} | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ranks
def test_a_plan_for_inference_is_evaluated(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    asked = ["--mode", "inference", "--template", "dp=2", "-o", str(plan)]
    assert cli.main(["plan", "models.mlp:Config", "--mesh", "cpu:2", *asked]) == 0
    assert cli.main(["run", "models.mlp:Config", str(plan), "-o", str(out)]) == 0
    assert not (out / "train.py").exists() and (out / "evaluate.py").exists()


def test_explaining_what_is_not_there_fails(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(plan_file), "decoder"]) == 2
    assert "found none that matches 'decoder'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice: 'fly'"),
        ([*PLAN, "--memory-limit", "much"], "such as 16GB"),
        ([*PLAN, "--memory-limit", "0"], "expected a number of bytes above 0"),
        ([*PLAN, "--memory-limit=-1GB"], "expected a number of bytes above 0"),
        ([*PLAN, "--constraint", "layers.0.weight used"], "such as 'layers.0.mlp.up.weight used=S(0),R axis=d0', with"),
        ([*PLAN, "--constraint", "layers.0.weight used=X"], "expected a placement type S(d), R, I or P; found 'X'"),
        ([*PLAN, "--constraint", "layers.0.weight axis=d0"], "expected what is pinned after the pattern"),
        ([*PLAN, "--constraint", "layers.0.weight zero=many"], "found 'zero=many' in"),
    ],
)
def test_bad_usage_is_explained_by_the_parser(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 2, "what was wrong, and where help is"
