"""The families that tests know, a module for each."""

import pkgutil
from importlib import import_module

from tests.helpers.architecture_family import Family

FAMILIES: dict[str, Family] = {
    family.arch: family
    for family in (
        import_module(f"{__name__}.{module.name}").FAMILY
        for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
    )
}
