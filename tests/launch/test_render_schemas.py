"""Rendered manifests against the models that Kubeflow generates from the clusters' own schemas.

JobSet has one of its own. PyTorchJob and MPIJob have none without a client of the cluster; what is
most of them, the pods, is the core's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from crossdock.launch import render
from tests.launch.test_render import job_of

models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="no kubeflow-trainer-api: pip install 'crossdock[test]'"
)

CONFIGS = ("two-node-16gpu", "laptop")  # with GPUs and without


def rendered(config: str, kind: render.KubernetesKind) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(render.kubernetes(job_of(config), kind, "c:1"))
    return manifest


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = next(value for key, value in manifest["spec"].items() if key.endswith("Specs"))
    return [part["template"] for part in replicas.values()]


def check(model: type, document: dict[str, Any]) -> None:
    """All of it is of the right type, and none of it is unknown to the model."""
    assert model.from_dict(copy.deepcopy(document)).to_dict() == document


@pytest.mark.parametrize("config", CONFIGS)
def test_jobset(config):
    check(models.JobsetV1alpha2JobSet, rendered(config, "jobset"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["pytorchjob", "mpijob"])
def test_pods_of_other_jobs(config, kind):
    for pod in pods_of(rendered(config, kind)):
        check(models.IoK8sApiCoreV1PodTemplateSpec, pod)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(replicas=2),
        lambda job: job["spec"]["template"]["spec"]["containers"][0].update(commands=["a"]),
        lambda job: job["spec"]["template"]["spec"]["volumes"][0].pop("name"),
        lambda job: job["spec"].update(parallelism="2"),
    ],
    ids=["unknown", "misspelt", "missing", "type"],
)
def test_mistakes_are_found(spoil: Callable[[dict[str, Any]], None]):
    manifest = rendered("two-node-16gpu", "jobset")
    spoil(manifest["spec"]["replicatedJobs"][0]["template"])
    with pytest.raises((AssertionError, ValueError)):
        check(models.JobsetV1alpha2JobSet, manifest)
