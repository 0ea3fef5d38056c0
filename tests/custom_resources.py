"""What the kinds that Kubernetes' own schemas do not know may say: JobSet, and agent-sandbox's templates, pools and claims.

Written from their public Go types (jobset.x-k8s.io/v1alpha2, extensions.agents.x-k8s.io/v1beta1): all fields at the places that
our manifests use, with their types. Pods and jobs within them are for Kubernetes' own schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
WHOLE = object()  # a number that is not negative
OTHER = object()  # known, and not ours to check
# A dict is an object, with a star behind the fields that must be there; a list is of such things; a set holds all values.
ACTIONS = {
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
}
FAILURE_RULE = {
    "name*": RULE,
    "action*": ACTIONS,
    "onJobFailureReasons": [
        {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
    ],
    "onJobFailureMessagePatterns": [str],
    "targetReplicatedJobs": [str],
}
REPLICATED_JOB = {
    "name*": NAME,
    "groupName": str,
    "template*": {"metadata": OTHER, "spec*": OTHER},
    "replicas": WHOLE,
    "dependsOn": [{"name*": NAME, "status*": {"Ready", "Complete"}}],
}
JOB_SET = {
    "replicatedJobs": [REPLICATED_JOB],
    "network": {"enableDNSHostnames": bool, "subdomain": NAME, "publishNotReadyAddresses": bool},
    "successPolicy": {"operator*": {"All", "Any"}, "targetReplicatedJobs": [str]},
    "failurePolicy": {
        "maxRestarts": WHOLE,
        "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
        "rules": [FAILURE_RULE],
    },
    "startupPolicy": {"startupPolicyOrder*": {"AnyOrder", "InOrder"}},
    "suspend": bool,
    "coordinator": {"replicatedJob*": NAME, "jobIndex": WHOLE, "podIndex": WHOLE},
    "managedBy": str,
    "ttlSecondsAfterFinished": WHOLE,
    "volumeClaimPolicies": OTHER,
}
SANDBOX_TEMPLATE = {
    "podTemplate*": {"metadata": {"labels": OTHER, "annotations": OTHER}, "spec*": OTHER},
    "volumeClaimTemplates": OTHER,
    "service": bool,
    "networkPolicy": {"ingress": OTHER, "egress": OTHER},
    "networkPolicyManagement": {"Managed", "Unmanaged"},
    "envVarsInjectionPolicy": {"Allowed", "Overrides", "Disallowed"},
    "volumeClaimTemplatesPolicy": {"Allowed", "Overrides", "Disallowed"},
    "generatedSecrets": OTHER,
}
SANDBOX_WARM_POOL = {
    "replicas": WHOLE,
    "sandboxTemplateRef*": {"name*": NAME},
    "updateStrategy": {"type": {"Recreate", "OnReplenish"}},
}
SANDBOX_CLAIM = {
    "warmPoolRef*": {"name*": NAME},
    "lifecycle": {
        "shutdownTime": TIME,
        "ttlSecondsAfterFinished": WHOLE,
        "shutdownPolicy": {"Delete", "DeleteForeground", "Retain"},
    },
    "additionalPodMetadata": {"labels": OTHER, "annotations": OTHER},
    "safeToEvict": {"on-completion", "true", "false"},
    "env": [{"name*": str, "value*": str, "containerName": str}],
}
KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("extensions.agents.x-k8s.io/v1beta1", "SandboxTemplate"): SANDBOX_TEMPLATE,
    ("extensions.agents.x-k8s.io/v1beta1", "SandboxWarmPool"): SANDBOX_WARM_POOL,
    ("extensions.agents.x-k8s.io/v1beta1", "SandboxClaim"): SANDBOX_CLAIM,
}


def faults(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource of these kinds, and where."""
    kind = resource.get("apiVersion"), resource.get("kind")
    if kind not in KINDS:
        return [f"no kind {kind}"]
    metadata = {"name*": NAME, "namespace": NAME, "labels": OTHER, "annotations": OTHER}
    whole = {"apiVersion*": str, "kind*": str, "metadata*": metadata, "spec*": KINDS[kind]}
    return list(_faults(str(kind[1]), resource, whole))


def _faults(where: str, value: Any, wanted: Any) -> Iterator[str]:
    if wanted is OTHER:
        return
    if isinstance(wanted, dict):
        if not isinstance(value, dict):
            yield f"{where}: an object is wanted, got {value!r}"
            return
        known = {name.removesuffix("*"): form for name, form in wanted.items()}
        yield from (f"{where}.{name}: there is no such field" for name in value if name not in known)
        yield from (f"{where}.{name[:-1]} is missing" for name in wanted if name.endswith("*") and name[:-1] not in value)
        for name in value.keys() & known.keys():
            yield from _faults(f"{where}.{name}", value[name], known[name])
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{where}: a list is wanted, got {value!r}"
            return
        for number, one in enumerate(value):
            yield from _faults(f"{where}[{number}]", one, wanted[0])
    elif not _fits(value, wanted):
        yield f"{where}: {wanted!r} is wanted, got {value!r}"


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, set):
        return isinstance(value, str) and value in wanted
    if isinstance(wanted, re.Pattern):
        return isinstance(value, str) and bool(wanted.fullmatch(value))
    if wanted is WHOLE:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, wanted)
