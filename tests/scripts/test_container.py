"""The files for containers: what a linter would say, and that they name what is there."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamatrain.config.options import format_flag, option_specs
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FINETUNE_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "scripts" / "container"
DOCKERFILE = (PLACE / "Dockerfile").read_text()
FLAGS = {format_flag(name) for cls in (RunFolderOptions, *FINETUNE_OPTIONS) for name in option_specs(cls)}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions(DOCKERFILE):
        if word == "FROM":
            found[rest.split(" AS ")[1]] = [(word, rest)]
        elif found:
            found[[*found][-1]].append((word, rest))
    return found


def test_images_have_no_rights_of_root() -> None:
    for name in ("llamatrain", "mpi"):
        users = [rest for word, rest in stages()[name] if word == "USER"]
        assert users == ["1000"], name
        assert stages()[name][0][1].startswith("base ")
    assert [*stages()][-1] == "llamatrain"  # what a build without --target makes


def test_sources_are_sent_to_the_builder() -> None:
    """What is copied exists, and the ignore file leaves it in."""
    copied = [
        source
        for word, rest in instructions(DOCKERFILE)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    sent = re.findall(r"^!(.*)$", (PLACE / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert "llamatrain" in copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in sent), source


def test_extras_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE) for extra in group.split(",")}
    assert {"compile", "mpi"} <= named <= {*extras}


def test_versions_are_stated() -> None:
    for word, rest in instructions(DOCKERFILE):
        assert word != "ADD" and ":latest" not in rest
    assert "--no-cache-dir" in DOCKERFILE and "rm -rf /var/lib/apt/lists/*" in DOCKERFILE


def test_hadolint() -> None:
    if (program := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, PLACE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ---- compose and Kubernetes --------------------------------------------------------------------


def test_compose() -> None:
    found = yaml.safe_load((PLACE / "compose.yaml").read_text())
    service = found["services"]["llamatrain"]
    build = service["build"]
    assert (PLACE / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("$")}
    assert named == found["volumes"].keys()
    assert "/cache" in (ROOT / build["dockerfile"]).read_text() and "cache:/cache" in service["volumes"]


def job() -> dict[str, Any]:
    found = yaml.safe_load((PLACE / "mpijob.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_the_job_is_one_of_the_operator() -> None:
    found = job()
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = found["spec"]
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert f"AuthorizedKeysFile {spec['sshAuthMountPath']}/" in (PLACE / "sshd_config").read_text()
    roles = spec["mpiReplicaSpecs"]
    script = roles["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    assert f"-n {roles['Worker']['replicas'] * spec['slotsPerWorker']} " in script
    for role in roles.values():
        pod = role["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["resources"]["limits"]["memory"]
            assert "latest" not in container["image"] and ":" in container["image"]


def test_the_job_names_options_that_exist() -> None:
    script = job()["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
    flags = {word for word in shlex.split(script, comments=True) if word.startswith("--") and word != "--"}
    assert {"--resume", "--out"} <= flags <= FLAGS
    shell = shutil.which("sh")
    if shell is None:
        pytest.skip("there is no shell to check the script with")
    assert subprocess.run([shell, "-n"], input=script.encode(), check=False).returncode == 0


def test_ports_agree() -> None:
    port = re.search(r"Port (\d+)", (PLACE / "sshd_config").read_text())
    assert port is not None and f"Port {port[1]}" in (PLACE / "ssh_config").read_text()
    worker = job()["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["ports"] == [{"containerPort": int(port[1])}]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": int(port[1])}
