{{- define "posttrain-ray.name" -}}
{{- .Values.name | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "posttrain-ray.annotations" -}}
{{- $annotations := merge (dict "ray.io/overwrite-container-cmd" "true") .Values.podAnnotations -}}
{{- toYaml $annotations -}}
{{- end -}}

{{- define "posttrain-ray.run" -}}
{{- index .Values.podLabels "posttrain.dev/run" | default (include "posttrain-ray.name" .) -}}
{{- end -}}

{{- define "posttrain-ray.secret" -}}
{{- .Values.controlSecret | default (printf "%s-control" (include "posttrain-ray.name" .)) -}}
{{- end -}}

{{- define "posttrain-ray.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- merge (dict "posttrain.dev/run" (include "posttrain-ray.run" $root)) $values.podLabels | toYaml | nindent 4 }}
  annotations:
    {{- include "posttrain-ray.annotations" $root | nindent 4 }}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ $values.gracePeriodSeconds }}
  enableServiceLinks: false
  automountServiceAccountToken: false
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.pullSecret }}
  imagePullSecrets:
    - name: {{ . }}
  {{- end }}
  {{- with $values.serviceAccount }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- if $values.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $values.priorityClass }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $values.user }}
    runAsGroup: {{ $values.user }}
    fsGroup: {{ $values.user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: {{ $values.seccompProfile }}}
  containers:
    - name: posttrain
      image: {{ $values.image | quote }}
      command:
        {{- toYaml $values.command | nindent 8 }}
      env:
        - name: POSTTRAIN_ROLE
          value: {{ .role }}
        {{- range $name, $value := $values.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- range $name, $reference := $values.secretEnv }}
        - name: {{ $name }}
          valueFrom:
            secretKeyRef:
              name: {{ $reference.secret }}
              key: {{ $reference.key }}
        {{- end }}
      ports:
        - {name: ray, containerPort: 6379}
        - {name: control, containerPort: 6390}
        {{- if eq .role "head" }}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- with $values.addCapabilities }}
          add:
            {{- toYaml . | nindent 12 }}
          {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: config, mountPath: /etc/posttrain, readOnly: true}
        - {name: storage, mountPath: {{ $values.storage.mount | quote }}}
        - {name: shm, mountPath: /dev/shm}
        - {name: scratch, mountPath: /tmp}
        - {name: control, mountPath: /etc/posttrain-control, readOnly: true}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- range $path, $host := $values.hostPaths }}
        - {name: host-{{ base $path }}, mountPath: {{ $path | quote }}, readOnly: true}
        {{- end }}
    {{- with $values.logs.image }}
    - name: fluent-bit
      image: {{ . | quote }}
      resources:
        requests: {cpu: 500m, memory: 512Mi}
        limits: {cpu: "1", memory: 512Mi}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - {name: log-config, mountPath: /fluent-bit/etc, readOnly: true}
        - {name: scratch, mountPath: /tmp, readOnly: true}
    {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "posttrain-ray.name" $root }}-config
        {{- with $values.config.items }}
        items:
          {{- toYaml . | nindent 10 }}
        {{- end }}
    - name: storage
      persistentVolumeClaim:
        claimName: {{ $values.storage.claim }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize | quote }}}
    - name: scratch
      emptyDir: {}
    - name: control
      secret:
        secretName: {{ include "posttrain-ray.secret" $root }}
        defaultMode: 288
        items: [{key: secret, path: secret}]
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- range $path, $host := $values.hostPaths }}
    - name: host-{{ base $path }}
      hostPath: {path: {{ $host | quote }}, type: Directory}
    {{- end }}
    {{- if $values.logs.image }}
    - name: log-config
      configMap:
        name: {{ include "posttrain-ray.name" $root }}-logs
    {{- end }}
{{- end -}}


{{- /* -- values with the keys of KubeRay's chart ------------------------------------------------------------------- */}}

{{- define "posttrain-ray.has-kuberay-values" -}}
{{- if or .Values.head .Values.worker .Values.additionalWorkerGroups }}true{{ end -}}
{{- end -}}

{{- define "posttrain-ray.kuberay-name" -}}
{{- $name := .Values.nameOverride | default "kuberay" -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "posttrain-ray.kuberay-pod" -}}
{{- $group := .group -}}
{{- $image := .root.Values.image -}}
{{- $config := printf "%s-fluentbit-config" (include "posttrain-ray.kuberay-name" .root) -}}
{{- $inner := dig "template" "metadata" dict $group -}}
{{- $annotations := merge (dict) ($group.annotations | default dict) ($inner.annotations | default dict) -}}
{{- if $group.command }}{{ $annotations = merge (dict "ray.io/overwrite-container-cmd" "true") $annotations }}{{ end -}}
{{- range $group.volumes }}
{{- $wanted := dig "configMap" "name" "" . }}
{{- if and (hasSuffix "-fluentbit-config" $wanted) (ne $wanted $config) }}
{{- fail (printf "volumes name the ConfigMap %s, and this release makes %s: install it as the release of the values, or set fullnameOverride" $wanted $config) }}
{{- end }}
{{- end }}
{{- $tolerations := list }}
{{- range $group.tolerations }}
{{- if ne (.key | default "") "cloud.google.com/impending-node-termination" }}{{ $tolerations = append $tolerations . }}{{ end }}
{{- end }}
metadata:
  {{- with merge (dict) ($group.labels | default dict) ($inner.labels | default dict) }}
  labels:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $group.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      {{- if kindIs "map" $image }}
      image: "{{ $image.repository }}:{{ $image.tag | default "latest" }}"
      {{- else }}
      image: {{ $image | quote }}
      {{- end }}
      {{- if kindIs "map" $image }}
      imagePullPolicy: {{ $image.pullPolicy | default "IfNotPresent" }}
      {{- end }}
      {{- with $group.command }}
      command:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $common := dig "containerEnv" list (.root.Values.common | default dict) }}
      {{- with concat (kindIs "slice" $common | ternary $common list) ($group.containerEnv | default list) }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.ports }}
      ports:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $group.volumeMounts }}
      volumeMounts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- with $group.sidecarContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.volumes }}
  volumes:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
