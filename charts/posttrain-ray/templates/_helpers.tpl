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
