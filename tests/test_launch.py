"""What is launched elsewhere, checked without a cluster: manifests that fit together, flags that exist, fleets that load."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from custom_resources import KINDS, faults

from sandbox_client.fleet import connect, cores_needed, urls_of
from sandbox_client.server import _arguments

HERE = Path(__file__).parents[1] / "launch"
MANIFESTS = sorted(path for path in HERE.glob("*.yaml") if not path.name.startswith("gke"))  # of sandboxes
FLEETS = sorted((HERE / "fleets").glob("*.toml"))
CORES = {"8": 8.0, "1": 1.0, "250m": 0.25}

Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def find(name: str, kind: str) -> Manifest:
    (found,) = [one for one in manifests(HERE / name) if one["kind"] == kind]
    return found


def pods(one: Manifest) -> Iterator[Manifest]:
    spec = one.get("spec", {})
    template = spec.get("template") or spec.get("podTemplate")
    if template:
        yield template


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid_to_kubernetes_own_schemas(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in manifests(path):
        if (one["apiVersion"], one["kind"]) not in KINDS:
            validate.validate(one, "1.31", strict=True)
        elif one["kind"] == "SandboxTemplate":
            pod = {"apiVersion": "v1", "kind": "Pod", **one["spec"]["podTemplate"]}
            validate.validate(pod, "1.31", strict=True)


OTHERS = [one for path in sorted(HERE.glob("*.yaml")) for one in manifests(path) if (one["apiVersion"], one["kind"]) in KINDS]


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one["kind"])
def test_kinds_of_others_have_fields_that_their_types_know_and_a_misspelt_one_is_refused(one: Manifest) -> None:
    assert faults(one) == []
    misspelt = list(_misspelt(one["spec"], KINDS[one["apiVersion"], one["kind"]]))
    assert len(misspelt) >= 3
    for name, spec in misspelt:
        assert any(fault.endswith(f".{name}s: there is no such field") for fault in faults({**one, "spec": spec})), name


def _misspelt(value: Any, form: Any) -> Iterator[tuple[str, Any]]:
    """The value with one of its fields named otherwise, for every field."""
    if isinstance(form, list):
        for n, one in enumerate(value):
            for name, wrong in _misspelt(one, form[0]):
                yield name, [*value[:n], wrong, *value[n + 1 :]]
    if isinstance(form, dict):
        forms = {name.removesuffix("*"): inner for name, inner in form.items()}
        for name, inner in value.items():
            yield name, {(f"{key}s" if key == name else key): one for key, one in value.items()}
            for deep, wrong in _misspelt(inner, forms.get(name)):
                yield deep, {**value, name: wrong}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("failurePolicy", "rules", 0, "action"), "FailJobset", "action: "),
        (("failurePolicy", "rules", 0, "onJobFailureReasons"), ["PodFailed"], "onJobFailureReasons[0]: "),
        (("failurePolicy", "maxRestarts"), "100", "maxRestarts: "),
        (("replicatedJobs", 0, "replicas"), -1, "replicas: "),
        (("replicatedJobs", 0, "name"), "Train", "name: "),
        (("replicatedJobs",), {"name": "train"}, "replicatedJobs: a list is wanted"),
    ],
)
def test_a_value_that_a_jobset_does_not_take_is_refused(path: tuple[Any, ...], value: Any, said: str) -> None:
    one = find("gke-jobset.yaml", "JobSet")
    place = one["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (fault,) = faults(one)
    assert said in fault


def test_no_policy_of_a_controller_opens_what_ours_closes() -> None:
    """Policies add up: what one lets out is out, whatever the others say."""
    assert find("agent-sandbox.yaml", "SandboxTemplate")["spec"]["networkPolicyManagement"] == "Unmanaged"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_manifest_says_what_where_and_under_which_name_and_none_twice(path: Path) -> None:
    seen = set()
    for one in manifests(path):
        name = one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]
        assert name not in seen and one["apiVersion"]
        seen.add(name)
        if one["kind"] not in ("Namespace", "RuntimeClass"):
            assert name[1] == "sandboxes"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_pods_are_bounded_have_no_credentials_and_no_way_out(path: Path) -> None:
    found = [(one, pod) for one in manifests(path) for pod in pods(one)]
    assert found
    policies = [one["spec"] for one in manifests(path) if one["kind"] == "NetworkPolicy"]
    classes = {one["metadata"]["name"] for one in manifests(path) if one["kind"] == "RuntimeClass"}
    for one, pod in found:
        spec, labels = pod["spec"], pod["metadata"]["labels"]
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert not spec.get("hostNetwork") and not spec.get("hostPID")
        if "runtimeClassName" in spec:
            assert spec["runtimeClassName"] in classes
        (policy,) = [policy for policy in policies if policy["podSelector"]["matchLabels"].items() <= labels.items()]
        assert policy["egress"] == [] and set(policy["policyTypes"]) == {"Ingress", "Egress"} and policy["ingress"]
        if "selector" in one["spec"]:
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for container in spec["containers"]:
            assert container["securityContext"]["privileged"] is False
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert not any("token" in str(variable).lower() for variable in container.get("env", ()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_services_reach_pods_and_bindings_reach_roles(path: Path) -> None:
    all_of_it = manifests(path)
    labels = [pod["metadata"]["labels"] for one in all_of_it for pod in pods(one)]
    ports = {
        port.get("name") or port["containerPort"]
        for one in all_of_it
        for pod in pods(one)
        for container in pod["spec"]["containers"]
        for port in container["ports"]
    }
    for one in all_of_it:
        if one["kind"] == "Service":
            assert any(one["spec"]["selector"].items() <= label.items() for label in labels)
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
        if one["kind"] == "RoleBinding":
            assert any(r["kind"] == "Role" and r["metadata"]["name"] == one["roleRef"]["name"] for r in all_of_it)
        if one["kind"] == "SandboxWarmPool":
            name = one["spec"]["sandboxTemplateRef"]["name"]
            assert any(t["kind"] == "SandboxTemplate" and t["metadata"]["name"] == name for t in all_of_it)


def test_our_server_is_started_with_flags_that_it_has() -> None:
    pod = find("sandbox-server.yaml", "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = _arguments(container["args"])
    assert (options.host, options.port, options.behind_proxy) == ("0.0.0.0", 8080, True)
    assert options.token_file.startswith(container["volumeMounts"][0]["mountPath"])
    assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400  # the server takes no token that others can read
    assert container["ports"][0]["containerPort"] == options.port
    room = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 10
    assert options.concurrency * options.memory_mb <= room  # as many programs as may run, each with all its memory


def test_the_image_copies_what_is_there_and_starts_what_exists() -> None:
    text = (HERE / "Dockerfile").read_text()
    assert "COPY sandbox_client " in text and (HERE.parent / "sandbox_client" / "server.py").is_file()
    assert '"python", "-m", "sandbox_client.server"' in text


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.stem)
def test_every_fleet_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "key")
    client = connect(path)
    assert client.backend.name == tomllib.loads(path.read_text())["backend"]


def test_fleets_name_the_servers_that_the_manifests_start() -> None:
    words = tomllib.loads((HERE / "fleets" / "sandbox-server.toml").read_text())
    stateful, service = find("sandbox-server.yaml", "StatefulSet"), find("sandbox-server.yaml", "Service")
    name, port = stateful["metadata"]["name"], service["spec"]["ports"][0]["port"]
    wanted = [
        f"http://{name}-{n}.{service['metadata']['name']}.sandboxes.svc:{port}" for n in range(stateful["spec"]["replicas"])
    ]
    assert urls_of("", words) == wanted
    fusion = tomllib.loads((HERE / "fleets" / "sandbox-fusion.toml").read_text())
    assert fusion["max_in_flight"] == 34 * find("sandbox-fusion.yaml", "Deployment")["spec"]["replicas"]
    claims = tomllib.loads((HERE / "fleets" / "agent-sandbox.toml").read_text())["options"]
    pool = find("agent-sandbox.yaml", "SandboxWarmPool")["metadata"]
    assert (claims["warm_pool"], claims["namespace"]) == (pool["name"], pool["namespace"])


def test_the_replicas_are_those_of_the_worked_example() -> None:
    stateful = find("sandbox-server.yaml", "StatefulSet")["spec"]
    cores = CORES[stateful["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]] * stateful["replicas"]
    needed = cores_needed(100_000, 60, 0.05)
    assert needed <= cores < needed + 8
    text = (HERE / "README.md").read_text()
    assert "100 cores, so 13 replicas of 8 cores" in text and "1,667 programs a second" in text
