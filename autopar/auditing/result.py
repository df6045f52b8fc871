"""An audit: another framework's configuration, judged, and the better one beside it.

Whether a file is legal is a matter of reading and counting: that is told first, and imports nothing of torch. What
predicts and searches is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.auditing.flavors import read_config
from autopar.auditing.frameworks import FRAMEWORKS, Framework, read_file, read_text
from autopar.auditing.job import (
    PLANS,
    RECOMPUTATIONS,
    JobFile,
    LegalityFault,
    NotCarried,
    TrainingJob,
    check_known,
    completed,
    with_batch,
)
from autopar.auditing.legality import faults
from autopar.auditing.writing import changed_text, differences
from autopar.collector import without_collector
from autopar.errors import AutoparError, PlanError
from autopar.ir.mesh import Mesh, checked
from autopar.views import view

if TYPE_CHECKING:
    from autopar.auditing.prediction import JobPrediction, TracedModels
    from autopar.ir.plan import Plan

SLOW = 0.1
"""A job is called slow where the framework's own best is faster by more than this share."""


@dataclass(frozen=True)
class Audit:
    """What an audit found. `print` shows it on a screen.

    job: the configuration in typed form; left: what no plan carries of the file, and why; faults: why it cannot run;
    predicted: its plan, simulated, None where it cannot run or `refusal` says why it has none; better: the fastest job
    that the framework's own form can say and that fits, of `tried` ones; own: the plan that autopar would choose.
    """

    file: JobFile
    framework: Framework
    job: TrainingJob
    faults: tuple[LegalityFault, ...] = ()
    predicted: JobPrediction | None = None
    refusal: str = ""
    better: JobPrediction | None = None
    tried: int = 0
    own: Plan | None = None
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def left(self) -> tuple[NotCarried, ...]:
        return self.file.left

    @property
    def is_legal(self) -> bool:
        return not self.faults

    @property
    def fits(self) -> bool:
        """Whether it runs and its memory is more likely enough than not."""
        return self.predicted is not None and self.predicted.fits

    @property
    def is_searched(self) -> bool:
        """Whether better ones were looked for."""
        return bool(self.tried) or self.own is not None

    @property
    def verdict(self) -> str:
        """ "illegal", "not predicted", "does not fit", "slow" or "fine"; "legal" while no more is known."""
        if self.faults:
            return "illegal"
        if self.predicted is None:
            return "not predicted" if self.refusal else "legal"
        if not self.predicted.fits:
            return "does not fit"
        return "slow" if self.gain > SLOW else "fine"

    @property
    def gain(self) -> float:
        """By what share the better configuration is faster; 0 where there is none, or nothing to compare with."""
        if self.predicted is None or self.better is None:
            return 0.0
        return max(0.0, self.predicted.step_ns / self.better.step_ns - 1)

    def better_text(self) -> str:
        """The file with the better job in it; everything else is as it was. Raises PlanError where there is none, or
        the file's form cannot say it."""
        if self.better is None:
            raise PlanError(f"expected a better configuration of {self.file.name}, found none that fits")
        if self.better is self.predicted:
            return self.file.text
        new = self.better.job
        text = changed_text(self.file, self.job, new, self.framework)
        wrong = differences(read_back(self, text, new), new)
        wrong += [str(fault) for fault in read_text(self.file.name, text, _name(self.framework))[0].faults]
        if wrong:
            raise PlanError(f"expected {self.file.name} to say the better job once written, found {', '.join(wrong)}; "
                            "write it by hand")  # fmt: skip
        return text

    def write(self, path: Path | str) -> None:
        """Writes `better_text()`."""
        Path(path).write_text(self.better_text(), encoding="utf-8")

    def __str__(self) -> str:
        return str(view("audit")(self))


def read_back(found: Audit, text: str, new: TrainingJob) -> TrainingJob:
    """What a file says that was written for the new job, with what was said beside the file, and of the batch what the
    script has to say."""
    again = read_text(found.file.name, text, _name(found.framework))[0]
    beside = {name: value for name, value in found.given if name not in ("micro_batch", "global_batch")}
    if "micro_batch" not in again.where:
        beside |= {"micro_batch": new.micro_batch}
    if not {"global_batch", "accumulation"} & again.where.keys():
        beside |= {"accumulation": new.accumulation, "global_batch": new.global_batch}
    return with_batch(replace(completed(replace(again.job, **beside), new.mesh), **beside))


def _name(framework: Framework) -> str:
    return next(name for name, one in FRAMEWORKS.items() if one is framework)


def audit(
    path: Path | str, mesh: Mesh | str | None = None, model: Any = None, *, framework: str | None = None,
    search: str | None = "fast", micro_batch: int | None = None, global_batch: int | None = None,
    seq_len: int | None = None, vocab_size: int | None = None, recompute: str | None = None,
    tell: Callable[[Audit], None] | None = None,
) -> Audit:  # fmt: skip
    """Judges a configuration of torchtitan, Megatron-LM, DeepSpeed, Accelerate or nanotron.

    mesh: the devices, where the file does not say them all. model: a Hugging Face config.json, or a module and its
    global batch, where the file has no sizes. framework: where the file's ending and keys do not tell. micro_batch,
    global_batch, seq_len, vocab_size, recompute: what the file leaves to a script. search: None judges alone, "fast",
    "default" and "thorough" also look for better ones. tell: is called as soon as it is known that the job is legal,
    once it is predicted, and with what the framework could do before autopar's own plan is looked for. Nothing of
    the file is executed or imported. Raises PlanError for a file that is malformed, or where something is missing.
    """
    if search is not None and search not in PLANS:
        raise PlanError(f"expected search as one of {', '.join(PLANS)} or None, found {search!r}")
    if recompute is not None and recompute not in RECOMPUTATIONS:
        raise PlanError(f"expected recompute as one of {', '.join(RECOMPUTATIONS)}, found {recompute!r}")
    file, form = read_file(path, framework)
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    file = _on(file, mesh)
    sizes = _sizes(model, file)
    wanted = {"micro_batch": micro_batch, "global_batch": global_batch, "seq": seq_len, "recompute": recompute}
    said = {**sizes, **{name: value for name, value in wanted.items() if value is not None}}
    given = tuple(said.items())
    job = _given(completed(_given(file.job, given), checked(mesh) if mesh else None), given)
    if vocab_size is not None and job.model is not None:
        job = replace(job, model=replace(job.model, vocab=vocab_size))
    is_module = isinstance(model, tuple)
    found = _counted(Audit(file, form, job, given=given), is_module)
    if tell is not None:
        tell(found)
    with without_collector():
        return _judged(found, model, search, tell or (lambda found: None))


def _judged(found: Audit, model: Any, search: str | None, tell: Callable[[Audit], None]) -> Audit:
    """With what it takes, and what would be better; what is found is told before the next is looked for."""
    if not found.is_legal and search is None:
        return found
    models = _traced_models(model)
    if found.is_legal:
        found = _priced(found, models)
        tell(found)
    if search is None:
        return found
    found = _bettered(found, models, search)
    tell(found)
    return _beside_own(found, models, search)


def _given(job: TrainingJob, given: tuple[tuple[str, Any], ...]) -> TrainingJob:
    """The job with what the user said beside the file; of a batch's three numbers, those that were not said follow."""
    said = dict(given)
    if "global_batch" in said and "micro_batch" not in said and job.micro_batch is None:
        said["micro_batch"] = max(1, said["global_batch"] // job.ranks_of_data) if job.data else None
    if {"micro_batch", "global_batch"} & said.keys() and job.data:
        said.setdefault("accumulation", None)
        return with_batch(replace(job, **said))
    return replace(job, **said)


def _sizes(model: Any, file: JobFile) -> dict[str, Any]:
    """What is said of the model beside the file."""
    if model is None:
        return {}
    if isinstance(model, (str, Path)):
        sizes, told = read_config(Path(model))
        said: dict[str, Any] = {"model": sizes}
        longest = told.get("max_position_embeddings") or told.get("n_positions")
        return said | ({"seq": min(4096, longest)} if file.job.seq is None and longest else {})
    if isinstance(model, tuple) and len(model) == 2:
        return _sizes_of_batch(model[1])
    raise PlanError(f"expected model as a config.json's path or (module, global batch), found {type(model).__name__}")


def _traced_models(model: Any) -> TracedModels:
    """How the model is traced."""
    from autopar.auditing.prediction import TracedModels

    return TracedModels(*model) if isinstance(model, tuple) else TracedModels()


def _sizes_of_batch(inputs: Any) -> dict[str, Any]:
    tensors = [one for one in (inputs.values() if isinstance(inputs, dict) else inputs) if hasattr(one, "shape")]
    if not tensors or not tensors[0].dim():
        raise PlanError("expected a global batch whose first tensor has samples as dim 0, found none")
    shape = tensors[0].shape
    return {"global_batch": shape[0], "seq": shape[1] if len(shape) > 1 else 1}


def _counted(found: Audit, is_module: bool) -> Audit:
    """Legal or not. is_module: the model is one of the user's own, whose sizes are not asked for."""
    job = found.job
    if job.micro_batch is None:
        job = with_batch(replace(job, micro_batch=1))
        found = replace(
            found, job=job, file=_noted(found.file, "micro batch", "1", "the script says it: --micro-batch")
        )
    if job.model is not None and job.model.experts and job.precision == "fp32":
        job = replace(job, precision="bf16")
        why = "grouped products of experts are planned in bfloat16, which is faster and takes less than float32"
        left = NotCarried("precision", "float32", 0, "approximated", why)
        found = replace(found, job=job, file=replace(found.file, left=(*found.file.left, left)))
    job.mesh  # noqa: B018  (raises where devices are not known)
    found = replace(found, faults=(*found.file.faults, *faults(found.file, job)))
    if not found.faults and not is_module:
        check_known(job, found.file.name)
    return found


def _priced(found: Audit, models: TracedModels) -> Audit:
    """With what it takes."""
    from autopar.auditing.prediction import predicted

    try:
        return replace(found, predicted=predicted(found.job, models))
    except AutoparError as error:
        return replace(found, refusal=f"template_plan cannot say this job: {error}")


def _on(file: JobFile, mesh: Mesh | None) -> JobFile:
    """The file, with a note where it names other devices than those that were given."""
    job = file.job
    if mesh is None or job.devices is None or job.devices == mesh.num_devices:
        return file
    why = f"judged on {mesh}, which was given, and not on the devices that the file says"
    return _noted(file, "devices", f"{job.nodes} × {job.per_node}", why)


def _noted(file: JobFile, key: str, value: str, why: str) -> JobFile:
    return replace(file, left=(*file.left, NotCarried(key, value, 0, "assumed", why)))


def _bettered(found: Audit, models: TracedModels, search: str) -> Audit:
    """With what the framework could do."""
    from autopar.auditing.better import best_job

    job = found.job
    if job.model is not None and not models.is_given and _is_whole(job):
        better, tried = best_job(found.file, job, found.framework, models, search)
        if (
            better is not None
            and found.predicted is not None
            and found.fits
            and better.step_ns >= found.predicted.step_ns
        ):
            better = found.predicted
        return replace(found, better=better, tried=tried)
    return found


def _beside_own(found: Audit, models: TracedModels, search: str) -> Audit:
    """With what autopar would do."""
    from autopar.pipeline import planned_jointly
    from autopar.request import BUDGETS, Request

    job = found.job
    if not _is_whole(job) and not models.is_given:
        return found
    precision = "bf16" if job.precision == "bf16" else None
    request = Request(job.mesh, "train", job.optimizer, None, (), BUDGETS[search], precision)
    try:
        return replace(found, own=planned_jointly(models.graph(job), request)[1])
    except AutoparError:
        return found


def _is_whole(job: TrainingJob) -> bool:
    return not job.without_sizes()


def lines_left(found: Audit) -> Iterator[tuple[str, list[NotCarried]]]:
    """What no plan carries, by reason, those that do not matter last."""
    for kind in ("no equivalent", "approximated", "assumed", "unknown", "does not matter"):
        items = found.file.of_kind(kind)
        if items:
            yield kind, items
