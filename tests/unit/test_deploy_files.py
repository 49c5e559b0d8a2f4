"""The Dockerfiles and the compose file, where there is no engine to try them on."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rara_executor.settings import Settings as ExecutorSettings
from rara_scheduler.settings import Settings as SchedulerSettings
from support.deploy_files import (
    DEPLOY,
    ROOT,
    Image,
    compose,
    image,
    image_of,
    long_running_services,
    our_services,
    seconds,
    targets,
)

DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
IMAGES = [(path, target) for path in DOCKERFILES for target in sorted(targets(path))]
# From the signal to the end, where a service's own bound has failed it: its last resort comes half a second later.
LAST_RESORT_S = 1.0
BASES = {"python:3.12-slim-bookworm", "golang:1.26-bookworm", "scratch"}
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "env", "tail"}


def scripts() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def environment_names() -> set[str]:
    fields = [*SchedulerSettings.model_fields, *ExecutorSettings.model_fields]
    return {f"RARA_{name.upper()}" for name in fields} | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"}


def stop_bound_s(service: dict[str, Any]) -> float:
    """What the service's own settings allow it, from signal to end."""
    env = {**image_of(service).env, **service["environment"]}
    if service["build"]["target"] == "scheduler":
        return float(env.get("RARA_STOP_S", SchedulerSettings.model_fields["stop_s"].default))
    return float(env.get("RARA_EXECUTOR_STOP_S", ExecutorSettings.model_fields["executor_stop_s"].default))


@pytest.mark.case("STOP-2")
@pytest.mark.parametrize(("dockerfile", "target"), IMAGES, ids=lambda value: getattr(value, "name", value))
def test_an_image_starts_the_service_itself_as_an_ordinary_user(dockerfile: Path, target: str) -> None:
    made = image(dockerfile, target)
    command = made.command()
    assert command[0] not in SHELLS
    program = Path(command[0]).name
    assert program in {*scripts(), "rara-go-executor"}
    assert made.said["STOPSIGNAL"] == "SIGTERM"
    user = re.fullmatch(r"(\d+):(\d+)", made.said["USER"])
    assert user is not None, "a name says nothing to an orchestrator that refuses root"
    assert int(user[1]) > 0
    assert re.search(r"CMD \[", made.said["HEALTHCHECK"]), "a shell that is not there in every image"
    if program in scripts():
        assert made.env["PATH"].startswith("/opt/rara/bin:")
    if program.endswith("executor"):
        assert made.env["RARA_EXECUTOR_READY_FILE"]


@pytest.mark.case("STOP-2")
@pytest.mark.parametrize("name", sorted(long_running_services()))
def test_a_service_has_more_time_to_stop_than_it_takes(name: str) -> None:
    service = long_running_services()[name]
    assert seconds(service["stop_grace_period"]) > stop_bound_s(service) + LAST_RESORT_S
    assert service["init"] is True
    assert service.get("stop_signal", "SIGTERM") == "SIGTERM"
    assert "entrypoint" not in service
    assert isinstance(service.get("command", []), list)


@pytest.mark.case("STOP-2")
def test_executors_stop_before_the_schedulers_that_take_their_last_words() -> None:
    """Compose stops what depends on others first."""
    services = compose()["services"]
    executors = [name for name in services if name.endswith("-executor")]
    assert executors
    for name in executors:
        assert "scheduler" in services[name]["depends_on"]
    assert "migrate" in services["scheduler"]["depends_on"]
    assert "database" in services["migrate"]["depends_on"]


@pytest.mark.parametrize("command", ["CMD rara-scheduler --flag", "ENTRYPOINT exec rara-scheduler"])
def test_the_shell_form_is_found_out(tmp_path: Path, command: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM scratch AS base\n{command}\nFROM base AS service\nUSER 1:1\n")
    with pytest.raises(ValueError, match="in shell form"):
        image(path, "service").command()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_built_from_pinned_bases(dockerfile: Path) -> None:
    for target in targets(dockerfile):
        assert _lowest(dockerfile, image(dockerfile, target)) in BASES
    assert compose()["services"]["database"]["image"] == "postgres:17"


def _lowest(dockerfile: Path, made: Image) -> str:
    while True:
        try:
            made = image(dockerfile, made.base)
        except KeyError:
            return made.base


@pytest.mark.parametrize("name", sorted(our_services()))
def test_our_services_can_do_little_and_are_not_reached_from_outside(name: str) -> None:
    service = our_services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "container_name" not in service
    if name.endswith("executor"):
        assert "database" not in service.get("networks", ["default"])


def test_what_the_compose_file_sets_is_a_setting() -> None:
    known = {*environment_names(), "RARA_SERVER"}
    for name, service in our_services().items():
        unknown = set(service.get("environment", {})) - known
        assert not unknown, name


def test_with_tls_every_party_shows_a_certificate_and_a_token_and_none_is_insecure() -> None:
    services = compose("docker-compose.tls.yml")["services"]
    scheduler = services["scheduler"]["environment"]
    assert (scheduler["RARA_INSECURE"], scheduler["RARA_AUTH"]) == ("0", "tokens")
    assert {"RARA_TLS_CERT", "RARA_TLS_KEY", "RARA_TLS_CLIENT_CA"} < scheduler.keys()
    callers = {
        name
        for name, service in our_services().items()
        if {"RARA_SCHEDULER", "RARA_SERVER"} & {*service["environment"]}
    }
    assert callers == services.keys() - {"scheduler", "tokens"}
    for name in callers:
        shown = services[name]["environment"]
        assert shown.keys() == {
            "RARA_TLS_CA",
            "RARA_TLS_CLIENT_CERT",
            "RARA_TLS_CLIENT_KEY",
            "RARA_TOKEN_FILE",
        }
        assert shown.keys() <= {*environment_names(), "RARA_TLS_CA"}
        assert all(volume.endswith(":ro") for volume in services[name]["volumes"])


def test_the_database_is_published_nowhere() -> None:
    assert "ports" not in compose()["services"]["database"]
    assert compose()["networks"]["database"]["internal"] is True
