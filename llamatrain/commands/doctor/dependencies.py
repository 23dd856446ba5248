"""Lists the dependencies: allowed versions, and the installed one."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from llamatrain.compiler.prebuilt import PACKAGE

NAME = "llamatrain"
EXTRAS = "compile", "mpi", "torch"  # those that people install; the others are for who works on it
REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*([^;\s][^;]*)?(?:;.*extra\s*==\s*[\"']([\w-]+)[\"'].*)?")
NUMBERS = re.compile(r"\d+(?:\.\d+)*")


class Requirement(NamedTuple):
    """A dependency with the versions that are allowed."""

    name: str
    bounds: str  # such as >=2.0,<3
    extra: str  # the extra that installs it; empty: always installed

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        return installed_version(self.name)

    @property
    def pip_argument(self) -> str:
        """The argument for `pip install`."""
        return f"'{NAME}[{self.extra}]'" if self.extra else f"'{self.name}{self.bounds}'"

    def accepts(self, version: str) -> bool:
        """Return True if a version lies within the bounds, of which >= and < are checked."""
        for bound in filter(None, self.bounds.split(",")):
            number, least = parse_version(bound), parse_version(version)
            if (bound.strip().startswith(">=") and least < number) or (
                bound.strip().startswith("<") and least >= number
            ):
                return False
        return True


def installed_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: 2.0 equals 2."""
    match = NUMBERS.search(version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def list_requirements() -> list[Requirement]:
    """Return the dependencies and those of the extras that users install."""
    requirements = [
        Requirement(match[1], (match[2] or "").replace(" ", ""), match[3] or "")
        for match in map(REQUIREMENT.fullmatch, read_requirements())
        if match
    ]
    return [
        requirement for requirement in requirements if not requirement.extra or requirement.extra in EXTRAS
    ]


def read_requirements() -> Iterator[str]:
    """Yield requirements from pyproject.toml in a clone, or from the installed package."""
    try:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        if project["name"] != NAME:
            raise LookupError
        yield from project["dependencies"]
        for extra, requirements in project["optional-dependencies"].items():
            yield from (f'{one}; extra == "{extra}"' for one in requirements)
    except (OSError, ValueError, LookupError):
        try:
            yield from metadata.requires(NAME) or ()
        except metadata.PackageNotFoundError:
            return
