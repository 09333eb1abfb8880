"""The tasks of a comparison, one variant with one seed each, and their directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from metis_hf.conversion.convert import get_metis_model
from metis_hf.lab.compare.plan import ComparisonPlan, directory_name
from metis_hf.lab.compare.results import RESULT_FILE, SchemeResult, load_result
from metis_hf.lab.compare.training import drop_checkpoints
from metis_hf.lab.compare.variants import Variant
from metis_hf.lab.cost import meta_model
from metis_hf.lab.store import Store, numerics_digest, task_key
from metis_hf.schemes import source_digests
from metis_hf.shared.inputs import digest_of_path
from metis_hf.shared.records import read_json, write_json

SPEC_FILE = "run.json"  # in a task's directory: the instructions for its process
_NUMERICS = "this installation (numerics of metis_hf, torch, transformers)"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One run of a plan."""

    variant: Variant
    seed: int
    directory: Path  # `runs/<variant>/seed-<seed>` in the comparison's directory

    @property
    def name(self) -> str:
        """The name to print."""
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the schemes and the format that come from outside this package."""
        config = self.variant.metis_config(self.seed)
        return source_digests(config.schemes, config.format)

    @property
    def begun(self) -> bool:
        """True if the task has a checkpoint to resume from."""
        return any(self.directory.glob("checkpoint-*"))

    def spec(self) -> dict[str, Any]:
        """Read the instructions of the task's process; {} if there are none yet."""
        path = self.directory / SPEC_FILE
        return read_json(path) if path.is_file() else {}

    def check(self, config: dict[str, Any], schedule: dict[str, Any] | None) -> None:
        """Raise ValueError if the run was trained by another variant with the same name."""
        own = self.variant.metis_config(self.seed).to_dict(), self.variant.precision_schedule
        if (config, schedule) != own:
            raise ValueError(
                f"{self.directory} contains a run of another variant named {self.variant.name!r}; "
                "choose another name or another --out"
            )


def tasks_of(plan: ComparisonPlan, out: Path) -> list[Task]:
    """Return the tasks of a plan, seed by seed."""
    return [
        Task(variant, seed, out / "runs" / directory_name(variant.name) / f"seed-{seed}")
        for variant, seed in plan.runs()
    ]


def results_of(tasks: Sequence[Task]) -> list[SchemeResult]:
    """Return the results of the finished tasks."""
    found = (load_result(task.directory) for task in tasks)
    return [result for result in found if result is not None]


def imports_of(out: Path) -> list[str]:
    """Return the scheme sources that a comparison was last started with, without importing them."""
    specs = list(out.glob(f"runs/*/*/{SPEC_FILE}"))
    latest = max(specs, key=lambda path: path.stat().st_mtime_ns, default=None)
    found = None if latest is None else read_json(latest)
    sources = found.get("imports") if isinstance(found, dict) else None
    return [str(source) for source in sources] if isinstance(sources, list) else []


def jobs_of(tasks: Sequence[Task]) -> int | None:
    """Return the largest number of tasks that ran side by side; None if unknown."""
    jobs = [task.spec().get("jobs") for task in tasks]
    return max((each for each in jobs if each is not None), default=None)


@contextmanager
def held(
    plan: ComparisonPlan, store: Store, tasks: Sequence[Task], *, array: bool, note: Note
) -> Iterator[list[Task]]:
    """Claim the store of a comparison, lock the tasks without a result, and yield these tasks.

    With `array`, several processes work on the plan, and all must have the same numerics. `note` is
    called for each damaged result.

    Raises:
        ValueError: the directory belongs to another comparison, another process works on one of the
            tasks, or a run is of another variant or of a scheme whose file has changed.
    """
    _check_conversions(plan, [t for t in tasks if not (t.directory / RESULT_FILE).is_file()])
    folder = plan.tasks_dir if plan.tasks else None
    read = (plan.experiment.checkpoint, plan.data, plan.validation, folder)
    inputs = {path: digest_of_path(Path(path)) for path in read if path is not None}
    with ExitStack() as locks:
        if array:
            inputs[_NUMERICS] = numerics_digest()
        else:
            locks.enter_context(store.hold())
        store.claim(plan.settings(), inputs)
        for task in tasks:
            if not _finished(task, note):
                locks.enter_context(Store(task.directory).hold())
        # Another process may have finished one of the tasks in the meantime.
        yield [task for task in tasks if not _finished(task, note)]


def _check_conversions(plan: ComparisonPlan, tasks: Sequence[Task]) -> None:
    """Convert the model once per variant, without weights, so that errors appear before any run."""
    config = AutoConfig.for_model(**plan.experiment.model)
    for task in {task.variant.name: task for task in tasks}.values():
        try:
            get_metis_model(meta_model(config), task.variant.metis_config(task.seed))
        except ValueError as error:
            raise ValueError(f"variant {task.variant.name!r}: {error}") from None


def _finished(task: Task, note: Note) -> bool:
    """Return whether a task has its result; a damaged result is noted and deleted."""
    path = task.directory / RESULT_FILE
    try:
        if path.exists():
            read_json(path)
    except ValueError as error:
        note(f"{task.name}: {error}; training this run again")
        path.unlink()
    result = load_result(task.directory)
    if result is not None:
        task.check(result.config, result.precision_schedule)
        drop_checkpoints(task.directory)  # its process may have ended before that
    elif task.begun:
        begun = Variant(**task.spec()["variant"]) if task.spec() else task.variant
        task.check(begun.metis_config(task.seed).to_dict(), begun.precision_schedule)
    if result is not None or task.begun:
        there = task.spec().get("sources", task.sources)
        for name, digest in task.sources.items():
            if there.get(name) != digest:
                raise ValueError(
                    f"{task.directory} contains a run of {name!r} from before its file changed; "
                    "delete this directory to train it again, or choose another --out"
                )
    return result is not None


def write_spec(
    task: Task,
    plan: ComparisonPlan,
    data: Path,
    *,
    imports: Sequence[str],
    jobs: int,
    note: Note,
) -> None:
    """Write `run.json`, the instructions for the process of a task."""
    begun = task.spec() if task.begun else {}
    code, before = numerics_digest(), begun.get("code", [])
    before = [before] if isinstance(before, str) else before  # written by 0.2.0
    codes = list(dict.fromkeys([*before, code]))
    if before and before[-1] != code:
        note(
            f"{task.name} was started with another version of the code or torch and continues "
            "with this one"
        )
    spec = {
        "experiment": asdict(plan.of_seed(task.seed)),
        "variant": asdict(task.variant),
        "global_batch": plan.global_batch,
        "eval_sequences": plan.eval_sequences,
        "data": str(data.resolve()),
        "validation": plan.validation,
        "tasks": list(plan.tasks),
        "tasks_dir": plan.tasks_dir,
        "imports": list(imports),
        "sources": task.sources,
        "key": task_key(plan.settings(), asdict(task.variant), task.seed, task.sources),
        "code": codes,
        "jobs": max(jobs, begun.get("jobs", jobs)),  # most runs side by side so far
    }
    task.directory.mkdir(parents=True, exist_ok=True)
    write_json(task.directory / SPEC_FILE, spec)
