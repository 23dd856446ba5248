"""Runs on several ranks, one after the other in one start of them: which, and what they give, are files of JSON.

mpiexec -n 4 python -m tests.helpers.multi_rank JOBS OUT
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llamatrain
from llamatrain import LlamatrainError
from tests.helpers.mpi_programs import python

Job = tuple[str, list[str], dict[str, Any]]  # a function of the package, what it is given, and its options


def job(what: str, *given: str | Path, **options: Any) -> Job:
    return (
        what,
        list(map(str, given)),
        {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
    )


def done_by(ranks: int, jobs: list[Job], folder: Path, seconds: float = 240) -> list[Any]:
    """What each gives, as the first rank has it; 0 ranks: in this process, which no launcher has started."""
    if not ranks:
        return [plainly(done(each)) for each in jobs]
    asked, given = folder / f"jobs-{ranks}.json", folder / f"given-{ranks}.json"
    asked.write_text(json.dumps(jobs))
    ended = python(ranks, "-m", "tests.helpers.multi_rank", asked, given, seconds=seconds)
    assert ended.code == 0 and not ended.out, ended.err
    return list(json.loads(given.read_text()))


def done(one: Job) -> Any:
    what, given, options = one
    try:
        return getattr(llamatrain, what)(*given, **options)
    except LlamatrainError as error:
        return f"error: {error}"


def plainly(made: Any) -> Any:
    """As JSON has it."""
    return made if isinstance(made, str) else json.loads(json.dumps(asdict(made), default=str))


def main() -> None:
    from llamatrain.distributed.comm import get_comm

    asked, given = map(Path, sys.argv[1:])
    made = [plainly(done(tuple(each))) for each in json.loads(asked.read_text())]
    told = get_comm().all_gather(
        [each if isinstance(each, str) else each.get("losses", each) for each in made]
    )
    assert all(each == told[0] for each in told), "what a function gives is the same on all ranks"
    if get_comm().rank == 0:
        given.write_text(json.dumps(made))


if __name__ == "__main__":
    main()
