"""The chart, linted, rendered and refused by the real Helm; what it renders, against the real schemas."""

from __future__ import annotations

import base64
import copy
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml

from controlplane.runtime import local
from controlplane.runtime.front_door import environment as front_door
from controlplane.settings import Settings
from testkit.deploy.network_policies import EVERY_PORT, Pod, pod, reachable
from testkit.redis_server import free_port, redis_binary
from workers.addresses import Ports

Helm = Callable[..., subprocess.CompletedProcess[str]]
Object = dict[str, Any]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "helm" / "ostinato"
RELEASE = "demo"
NAME = "demo-ostinato"
NAMESPACE = "llm"

GPU_GROUP = {
    "name": "h200",
    "replicas": 1,
    "minReplicas": 0,
    "maxReplicas": 4,
    "gpus": 8,
    "shmSize": "64Gi",
    "resources": {"requests": {"cpu": "64", "memory": "512Gi"}, "limits": {"memory": "512Gi"}},
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "runtimeClassName": "nvidia",
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
}
CPU_GROUP = yaml.safe_load((CHART / "values.yaml").read_text())["workerGroups"][0]
EXTERNAL: Object = {
    "redis": {"enabled": False},
    "store": {"existingSecret": "state", "key": "url"},
    "gcsFaultTolerance": {"redisAddress": "redis.data:6379", "existingSecret": "state", "key": "password"},
    "apiKey": {"existingSecret": "keys", "key": "token"},
    "tenants": {"existingSecret": "customers", "key": "file.json"},
    "modelStore": {"enabled": True, "existingClaim": "shared-models"},
    "home": {"existingClaim": "shared-home"},
    "artifacts": {"existingClaim": "shared-deltas"},
}
CONTROLLER = [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]
INGRESS: Object = {
    "networkPolicy": {"gatewayFrom": CONTROLLER},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"},
        "hosts": [{"host": "llm.example.com", "paths": [{"path": "/", "pathType": "Prefix"}]}],
        "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
    },
}
EVERYTHING: Object = {
    **INGRESS,
    "commonLabels": {"team": "serving"},
    "commonAnnotations": {"owner": "serving"},
    "podAnnotations": {"rollout": "7"},
    "imagePullSecrets": [{"name": "pull"}],
    "ray": {"version": "2.60.0", "authMode": "token", "existingSecret": "ray-token"},
    "serve": {"gatewayReplicas": 4, "throughputOptimized": True},
    "settings": {
        "engine": "vllm",
        "engineDtype": "bfloat16",
        "maxModelLen": 32768,
        "concurrency": 64,
        "maxVariants": 8,
        "variantHostBytes": 64 << 30,
        "maxLoraRank": 64,
        "profileSeconds": 1200.5,
        "profileBytes": 32 << 30,
        "maxBodyBytes": 16777216,
        "tenantFolders": False,
        "startLimitS": 3600.5,
        "requestTimeoutS": 300.5,
        "auditLog": "/scratch/audit.jsonl",
    },
    "apiKey": {"value": "s3cret: with 'quotes'"},
    "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "allowedRoots": ["/scratch/models"],
    "modelStore": {"enabled": True, "storageClassName": "shared", "size": "1Ti"},
    "home": {"mountPath": "/var/lib/ostinato", "sizeLimit": "100Gi"},
    "workerGroups": [CPU_GROUP, GPU_GROUP],
    "autoscaling": {"enabled": True},
    "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
    "serviceAccount": {"annotations": {"example.com/role": "models"}},
    "networkPolicy": {
        "enabled": True,
        "gatewayFrom": CONTROLLER,
        "dashboardFrom": CONTROLLER,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "restrictEgress": True,
        "egress": [{"ports": [{"protocol": "TCP", "port": 443}]}],
    },
    "metrics": {
        "port": 9090,
        "ports": {"first": 9700, "last": 9731},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "grafana": {"host": "http://grafana:3000", "prometheusHost": "http://prometheus:9090"},
    },
}
VALUES: dict[str, Object] = {
    "default": {},
    "gpu": {"workerGroups": [CPU_GROUP, GPU_GROUP]},
    "redis": {"redis": {"enabled": True, "auth": {"existingSecret": "redis-auth", "key": "pw"}}},
    "ingress": INGRESS,
    "existing-secrets": EXTERNAL,
    "service-monitor": {"metrics": {"serviceMonitor": {"enabled": True}}},
    "no-scrape-config": {"metrics": {"podMonitor": {"enabled": True}, "scrapeConfig": {"enabled": False}}},
    "trial": {
        "apiKey": {"allowNone": True},
        "ray": {"authMode": "disabled", "allowNoToken": True},
        "networkPolicy": {"enabled": False},
    },
    "no-fault-tolerance": {
        "redis": {"enabled": False},
        "store": {"url": "redis://redis.data:6379/0"},
        "gcsFaultTolerance": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
        "networkPolicy": {"enabled": False},
    },
    "everything": EVERYTHING,
}

MONITORS = {
    "PodMonitor": ("podMetricsEndpoints", {"selector", "podTargetLabels"}),
    "ServiceMonitor": ("endpoints", {"selector", "podTargetLabels"}),
}


# Fields without a default, for values that do not set them.
KEY: Object = {"apiKey": {"existingSecret": "ostinato-key"}}


class Chart:
    """The chart's renderings, kept for the module: a rendering takes helm a good part of a second."""

    def __init__(self, helm: Helm) -> None:
        self.helm = helm
        self._kept: dict[str, list[Object]] = {}

    def run(self, values: Object, *options: str) -> subprocess.CompletedProcess[str]:
        arguments = ["template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", "-", *options]
        return self.helm(*arguments, stdin=json.dumps({**KEY, **values}))

    def render(self, values: Object, *options: str) -> list[Object]:
        key = json.dumps([values, options])
        if key not in self._kept:
            done = self.run(values, *options)
            assert done.returncode == 0, done.stderr
            self._kept[key] = [each for each in yaml.safe_load_all(done.stdout) if each]
        return copy.deepcopy(self._kept[key])

    def one(self, values: Object, kind: str, name: str = "") -> Object:
        found = [
            each
            for each in self.render(values)
            if each["kind"] == kind and name in ("", each["metadata"]["name"])
        ]
        assert len(found) == 1, f"{len(found)} objects of kind {kind}"
        return found[0]

    def service(self, values: Object) -> Object:
        return self.one(values, "RayService")


@pytest.fixture(scope="module")
def chart(helm: Helm) -> Chart:
    return Chart(helm)


@pytest.fixture(params=VALUES)
def values(request: pytest.FixtureRequest) -> Object:
    return VALUES[request.param]


def pod_templates(service: Object) -> Iterator[Object]:
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]


def environment(template: Object) -> dict[str, Object]:
    return {each["name"]: each for each in template["spec"]["containers"][0]["env"]}


@cache
def rayservice_schema() -> Object:
    """KubeRay's schema, closed: the API server drops unknown fields silently, a test must not."""
    schema: Object = json.loads((HERE / "crds" / "rayservice-v1.schema.json").read_text())
    _close(schema)
    return schema


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _close(each)
    elif isinstance(schema, dict):
        if (
            isinstance(schema.get("properties"), dict)
            and "additionalProperties" not in schema
            and not schema.get("x-kubernetes-preserve-unknown-fields")
        ):
            schema["additionalProperties"] = False
        for each in schema.values():
            _close(each)


def check(found: Object) -> None:
    """Validate one object against the schema of its kind."""
    if found["kind"] == "RayService":
        # The CRD leaves metadata open; everything else is closed.
        body = {**found, "metadata": {}}
        schema = rayservice_schema()
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft202012Validator(schema).validate(body)
    elif found["kind"] in MONITORS:
        endpoints, others = MONITORS[found["kind"]]
        assert found["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(found["spec"]) == {endpoints, *others}
        for endpoint in found["spec"][endpoints]:
            assert set(endpoint) == {"port", "interval"}
    elif found["kind"] == "ScrapeConfig":
        assert found["apiVersion"] == "monitoring.coreos.com/v1alpha1"
        assert set(found["spec"]) == {"scrapeInterval", "httpSDConfigs"}
        for each in found["spec"]["httpSDConfigs"]:
            assert set(each) - {"authorization"} == {"url", "refreshInterval"}
    else:
        kubernetes_validate = _import_kubernetes_validate()
        newest = kubernetes_validate.latest_version()
        kubernetes_validate.validate(found, newest, strict=True)


def _import_kubernetes_validate() -> Any:
    try:
        import kubernetes_validate
    except ImportError:
        pytest.fail(
            "kubernetes-validate is missing; install it: pip install kubernetes-validate", pytrace=False
        )
    return kubernetes_validate


def test_the_chart_passes_lint(helm: Helm, values: Object, tmp_path: Path) -> None:
    given = tmp_path / "values.json"
    given.write_text(json.dumps({**KEY, **values}))
    done = helm("lint", "--strict", CHART, "--values", given)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_object_fits_its_schema(chart: Chart, values: Object) -> None:
    for found in chart.render(values):
        check(found)
        assert found["metadata"]["namespace"] == "llm"
        assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE


def test_the_check_sees_a_misspelt_field(chart: Chart) -> None:
    for kind in ("RayService", "StatefulSet"):
        found = chart.one({}, kind)
        template = next(pod_templates(found)) if kind == "RayService" else found["spec"]["template"]
        template["spec"]["containers"][0]["imagePullPolicies"] = "Always"
        with pytest.raises(jsonschema.ValidationError, match="imagePullPolicies"):
            check(found)


def test_each_set_of_values_renders_its_objects(chart: Chart) -> None:
    def kinds(name: str) -> list[str]:
        return sorted(each["kind"] for each in chart.render(VALUES[name]))

    open_ = ["PodDisruptionBudget", "RayService", "Secret", "Service", "ServiceAccount", "StatefulSet"]
    plain = sorted([*open_, "NetworkPolicy", "NetworkPolicy"])
    assert kinds("default") == plain
    assert kinds("trial") == open_
    assert kinds("redis") == [kind for kind in plain if kind != "Secret"]
    assert kinds("ingress") == sorted([*plain, "Ingress"])
    theirs = ["NetworkPolicy", "PodDisruptionBudget", "RayService", "ServiceAccount"]
    assert kinds("existing-secrets") == theirs
    assert kinds("service-monitor") == sorted([*plain, "ScrapeConfig", "Service", "ServiceMonitor"])
    assert kinds("no-scrape-config") == sorted([*plain, "PodMonitor"])
    assert kinds("no-fault-tolerance") == ["RayService"]
    more = [
        "Ingress",
        "PersistentVolumeClaim",
        "PodMonitor",
        "ScrapeConfig",
    ]
    assert kinds("everything") == sorted([*plain, *more, "Secret"])


def test_the_serve_configuration_is_one_ray_accepts(chart: Chart, values: Object) -> None:
    from ray.serve.schema import ServeDeploySchema

    service = chart.service(values)
    parsed = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    application = parsed.applications[0]
    assert (application.name, application.route_prefix) == ("ostinato", "/")
    assert application.import_path == "controlplane.runtime.app:build"
    assert parsed.http_options.port == 8000
    replicas = {each.name: each.num_replicas for each in application.deployments}
    assert replicas == {"Gateway": values.get("serve", {}).get("gatewayReplicas", 2), "Controller": 1}


@pytest.mark.parametrize(("asked", "limit"), [({}, None), ({"gatewaysPerNode": 1}, 1)])
def test_gateways_share_a_node_unless_they_may_not(
    chart: Chart, asked: dict[str, Any], limit: int | None
) -> None:
    from ray.serve.schema import ServeDeploySchema

    rendered = yaml.safe_load(chart.service({"serve": asked})["spec"]["serveConfigV2"])
    parsed = ServeDeploySchema.model_validate(rendered)
    limits = {each.name: each.max_replicas_per_node for each in parsed.applications[0].deployments}

    if limit is not None:
        assert limits["Gateway"] == limit
    else:
        assert limits["Gateway"] == limits["Controller"]  # as Serve has it


def test_the_serve_configuration_is_the_one_in_deploy(chart: Chart) -> None:
    rendered = yaml.safe_load(chart.service({})["spec"]["serveConfigV2"])
    assert rendered == yaml.safe_load((ROOT / "deploy" / "serve-config.yaml").read_text())


def test_every_variable_is_a_setting(chart: Chart, values: Object) -> None:
    from controlplane.settings import Settings

    known = {f"OSTINATO_{name.upper()}" for name in Settings.model_fields}
    for template in pod_templates(chart.service(values)):
        ours = {name for name in environment(template) if name.startswith("OSTINATO_")}
        assert ours <= known, ours - known


def test_settings_read_what_the_chart_writes(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    from controlplane.settings import Settings

    for name, each in environment(next(pod_templates(chart.service(EVERYTHING)))).items():
        if name.startswith("OSTINATO_") and "value" in each:
            monkeypatch.setenv(name, each["value"])
    settings = Settings()
    given = EVERYTHING["settings"]
    for name in given:
        field = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        assert getattr(settings, field) == given[name], field
    assert settings.http_host == "0.0.0.0"
    assert settings.worker_host == "0.0.0.0"  # gateways may be on other nodes
    assert settings.metrics_host == "0.0.0.0"  # Prometheus is
    assert settings.allowed_roots == "/models:/scratch/models"


def test_unset_settings_are_listed_with_their_defaults() -> None:
    """Those that values.yaml has in comments: `# maxModelLen: 2048  # why`."""
    lines = (
        (CHART / "values.yaml").read_text().partition("\nsettings:\n")[2].partition("\n\n")[0].splitlines()
    )
    found = [re.fullmatch(r"  # ([a-z]\w+): ([^#]+?)(?: +#.*)?", line) for line in lines]
    told = {match[1]: yaml.safe_load(match[2]) for match in found if match}
    assert len(told) > 10
    settings = Settings(_env_file=None)
    for name, value in told.items():
        assert getattr(settings, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()) == value, name


def test_pods_have_the_front_door(chart: Chart) -> None:
    """A local cluster and the images have it; a gateway refuses to start without it."""
    for template in pod_templates(chart.service({})):
        told = {name: each.get("value", "") for name, each in environment(template).items()}
        assert front_door.problem(told) == ""
        assert front_door.EVERYWHERE.items() <= told.items()


def test_the_head_remembers_few_calls(chart: Chart) -> None:
    """`ostinato up` sets it: its GCS would otherwise grow by 3 KB with each of 100,000."""
    for template in pod_templates(chart.service({})):
        value = environment(template)["RAY_task_events_max_num_task_in_gcs"]["value"]
        assert value == local.ray_switches()["RAY_task_events_max_num_task_in_gcs"]


def test_all_settings_of_the_schema_are_tried() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["settings"]["properties"]) == set(EVERYTHING["settings"])


def test_pods_are_restricted(chart: Chart, values: Object) -> None:
    templates = list(pod_templates(chart.service(values)))
    templates += [each["spec"]["template"] for each in chart.render(values) if each["kind"] == "StatefulSet"]
    for template in templates:
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]


def test_only_the_autoscaled_head_has_a_token(chart: Chart) -> None:
    def tokens(values: Object) -> list[bool]:
        return [each["spec"]["automountServiceAccountToken"] for each in pod_templates(chart.service(values))]

    assert tokens({}) == [False, False]
    assert tokens(EVERYTHING) == [True, False, False]


def test_the_operator_accepts_the_pods(chart: Chart, values: Object) -> None:
    """Objects that KubeRay refuses in its own code, not in its schema."""
    service = chart.service(values)
    assert len(service["metadata"]["name"]) <= 47
    for template in pod_templates(service):
        # Its head Service selects by this label's default value.
        assert "app.kubernetes.io/name" not in template["metadata"]["labels"]
        assert not {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"} & set(environment(template))
        ports = {each["name"]: each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
        assert ports["serve"] == 8000
    options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
    # Two clusters of one RayService must not share a namespace in Redis.
    assert "externalStorageNamespace" not in options


def test_pods_have_probes(chart: Chart) -> None:
    head, worker = (each["spec"]["containers"][0] for each in pod_templates(chart.service({})))
    agent = {"path": "/api/healthz", "port": 52365}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert head[probe]["httpGet"] == agent
    assert worker["livenessProbe"]["httpGet"] == agent
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "serve"}


def test_a_gpu_group_is_rendered(chart: Chart) -> None:
    head, cpu, gpu = pod_templates(chart.service(VALUES["gpu"]))
    container = gpu["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": 8}
    assert "nvidia.com/gpu" not in cpu["spec"]["containers"][0]["resources"]["limits"]
    # One Ray cluster, one Python: the head and the CPU workers use the same image.
    images = {each["spec"]["containers"][0]["image"] for each in (head, cpu, gpu)}
    assert images == {"ostinato:0.2.0-gpu"}
    assert gpu["spec"]["tolerations"] == GPU_GROUP["tolerations"]
    assert gpu["spec"]["nodeSelector"] == GPU_GROUP["nodeSelector"]
    assert gpu["spec"]["runtimeClassName"] == "nvidia"
    shm = next(each for each in gpu["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_store_is_the_charts_own_redis(chart: Chart) -> None:
    variables = environment(next(pod_templates(chart.service({}))))
    assert variables["OSTINATO_STORE_URL"]["value"] == f"redis://:$(STORE_PASSWORD)@{NAME}-redis:6379/0"
    # $(STORE_PASSWORD) is replaced only if it comes first.
    assert list(variables).index("STORE_PASSWORD") < list(variables).index("OSTINATO_STORE_URL")
    secret = variables["STORE_PASSWORD"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": f"{NAME}-redis", "key": "redis-password"}
    assert list(chart.one({}, "Secret")["data"]) == ["redis-password"]
    server = chart.one({}, "StatefulSet")
    service = chart.one({}, "Service")
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert server["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert server["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "8Gi"


def test_a_secret_of_the_user_is_used(chart: Chart) -> None:
    service = chart.service(EXTERNAL)
    variables = environment(next(pod_templates(service)))
    assert variables["OSTINATO_STORE_URL"]["valueFrom"]["secretKeyRef"] == {"name": "state", "key": "url"}
    assert variables["OSTINATO_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "token"}
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.data:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "state", "key": "password"}}},
    }
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in next(pod_templates(service))["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert claims == {"models": "shared-models", "home": "shared-home", "artifacts": "shared-deltas"}


def test_the_tenants_file_is_at_the_path_that_every_container_reads(chart: Chart) -> None:
    for template in pod_templates(chart.service(EXTERNAL)):
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "tenants"]
        (mount,) = [
            each for each in template["spec"]["containers"][0]["volumeMounts"] if each["name"] == "tenants"
        ]
        assert volume["secret"]["secretName"] == "customers"
        named = environment(template)["OSTINATO_TENANTS"]["value"]
        assert named == f"{mount['mountPath']}/file.json"


def test_deltas_are_made_where_every_container_finds_them(chart: Chart) -> None:
    for template in pod_templates(chart.service(EXTERNAL)):
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        (mount,) = [each for each in mounts if each["name"] == "artifacts"]
        assert environment(template)["OSTINATO_ARTIFACTS"]["value"] == mount["mountPath"]
    for template in pod_templates(chart.service({})):
        assert "OSTINATO_ARTIFACTS" not in environment(template), "they are in home"


def test_secrets_are_only_in_secrets(chart: Chart) -> None:
    key = EVERYTHING["apiKey"]["value"]
    for found in chart.render(EVERYTHING):
        if found["kind"] == "Secret":
            continue
        assert key not in json.dumps(found)
    assert chart.one(EVERYTHING, "Secret", f"{NAME}-api-key")["stringData"] == {"api-key": key}


def test_the_ingress_leads_to_the_operators_service(chart: Chart) -> None:
    path = chart.one(INGRESS, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]
    assert path["backend"]["service"] == {"name": f"{NAME}-serve-svc", "port": {"number": 8000}}
    assert chart.service(EVERYTHING)["spec"]["serveService"]["metadata"]["name"] == f"{NAME}-serve-svc"


def test_selectors_find_the_pods(chart: Chart) -> None:
    head, worker, _ = (each["metadata"]["labels"] for each in pod_templates(chart.service(EVERYTHING)))
    budget = chart.one(EVERYTHING, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert budget.items() <= worker.items()
    assert not budget.items() <= head.items()
    redis = chart.one(EVERYTHING, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for kind, name in (("NetworkPolicy", NAME), ("PodMonitor", NAME)):
        spec = chart.one(EVERYTHING, kind, name)["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        (expression,) = selector["matchExpressions"]
        for labels, wanted in ((head, True), (worker, True), (redis, False)):
            found = labels.get(expression["key"]) in expression["values"]
            assert (selector["matchLabels"].items() <= labels.items() and found) is wanted


@pytest.mark.parametrize("replicas", [1, 9])
def test_more_gateways_need_no_new_cluster(chart: Chart, replicas: int) -> None:
    plain, changed = chart.service({}), chart.service({"serve": {"gatewayReplicas": replicas}})
    assert changed["spec"]["serveConfigV2"] != plain["spec"]["serveConfigV2"]
    assert changed["spec"]["rayClusterConfig"] == plain["spec"]["rayClusterConfig"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "demo-ostinato"),
        ({"nameOverride": "llm"}, "demo-llm"),
        ({"nameOverride": "demo"}, "demo"),
        ({"fullnameOverride": "serving"}, "serving"),
        ({"nameOverride": "a" * 42}, "demo-" + "a" * 42),
    ],
)
def test_names(chart: Chart, given: Object, name: str) -> None:
    assert chart.service(given)["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"gatewayReplicas": 3}, "gatewayReplicas"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"settings": {"engine": "vllm", "maxLoraRanks": 8}}, "maxLoraRanks"),
        ({"workerGroups": [{**CPU_GROUP, "gpu": 1}]}, "gpu"),
        ({"head": {"resources": {"request": {}}}}, "request"),
        ({"serve": {"gatewayReplicas": "two"}}, "gatewayReplicas"),
        ({"serve": {"gatewayReplicas": 0}}, "gatewayReplicas"),
        ({"workerGroups": [{**CPU_GROUP, "replicas": 1.5}]}, "replicas"),
        ({"workerGroups": []}, "workerGroups"),
        ({"ingress": {"enabled": "yes"}}, "enabled"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"settings": {"engine": "llama"}}, "engine"),
        ({"upgradeStrategy": {"type": "Recreate"}}, "upgradeStrategy"),
        ({"service": {"type": "External"}}, "service"),
        ({"podDisruptionBudget": {"minAvailable": "50%"}}, "minAvailable"),
        ({"metrics": {"port": 8000}}, "port"),
        ({"store": {"url": "redis://:password@host:6379/0"}}, "url"),
        ({"extraEnv": [{"name": "REDIS_PASSWORD", "value": "x"}]}, "extraEnv"),
        ({"fullnameOverride": "1st"}, "fullnameOverride"),
        # Refused by the templates: no schema can say these.
        ({"redis": {"enabled": False}}, "store.existingSecret"),
        ({"store": {"url": "redis://elsewhere:6379/0"}}, "exactly one state store"),
        ({"redis": {"enabled": False}, "store": {"url": "redis://x:1/0"}}, "gcsFaultTolerance.redisAddress"),
        ({"apiKey": {"value": "0123456789abcdef", "existingSecret": "b"}}, "apiKey.existingSecret"),
        ({"apiKey": {}}, "Set apiKey.existingSecret"),
        ({"apiKey": {"value": "short"}}, "apiKey.value is shorter than 16 characters"),
        ({"ray": {"authMode": "disabled"}}, "Set ray.authMode=token"),
        ({"ingress": {"enabled": True}}, "networkPolicy.gatewayFrom is empty"),
        ({"service": {"type": "LoadBalancer"}}, "networkPolicy.gatewayFrom is empty"),
        ({"networkPolicy": {"clientLabel": ""}}, "clientLabel"),
        ({"tenants": {"existingSecret": "customers"}, "apiKey": {}}, "apiKey.value"),
        ({"tenants": {"existingSecret": "customers", "key": "../tenants"}}, "key"),
        ({"settings": {"engine": "vllm", "maxInFlightFactor": 0.5}}, "maxInFlightFactor"),
        ({"workerGroups": [CPU_GROUP, CPU_GROUP]}, "two groups have the name cpu"),
        ({"workerGroups": [{**CPU_GROUP, "replicas": 99}]}, "maxReplicas"),
        ({"metrics": {n: {"enabled": True} for n in ("podMonitor", "serviceMonitor")}}, "serviceMonitor"),
        ({"metrics": {"ports": {"first": 9500, "last": 9499}}}, "expected first <= last, got first 9500"),
        ({"metrics": {"ports": {"first": 7990, "last": 8010}}}, "metrics.ports contains 8000"),
        ({"metrics": {"port": 9464}}, "metrics.ports contains 9464"),
        ({"networkPolicy": {"operatorFrom": []}}, "operatorFrom"),
        ({**EXTERNAL, "networkPolicy": {"restrictEgress": True}}, "networkPolicy.storeTo"),
        (
            {"networkPolicy": {"restrictEgress": True}, "gcsFaultTolerance": {"redisAddress": "r.data:6379"}},
            "networkPolicy.storeTo",
        ),
        (
            {"networkPolicy": {"restrictEgress": True}, "autoscaling": {"enabled": True}},
            "networkPolicy.egress",
        ),
        ({"apiKey": {"value": "0123456789abcdef\n"}}, "apiKey.value has a line break"),
        # An API server would refuse these.
        ({"store": {"key": "a b"}}, "key"),
        ({"commonLabels": {"team": "a team"}}, "team"),
        ({"commonLabels": {"app.kubernetes.io/instance": "other"}}, "app.kubernetes.io/instance"),
        ({"serviceAccount": {"name": "Models_1"}}, "name"),
        (
            {"ingress": {"hosts": [{"host": "https://x", "paths": [{"path": "/", "pathType": "Prefix"}]}]}},
            "host",
        ),
        ({"workerGroups": [{**CPU_GROUP, "gpuResource": "gpu"}]}, "gpuResource"),
        ({"modelStore": {"existingClaim": "My Claim"}}, "existingClaim"),
    ],
    ids=lambda case: json.dumps(case)[:60] if isinstance(case, dict) else "",
)
def test_wrong_values_are_refused_by_name(chart: Chart, given: Object, named: str) -> None:
    done = chart.run(given)
    assert done.returncode != 0, "helm accepted it"
    assert named in done.stderr


# --- names -----------------------------------------------------------------------------------------

# Kubernetes' rules for names: of Services (RFC 1035), and of everything else here (RFC 1123).
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LONGEST = 53  # of a release, to Helm

RELEASES = [
    "a",
    "demo",
    "ostinato",
    "my-ostinato",
    "x1",
    "a-b-c",
    "a" * LONGEST,
    "a-" * 26 + "a",
    "a" + "-b" * 23,
]
ODD_RELEASES = ["1demo", "1", "a.b", "0.1", "9" * LONGEST, "a." * 26 + "a", "1ostinato", "ostinato.prod"]


def rendered(chart: Chart, release: str, given: Object) -> subprocess.CompletedProcess[str]:
    arguments = ["template", release, CHART, "--namespace", NAMESPACE, "--values", "-"]
    return chart.helm(*arguments, stdin=json.dumps({**KEY, **given}))


def service_names(service: Object) -> list[str]:
    """Names of the Services that the operator makes of a RayService, its Pods and its hosts."""
    name = service["metadata"]["name"]
    return [f"{name}-serve-svc", f"{name}-head-svc"]


@pytest.mark.parametrize("release", [*RELEASES, *ODD_RELEASES])
def test_names_of_releases_are_taken_or_refused(chart: Chart, release: str) -> None:
    done = rendered(chart, release, {})
    assert (done.returncode == 0) == (release in RELEASES)
    if done.returncode:
        assert f'"{release}' in done.stderr
        assert "fullnameOverride" in done.stderr
        done = rendered(chart, release, {"fullnameOverride": "serving"})
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    for each in objects:
        wanted = SERVICE_NAME if each["kind"] == "Service" else OBJECT_NAME
        assert wanted.fullmatch(each["metadata"]["name"]), each["metadata"]["name"]
    (service,) = (each for each in objects if each["kind"] == "RayService")
    assert len(service["metadata"]["name"]) <= 47
    for name in service_names(service):
        assert SERVICE_NAME.fullmatch(name), name


def test_long_names_stay_apart(chart: Chart) -> None:
    """Two releases in one namespace whose names differ in what is cut off."""
    pairs = [("a" * 50 + "one", "a" * 50 + "two"), ("b" * 40 + "-blue", "b" * 40 + "-green")]
    for releases in pairs:
        names = []
        for release in releases:
            objects = [each for each in yaml.safe_load_all(rendered(chart, release, {}).stdout) if each]
            names.append({(each["kind"], each["metadata"]["name"]) for each in objects})
        assert not names[0] & names[1]


# --- values that are null ------------------------------------------------------------------------------


def _paths(values: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from _paths(value, (*path, key))


def _without(values: Object, *paths: tuple[str, ...]) -> Object:
    """Helm's way with null: the key is gone before the schema sees the values."""
    left = copy.deepcopy(values)
    for path in paths:
        held: Any = left
        for key in path[:-1]:
            held = held[key]
        del held[path[-1]]
    return left


def _nulls(paths: list[tuple[str, ...]]) -> Object:
    given: Object = {}
    for path in paths:
        held = given
        for key in path[:-1]:
            held = held.setdefault(key, {})
        held[path[-1]] = None
    return given


def _comparable(objects: list[Object]) -> list[Object]:
    """The objects without values that are drawn again at each rendering."""
    return [each for each in objects if each["kind"] != "Secret"]


# Values whose absence says something else than their default, each a field that Kubernetes lets be absent.
MAY_BE_ABSENT = {
    ("redis", "maxMemory"),  # charts before had none: the template has the default
    ("head", "rayStartParams", "num-cpus"),
    ("podSecurityContext", "runAsUser"),  # some platforms choose these four
    ("podSecurityContext", "runAsGroup"),
    ("podSecurityContext", "fsGroup"),
    ("podSecurityContext", "fsGroupChangePolicy"),
    ("securityContext", "readOnlyRootFilesystem"),
    ("networkPolicy", "metricsFrom", "podSelector"),
}


def test_null_is_empty_or_refused_by_name(chart: Chart) -> None:
    """Each value of values.yaml set to null: nothing opens, and an API server takes what is rendered."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    empty, absent, refused = [], [], []
    for path, value in _paths(defaults):
        problems = [error.message for error in validator.iter_errors(_without(defaults, path))]
        if problems:
            assert any(f"'{path[-1]}' is a required property" in each for each in problems), path
            refused.append(path)
        elif value in ("", [], {}):
            empty.append(path)
        else:
            absent.append(path)
    resources = {path for path in absent if "resources" in path}
    assert set(absent) - resources <= MAY_BE_ABSENT
    # All that may be empty, at once: the same objects as with the defaults.
    nothing = _nulls(empty)
    nothing["apiKey"].update(KEY["apiKey"])
    assert _comparable(chart.render(nothing)) == _comparable(chart.render({}))
    for path in absent:
        for found in chart.render(_nulls([path])):
            check(found)
    # Helm itself refuses what the schema does, by the value's name.
    for path in (("networkPolicy", "operatorFrom"), ("networkPolicy",), ("metrics", "ports", "last")):
        assert path in refused
        done = chart.run(_nulls([path]))
        assert done.returncode != 0
        assert path[-1] in done.stderr
        assert "nil pointer" not in done.stderr


# --- metrics -------------------------------------------------------------------------------------


def test_ports_of_metrics_are_those_of_the_setting(chart: Chart) -> None:
    """Said once by the setting's default and once by the chart's values: Pods and policy follow these."""
    from controlplane.settings import Settings

    default = Settings.model_fields["metrics_ports"].default
    for template in pod_templates(chart.service({})):
        assert environment(template)["OSTINATO_METRICS_PORTS"]["value"] == default
    ports = Ports.parse(default)
    assert set(range(ports.first, ports.last + 1)) | {8080} == METRICS


def test_a_scraper_finds_the_list_of_processes(chart: Chart) -> None:
    for template in pod_templates(chart.service(EVERYTHING)):
        assert environment(template)["OSTINATO_METRICS_PORTS"]["value"] == "9700-9731"
    config = chart.one(EVERYTHING, "ScrapeConfig")
    (discovery,) = config["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://{NAME}-serve-svc.llm.svc:8000/metrics/targets"
    assert config["metadata"]["labels"]["release"] == "prometheus"
    key = environment(next(pod_templates(chart.service(EVERYTHING))))["OSTINATO_API_KEY"]
    assert discovery["authorization"] == {
        "type": "Bearer",
        "credentials": key["valueFrom"]["secretKeyRef"],
    }


# --- who reaches what ------------------------------------------------------------------------------

API, DASHBOARD = {8000}, {8265}
METRICS = {8080, *range(9464, 9528)}
CLIENT = {"ostinato-client": "true"}
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def pods_of(chart: Chart, values: Object, release: str = RELEASE) -> dict[str, Pod]:
    """The Pods that a release makes: head, worker, redis."""
    templates = [*pod_templates(chart.service(values))]
    if any(each["kind"] == "StatefulSet" for each in chart.render(values)):
        templates.append(chart.one(values, "StatefulSet")["spec"]["template"])
    every = [each["metadata"]["labels"] for each in templates]
    return {
        labels["app.kubernetes.io/component"]: pod(
            NAMESPACE, {**labels, "app.kubernetes.io/instance": release}
        )
        for labels in every
    }


def policies(chart: Chart, values: Object) -> list[Object]:
    return [each for each in chart.render(values) if each["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (pod(NAMESPACE, {}), set()),
        (pod("elsewhere", {}), set()),
        (pod(NAMESPACE, CLIENT), API),
        (pod(NAMESPACE, {"ostinato-client": "false"}), set()),
        (pod("elsewhere", CLIENT), set()),
        (pod("kuberay", OPERATOR), API | DASHBOARD),
        (pod("monitoring", PROMETHEUS), METRICS),
        (pod(NAMESPACE, PROMETHEUS), set()),
        (pod("monitoring", {}), set()),
    ],
    ids=lambda case: f"{case.namespace} {case.labels}" if isinstance(case, Pod) else "",
)
def test_pods_outside_the_release_reach_only_the_ports_for_them(
    chart: Chart, source: Pod, expected: set[int]
) -> None:
    """The ports do not include the GCS (6379), Ray's client and agents, nor workers' servers, wherever these
    listen."""
    ours = pods_of(chart, {})
    found = {name: reachable(policies(chart, {}), source, target) for name, target in ours.items()}
    assert found == {"head": expected, "worker": expected, "redis": set()}


def test_pods_of_the_release_reach_each_other_and_its_redis(chart: Chart) -> None:
    ours = pods_of(chart, {})
    rules = policies(chart, {})
    for source in (ours["head"], ours["worker"]):
        assert reachable(rules, source, ours["head"]) == EVERY_PORT  # Ray chooses them
        assert reachable(rules, source, ours["worker"]) == EVERY_PORT
        assert reachable(rules, source, ours["redis"]) == {6379}
    for target in ours.values():
        assert reachable(rules, ours["redis"], target) == set()
    for other in pods_of(chart, {}, release="other").values():
        assert {name: reachable(rules, other, target) for name, target in ours.items()} == {
            "head": set(),
            "worker": set(),
            "redis": set(),
        }


def test_named_peers_reach_the_ports_that_they_are_named_for(chart: Chart) -> None:
    ours, rules = pods_of(chart, EVERYTHING), policies(chart, EVERYTHING)
    controller = Pod("edge", {}, {"name": "ingress"})
    prometheus = Pod("watch", {}, {"name": "monitoring"})
    scraped = {9090, *range(9700, 9732)}
    for target in (ours["head"], ours["worker"]):
        assert reachable(rules, controller, target) == API | DASHBOARD
        assert reachable(rules, prometheus, target) == scraped | API  # it asks for the list of targets
        assert reachable(rules, pod("monitoring", PROMETHEUS), target) == set()
    assert reachable(rules, controller, ours["redis"]) == set()


@pytest.mark.parametrize("name", ["gatewayFrom", "dashboardFrom", "metricsFrom"])
def test_an_empty_list_of_sources_admits_no_client(chart: Chart, name: str) -> None:
    """Kubernetes takes a rule without peers for one that lets everybody in."""
    given: Object = {"networkPolicy": {name: []}}
    for target in pods_of(chart, given).values():
        assert reachable(policies(chart, given), pod("elsewhere", {}), target) == set()
        assert reachable(policies(chart, given), pod(NAMESPACE, {}), target) == set()


def test_pods_that_may_call_little_reach_a_redis_outside(chart: Chart) -> None:
    outside = [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    given = {**EXTERNAL, "networkPolicy": {"restrictEgress": True, "storeTo": outside, "storePorts": [6380]}}
    (policy,) = policies(chart, given)
    assert {"to": outside, "ports": [{"protocol": "TCP", "port": 6380}]} in policy["spec"]["egress"]


def test_every_pod_is_reachable_without_a_policy(chart: Chart) -> None:
    """Mistakes that the tests above would miss, if they asked for the wrong Pods."""
    given: Object = {"networkPolicy": {"enabled": False}}
    for target in pods_of(chart, given).values():
        assert reachable(policies(chart, given), pod("elsewhere", {}), target) == EVERY_PORT


# --- safe defaults ---------------------------------------------------------------------------------


def test_by_default_ray_asks_for_a_token_and_the_api_for_a_key(chart: Chart) -> None:
    service = chart.service({})
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    for template in pod_templates(service):
        assert environment(template)["OSTINATO_API_KEY"]["valueFrom"]["secretKeyRef"] == {
            "name": "ostinato-key",
            "key": "api-key",
        }
    named = chart.service(EVERYTHING)["spec"]["rayClusterConfig"]["authOptions"]
    assert named == {"mode": "token", "secretName": "ray-token"}


def test_an_upgrade_makes_no_second_cluster_by_itself(chart: Chart) -> None:
    assert chart.service({})["spec"]["upgradeStrategy"] == {"type": "None"}


def test_secrets_that_are_given_stand_in_secrets_alone(chart: Chart) -> None:
    given = {
        "apiKey": {"value": "a-key-of-the-api-0123"},
        "redis": {"auth": {"password": "aPasswordOfRedis01"}},
    }
    found = {
        secret: {each["kind"] for each in chart.render(given) if _holds(each, secret)}
        for secret in ("a-key-of-the-api-0123", "aPasswordOfRedis01")
    }
    assert set().union(*found.values()) == {"Secret"}


def _holds(found: Object, secret: str) -> bool:
    text = json.dumps(found)
    return secret in text or base64.b64encode(secret.encode()).decode() in text


def test_every_value_is_explained_and_typed() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for path, part in _parts(schema, "values"):
        assert part.get("description"), f"{path} has no description"
        if part.get("type") == "object" and "properties" in part:
            assert part["additionalProperties"] is False, f"{path} accepts unknown keys"
    for path, commented in _keys((CHART / "values.yaml").read_text().splitlines()):
        assert commented, f"values.yaml: {path} has no comment"


def _keys(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Each key of the first two levels, and whether a comment stands before it or opens what it holds."""
    parent, whole = "", False
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        key = re.match(r"^(  )?([A-Za-z]+):(.*)$", line)
        if key is None:
            continue
        commented = before.lstrip().startswith("#")
        if not key[1]:
            # A comment before an object of Kubernetes' own explains it as a whole.
            parent, whole = key[2], commented and not after.lstrip().startswith("#")
        opens = not key[3] and after.lstrip().startswith("#")
        yield f"{parent}.{key[2]}" if key[1] else parent, commented or opens or (bool(key[1]) and whole)


def _parts(schema: Object, path: str) -> Iterator[tuple[str, Object]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}.{name}", part
        yield from _parts(part, f"{path}.{name}")
        if isinstance(part.get("items"), dict):
            yield from _parts(part["items"], f"{path}.{name}[]")


def test_notes_name_the_service(helm: Helm) -> None:
    arguments = ["install", RELEASE, CHART, "--dry-run=client", "--namespace", NAMESPACE, "--values", "-"]
    done = helm(*arguments, stdin=json.dumps(KEY))
    assert done.returncode == 0, done.stderr
    assert f"service/{NAME}-serve-svc 8000:8000" in done.stdout
    assert 'label ostinato-client: "true"' in done.stdout
    trial = helm(*arguments, stdin=json.dumps(VALUES["trial"]))
    assert "No API key is set" in trial.stdout
    assert "Ray asks for no token" in trial.stdout


def test_redis_starts_with_the_charts_command(chart: Chart, tmp_path: Path) -> None:
    """The command line of the StatefulSet, run here with another folder and port."""
    container = chart.one({}, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    port = free_port()
    script = container["command"][2].replace("--dir /data", f"--dir {tmp_path} --port {port}")
    folder = str(Path(redis_binary()).parent)
    variables = {"REDIS_PASSWORD": "abc123", "PATH": f"{folder}:/usr/bin:/bin"}
    server = subprocess.Popen([*container["command"][:2], script], env=variables, stdout=subprocess.DEVNULL)
    try:
        probe = container["readinessProbe"]["exec"]["command"][2].replace("redis-cli", f"redis-cli -p {port}")
        until = time.monotonic() + 60
        while subprocess.run(["sh", "-c", probe], env=variables, capture_output=True, check=False).returncode:
            assert time.monotonic() < until, "redis did not answer"
            time.sleep(0.05)
        wrong = {**variables, "REDIS_PASSWORD": "other"}
        refused = subprocess.run(["sh", "-c", probe], env=wrong, capture_output=True, check=False)
        assert refused.returncode != 0
        assert (tmp_path / "appendonlydir").is_dir()
        asked = redis.Redis(port=port, password="abc123").config_get(
            "appendfsync", "maxmemory", "maxmemory-policy"
        )
        kept = {"maxmemory": str(700 << 20), "maxmemory-policy": "noeviction"}
        assert asked == {"appendfsync": "always", **kept}
    finally:
        server.terminate()
        server.wait(60)
