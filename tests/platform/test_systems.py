"""Platforms that libraries are built for."""

import pytest

from llamatrain.errors import UsageError
from llamatrain.platform import cpu, systems


def test_each_platform_has_classes_of_its_architecture() -> None:
    for name, each in systems.PLATFORMS.items():
        assert each.name == name and each.classes
        assert {cpu.CLASSES[one].architecture for one in each.classes} == {each.architecture}
    built = {one for each in systems.PLATFORMS.values() for one in each.classes}
    assert built == cpu.CLASSES.keys()


@pytest.mark.parametrize("each", systems.PLATFORMS.values(), ids=lambda each: each.name)
def test_a_platform_is_found_by_system_and_machine(
    each: systems.Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems.sys, "platform", each.system)
    monkeypatch.setattr(systems, "architecture", lambda: each.architecture)
    monkeypatch.delenv(systems.PLATFORM_VARIABLE, raising=False)
    assert systems.host_platform() == systems.target_platform() == each
    monkeypatch.setenv(systems.PLATFORM_VARIABLE, "windows-arm64")
    assert systems.target_platform() == systems.PLATFORMS["windows-arm64"]


def test_a_machine_of_no_platform_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "architecture", lambda: "riscv64")
    assert systems.host_platform() is None


def test_an_unknown_platform_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(systems.PLATFORM_VARIABLE, "plan9")
    with pytest.raises(UsageError, match="unknown platform plan9; known are linux-x86-64, "):
        systems.target_platform()
