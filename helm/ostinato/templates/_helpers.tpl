{{/* The chart's name, as in the names of objects. */}}
{{- define "ostinato.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" }}
{{- end }}

{{/*
Name of the release's objects: at most 47 characters, which KubeRay lengthens to the names of its own. A longer name is
cut and ends in a digest of the whole, so that two releases never share one. Services need what the pattern says.
*/}}
{{- define "ostinato.fullname" -}}
{{- $release := .Release.Name }}
{{- if not (contains (include "ostinato.name" .) $release) }}
{{- $release = printf "%s-%s" $release (include "ostinato.name" .) }}
{{- end }}
{{- $name := default $release .Values.fullnameOverride }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "%q cannot be the name of the release's objects: it must begin with a lower-case letter and hold only lower-case letters, digits and hyphens. Choose another release name, or set fullnameOverride" $name) }}
{{- end }}
{{- if gt (len $name) 47 }}
{{- printf "%s-%s" ($name | trunc 38 | trimSuffix "-") ($name | sha256sum | trunc 8) }}
{{- else }}
{{- $name }}
{{- end }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "ostinato.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "ostinato.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "ostinato.podLabels" . }}
{{- end }}

{{/*
Labels of the Ray Pods, and what selects them. Not app.kubernetes.io/name: the operator's head Service selects by
its own value of that one. Nothing that a chart upgrade alone would change: that would ask for a new cluster.
*/}}
{{- define "ostinato.podLabels" -}}
{{ include "ostinato.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ostinato.selectorLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: ostinato
{{- end }}

{{/* Metadata of an object: (dict "root" . "name" NAME "annotations" MAP). */}}
{{- define "ostinato.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "ostinato.labels" .root | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) (default dict .root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ostinato.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ostinato.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "ostinato.redisName" -}}
{{ include "ostinato.fullname" . }}-redis
{{- end }}

{{- define "ostinato.redisSecretName" -}}
{{- default (include "ostinato.redisName" .) .Values.redis.auth.existingSecret }}
{{- end }}

{{/* Key of the password in the Redis Secret: the chart's own always has the same. */}}
{{- define "ostinato.redisSecretKey" -}}
{{- if .Values.redis.auth.existingSecret }}{{ .Values.redis.auth.key }}{{ else }}redis-password{{ end }}
{{- end }}

{{- define "ostinato.apiKeySecretName" -}}
{{- default (printf "%s-api-key" (include "ostinato.fullname" .)) .Values.apiKey.existingSecret }}
{{- end }}

{{/* Key of it in the Secret: the chart's own always has the same. */}}
{{- define "ostinato.apiKeySecretKey" -}}
{{ ternary .Values.apiKey.key "api-key" (not (empty .Values.apiKey.existingSecret)) }}
{{- end }}

{{- define "ostinato.modelClaimName" -}}
{{- default (printf "%s-models" (include "ostinato.fullname" .)) .Values.modelStore.existingClaim }}
{{- end }}

{{/* Name of the gateway's Service, which the operator makes. */}}
{{- define "ostinato.serveServiceName" -}}
{{ include "ostinato.fullname" . }}-serve-svc
{{- end }}

{{/*
Image of a container: (dict "root" . "image" MAP). Without a tag, all Pods of a cluster with GPUs use -gpu: the two
images have different Pythons, and Ray wants one.
*/}}
{{- define "ostinato.image" -}}
{{- $image := merge (dict) (default dict .image) .root.Values.image }}
{{- $flavour := "cpu" }}
{{- range .root.Values.workerGroups }}
{{- if gt (int .gpus) 0 }}{{ $flavour = "gpu" }}{{ end }}
{{- end }}
{{- $tag := default .root.Values.image.tag (default dict .image).tag }}
{{- printf "%s:%s" $image.repository (default (printf "%s-%s" .root.Chart.AppVersion $flavour) $tag) }}
{{- end }}

{{/* A value as the text of an environment variable: no exponents in large whole numbers. */}}
{{- define "ostinato.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end }}
{{- end }}

{{/* Combinations that a schema cannot refuse. */}}
{{- define "ostinato.validate" -}}
{{- $v := .Values }}
{{- $stores := add (ternary 1 0 $v.redis.enabled) (ternary 0 1 (empty $v.store.url)) (ternary 0 1 (empty $v.store.existingSecret)) }}
{{- if ne (int $stores) 1 }}
{{- fail "expected exactly one state store, got none or several: set one of redis.enabled=true, store.url and store.existingSecret" }}
{{- end }}
{{- if and $v.gcsFaultTolerance.enabled (not $v.redis.enabled) (not $v.gcsFaultTolerance.redisAddress) }}
{{- fail "redis.enabled is false and gcsFaultTolerance.redisAddress is empty: set gcsFaultTolerance.redisAddress, or gcsFaultTolerance.enabled=false" }}
{{- end }}
{{- if and $v.apiKey.value $v.apiKey.existingSecret }}
{{- fail "apiKey.value and apiKey.existingSecret are both set: keep only one of them" }}
{{- end }}
{{- /* Not in the schema: Helm would print the key. */}}
{{- if and $v.apiKey.value (lt (len $v.apiKey.value) 16) }}
{{- fail "apiKey.value is shorter than 16 characters: use a random key, for example from openssl rand -hex 32" }}
{{- end }}
{{- if and $v.apiKey.value (not (regexMatch "^[!-~]([ -~]*[!-~])?$" $v.apiKey.value)) }}
{{- fail "apiKey.value has a line break, a space at its beginning or end, or a character outside ASCII, so no client can send it in a header: use a random key, for example from openssl rand -hex 32" }}
{{- end }}
{{- $hasKey := or $v.apiKey.value $v.apiKey.existingSecret }}
{{- if and $v.tenants.existingSecret (not $hasKey) }}
{{- fail "tenants.existingSecret is set without the installation's own key: set apiKey.value or apiKey.existingSecret, too" }}
{{- end }}
{{- if not (or $hasKey $v.apiKey.allowNone) }}
{{- fail "no API key is set, so every client that reaches the gateway could use and change everything. Set apiKey.existingSecret to the name of a Secret with a key (entry api-key), or set apiKey.value; for a trial, set apiKey.allowNone=true" }}
{{- end }}
{{- if and (ne $v.ray.authMode "token") (not $v.ray.allowNoToken) }}
{{- fail "ray.authMode is disabled, so every client that reaches Ray's dashboard could run code in the cluster. Set ray.authMode=token (KubeRay 1.5.1 or newer); for a trial, set ray.allowNoToken=true" }}
{{- end }}
{{- if and $v.networkPolicy.enabled (or $v.ingress.enabled (ne $v.service.type "ClusterIP")) (not $v.networkPolicy.gatewayFrom) }}
{{- fail "networkPolicy.gatewayFrom is empty, so the ingress controller or load balancer cannot reach the gateway: add it there (NetworkPolicy peers, for example a namespaceSelector or an ipBlock)" }}
{{- end }}
{{- $external := or (not $v.redis.enabled) (and $v.gcsFaultTolerance.enabled $v.gcsFaultTolerance.redisAddress) }}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.restrictEgress $external (not $v.networkPolicy.storeTo) }}
{{- fail "networkPolicy.restrictEgress would cut the Pods off from the Redis outside the release: add the Redis to networkPolicy.storeTo (NetworkPolicy peers, for example an ipBlock) and its ports to networkPolicy.storePorts" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.networkPolicy.restrictEgress $v.autoscaling.enabled (not $v.networkPolicy.egress) }}
{{- fail "networkPolicy.restrictEgress would cut the autoscaler off from the API server: add the API server to networkPolicy.egress (for example an ipBlock with port 443 or 6443)" }}
{{- end }}
{{- if and $v.metrics.podMonitor.enabled $v.metrics.serviceMonitor.enabled }}
{{- fail "metrics.podMonitor and metrics.serviceMonitor are both enabled, so every sample would be scraped twice: enable only one of them" }}
{{- end }}
{{- $ports := $v.metrics.ports }}
{{- if gt (int $ports.first) (int $ports.last) }}
{{- fail (printf "metrics.ports: expected first <= last, got first %d and last %d" (int $ports.first) (int $ports.last)) }}
{{- end }}
{{- range list 6379 8000 8265 8500 10001 44217 44227 52365 (int $v.metrics.port) }}
{{- if and (ge . (int $ports.first)) (le . (int $ports.last)) }}
{{- fail (printf "metrics.ports contains %d, a port of Ray: choose other ports" .) }}
{{- end }}
{{- end }}
{{- $names := list }}
{{- range $v.workerGroups }}
{{- if has .name $names }}{{ fail (printf "workerGroups: two groups have the name %s: give each group its own name" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- if or (gt (int .minReplicas) (int .replicas)) (gt (int .replicas) (int .maxReplicas)) }}
{{- fail (printf "workerGroups: %s: expected minReplicas <= replicas <= maxReplicas; correct these values" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The Serve configuration: the same application as deploy/serve-config.yaml. */}}
{{- define "ostinato.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
applications:
  - name: ostinato
    import_path: controlplane.runtime.app:build
    route_prefix: /
    args: {}
    deployments:
      - name: Gateway
        num_replicas: {{ .Values.serve.gatewayReplicas }}
        {{- if .Values.serve.gatewaysPerNode }}
        max_replicas_per_node: {{ .Values.serve.gatewaysPerNode }}
        {{- end }}
      - name: Controller
        num_replicas: 1
{{- end }}

{{/* Environment of every Ray container; what references another variable comes after it. */}}
{{- define "ostinato.env" -}}
- name: HOME
  value: {{ .Values.home.mountPath }}
- name: OSTINATO_HOME
  value: {{ .Values.home.mountPath }}
- name: OSTINATO_HTTP_HOST
  value: 0.0.0.0
- name: OSTINATO_HTTP_PORT
  value: "8000"
- name: OSTINATO_WORKER_HOST
  value: 0.0.0.0
- name: OSTINATO_METRICS_HOST
  value: 0.0.0.0
- name: OSTINATO_METRICS_PORTS
  value: {{ printf "%d-%d" (int .Values.metrics.ports.first) (int .Values.metrics.ports.last) | quote }}
- name: OSTINATO_ALLOWED_ROOTS
  value: {{ join ":" (concat (ternary (list .Values.modelStore.mountPath) list .Values.modelStore.enabled) (default list .Values.allowedRoots)) | quote }}
{{- if .Values.redis.enabled }}
- name: STORE_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "ostinato.redisSecretName" . }}
      key: {{ include "ostinato.redisSecretKey" . }}
- name: OSTINATO_STORE_URL
  value: redis://:$(STORE_PASSWORD)@{{ include "ostinato.redisName" . }}:6379/0
{{- else if .Values.store.existingSecret }}
- name: OSTINATO_STORE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.store.existingSecret }}
      key: {{ .Values.store.key }}
{{- else }}
- name: OSTINATO_STORE_URL
  value: {{ .Values.store.url | quote }}
{{- end }}
{{- if or .Values.apiKey.value .Values.apiKey.existingSecret }}
- name: OSTINATO_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "ostinato.apiKeySecretName" . }}
      key: {{ include "ostinato.apiKeySecretKey" . }}
{{- end }}
{{- if .Values.tenants.existingSecret }}
- name: OSTINATO_TENANTS
  value: /etc/ostinato/tenants/{{ .Values.tenants.key }}
{{- end }}
{{- if .Values.artifacts.existingClaim }}
- name: OSTINATO_ARTIFACTS
  value: {{ .Values.artifacts.mountPath }}
{{- end }}
# The front door (controlplane/runtime/front_door): Serve's HAProxy, started by a program of ours that sets its limits.
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: "1"
- name: RAY_SERVE_HAPROXY_BINARY_PATH
  value: /opt/venv/bin/ostinato-haproxy
# Serve's Python proxy, which it starts all the same, answers nobody.
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: controlplane.runtime.front_door.fallback:prepare
# What starts HAProxy asks for news of gateways again when an answer was lost.
- name: RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH
  value: controlplane.runtime.front_door.manager:prepare
# The gateway answers inference calls in its replica's own server, so both share one loop.
- name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
  value: "0"
# So often news of replicas are asked for again (controlplane/runtime/patches/ray/serve_news.py).
- name: LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_LOWER_BOUND
  value: "5"
- name: LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_UPPER_BOUND
  value: "10"
# Ports of gateways; HAProxy asks for their sign of life 50 above.
- name: RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT
  value: "30000"
- name: RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT
  value: "30049"
# A proxy that died is missed after three looks, ten seconds apart by Serve's own choice.
- name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S
  value: "1"
# The first is killed, and another started, when it is not ready after three times this; five seconds by Serve's own choice.
- name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S
  value: "30"
# As `ostinato up` has it: Ray would run gateways and engines at 15, and then nothing of theirs can be made less urgent.
- name: RAY_worker_niceness
  value: "0"
- name: RAY_SERVE_THROUGHPUT_OPTIMIZED
  value: {{ ternary "1" "0" .Values.serve.throughputOptimized | quote }}
# gRPC would take http_proxy of extraEnv for other Pods; an empty value is its word for no proxy.
- name: grpc_proxy
  value: ""
# So many calls the GCS remembers, by default ten times as many: 3 KB each, until it is full.
- name: RAY_task_events_max_num_task_in_gcs
  value: "10000"
{{- range $name, $value := .Values.settings }}
- name: OSTINATO_{{ snakecase $name | upper }}
  value: {{ include "ostinato.text" $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A probe's timing: (dict "probes" MAP "failures" N). */}}
{{- define "ostinato.probeTiming" -}}
periodSeconds: {{ .probes.periodSeconds }}
timeoutSeconds: {{ .probes.timeoutSeconds }}
failureThreshold: {{ .failures }}
{{- end }}

{{/* The Pod template of the head or of a group: (dict "root" . "group" MAP "role" "head"|"worker"). */}}
{{- define "ostinato.podTemplate" -}}
{{- $root := .root }}
{{- $v := .root.Values }}
{{- $group := .group }}
{{- $head := eq .role "head" }}
{{- $gpus := int (default 0 $group.gpus) }}
{{- $gpuResource := default "nvidia.com/gpu" $group.gpuResource }}
{{- $agent := dict "path" "/api/healthz" "port" 52365 -}}
metadata:
  labels:
    {{- include "ostinato.podLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
  {{- $checksum := dict }}
  {{- with $v.apiKey.value }}
  {{- $checksum = dict "checksum/api-key" (sha256sum .) }}
  {{- end }}
  {{- with merge (dict) $checksum (default dict $v.podAnnotations) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "ostinato.serviceAccountName" $root }}
  {{- /* Only the autoscaler, a sidecar of the head, calls the API server. */}}
  automountServiceAccountToken: {{ and $head $v.autoscaling.enabled }}
  enableServiceLinks: false
  {{- with $v.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ default 60 $group.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $v.podSecurityContext | nindent 4 }}
  containers:
    - name: ray-{{ .role }}
      image: {{ include "ostinato.image" (dict "root" $root "image" $group.image) }}
      imagePullPolicy: {{ default $v.image.pullPolicy (default dict $group.image).pullPolicy }}
      securityContext:
        {{- toYaml $v.securityContext | nindent 8 }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: metrics, containerPort: {{ $v.metrics.port }}}
        - {name: serve, containerPort: 8000}
      env:
        {{- include "ostinato.env" $root | nindent 8 }}
        {{- if $head }}
        {{- with $v.metrics.grafana }}
        {{- if .host }}
        - name: RAY_GRAFANA_HOST
          value: {{ .host | quote }}
        - name: RAY_GRAFANA_IFRAME_HOST
          value: {{ default .host .iframeHost | quote }}
        {{- end }}
        {{- with .prometheusHost }}
        - name: RAY_PROMETHEUS_HOST
          value: {{ . | quote }}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- with $group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- $resources := deepCopy $group.resources }}
        {{- if $gpus }}
        {{- $_ := set $resources "limits" (set (default dict $resources.limits) $gpuResource $gpus) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      startupProbe:
        httpGet:
          {{- toYaml $agent | nindent 10 }}
        {{- include "ostinato.probeTiming" (dict "probes" $v.probes "failures" $v.probes.startupFailureThreshold) | nindent 8 }}
      livenessProbe:
        httpGet:
          {{- toYaml $agent | nindent 10 }}
        {{- include "ostinato.probeTiming" (dict "probes" $v.probes "failures" $v.probes.livenessFailureThreshold) | nindent 8 }}
      {{- /* The operator deploys the application once the head is ready: the head cannot wait for it. */}}
      readinessProbe:
        httpGet:
          {{- toYaml (ternary $agent (dict "path" $v.probes.readinessPath "port" "serve") $head) | nindent 10 }}
        {{- include "ostinato.probeTiming" (dict "probes" $v.probes "failures" $v.probes.readinessFailureThreshold) | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: {{ $v.home.mountPath }}}
        - {name: shm, mountPath: /dev/shm}
        {{- if $v.modelStore.enabled }}
        - {name: models, mountPath: {{ $v.modelStore.mountPath }}, readOnly: {{ $v.modelStore.readOnly }}}
        {{- end }}
        {{- if $v.artifacts.existingClaim }}
        - {name: artifacts, mountPath: {{ $v.artifacts.mountPath }}}
        {{- end }}
        {{- if $v.tenants.existingSecret }}
        - {name: tenants, mountPath: /etc/ostinato/tenants, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: home
      {{- if $v.home.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ $v.home.existingClaim }}
      {{- else if $v.home.sizeLimit }}
      emptyDir:
        sizeLimit: {{ $v.home.sizeLimit }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $group.shmSize }}
    {{- if $v.modelStore.enabled }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "ostinato.modelClaimName" $root }}
        readOnly: {{ $v.modelStore.readOnly }}
    {{- end }}
    {{- if $v.artifacts.existingClaim }}
    - name: artifacts
      persistentVolumeClaim:
        claimName: {{ $v.artifacts.existingClaim }}
    {{- end }}
    {{- if $v.tenants.existingSecret }}
    - name: tenants
      secret:
        secretName: {{ $v.tenants.existingSecret }}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* What the monitor that is enabled says, as YAML; nothing where a ScrapeConfig is not wanted. */}}
{{- define "ostinato.scraped" -}}
{{- $metrics := .Values.metrics }}
{{- if and $metrics.scrapeConfig.enabled (or $metrics.podMonitor.enabled $metrics.serviceMonitor.enabled) }}
{{- toYaml (ternary $metrics.podMonitor $metrics.serviceMonitor $metrics.podMonitor.enabled) }}
{{- end }}
{{- end }}

{{/* Selects the Ray Pods, and not Redis. */}}
{{- define "ostinato.rayPods" -}}
matchLabels:
  {{- include "ostinato.selectorLabels" . | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [head, worker]}
{{- end }}
