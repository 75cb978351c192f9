{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.workerImage" -}}
{{ .Values.worker.image.repository | default .Values.image.repository }}:{{ .Values.worker.image.tag | default .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "headrace.gatewayImage" -}}
{{ .Values.gateway.image.repository }}:{{ .Values.gateway.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "headrace.secret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" .Release.Name) }}
{{- end }}

{{- define "headrace.outstanding" -}}
sum(max by (queue, state) (headrace_queue_messages{model={{ .Values.model.servedName | quote }},state=~"ready|unacked"}))
{{- end }}

{{- define "headrace.work" -}}
sum(max by (queue) (headrace_outstanding_worker_seconds{model={{ .Values.model.servedName | quote }}})) / {{ .Values.autoscaling.targetSeconds }} or {{ include "headrace.outstanding" . }} / {{ include "headrace.perReplica" . }}
{{- end }}

{{- define "headrace.perReplica" -}}
{{ max 1 (floor (mulf .Values.worker.maxNumSeqs .Values.autoscaling.slotsPerReplica)) }}
{{- end }}

{{- define "headrace.scheduling" -}}
{{- $pod := dict -}}
{{- with .root.Values.imagePullSecrets -}}{{- $_ := set $pod "imagePullSecrets" . -}}{{- end -}}
{{- range $name := list "priorityClassName" "nodeSelector" "tolerations" "affinity" -}}
{{- with index $.values $name -}}{{- $_ := set $pod $name . -}}{{- end -}}
{{- end -}}
{{- with .values.topologySpreadConstraints -}}
{{- $labels := merge (dict "app.kubernetes.io/component" $.component) (include "headrace.selector" $.root | fromYaml) -}}
{{- $constraints := list -}}
{{- range . -}}{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) -}}{{- end -}}
{{- $_ := set $pod "topologySpreadConstraints" $constraints -}}
{{- end -}}
{{- with $pod -}}{{- toYaml . -}}{{- end -}}
{{- end }}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "headrace.workerResources" -}}
{{- $gpus := dict -}}
{{- if .Values.worker.gpus -}}
{{- $gpus = dict "limits" (dict "nvidia.com/gpu" .Values.worker.gpus) -}}
{{- end -}}
{{- toYaml (merge $gpus (deepCopy .Values.worker.resources)) -}}
{{- end -}}
