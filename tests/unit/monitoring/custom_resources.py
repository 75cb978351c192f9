"""Schemas of the custom resources that the chart renders: Kubernetes's own validation does not know them.

Written by hand from the operators' public API references (Prometheus operator 0.8x and KEDA 2.1x and 2.2x, both
Apache-2.0): the names, types and required fields of everything that the chart sets and of its neighbours, so that a
misspelt, misplaced or mistyped field is refused. What the chart does not use at all (authorisation, TLS, fallbacks) is
left out, and refused until it is added here.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
# the operator's own pattern; promtool checks the rules' expressions
DURATION: Schema = {
    "type": "string",
    "pattern": r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$",
    "minLength": 1,
}


def fields(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(items: Schema, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least}


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=fields("name", name={"type": "string", "pattern": r"^[a-z0-9.-]{1,253}$"}, labels=STRINGS),
        spec=spec,
    )


RELABELING = fields(
    action={
        "enum": ["replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase", "uppercase"]
    },
    modulus=INTEGER,
    regex=STRING,
    replacement=STRING,
    separator=STRING,
    sourceLabels=several(STRING),
    targetLabel=STRING,
)
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        "selector",
        selector=fields(matchLabels=STRINGS, matchExpressions=several({"type": "object"})),
        namespaceSelector=fields(any=BOOLEAN, matchNames=several(STRING)),
        jobLabel=STRING,
        podTargetLabels=several(STRING),
        sampleLimit=INTEGER,
        podMetricsEndpoints=several(
            fields(
                port=STRING,
                portNumber=INTEGER,
                path=STRING,
                scheme={"enum": ["http", "https"]},
                params={"type": "object", "additionalProperties": several(STRING)},
                interval=DURATION,
                scrapeTimeout=DURATION,
                honorLabels=BOOLEAN,
                honorTimestamps=BOOLEAN,
                filterRunning=BOOLEAN,
                relabelings=several(RELABELING),
                metricRelabelings=several(RELABELING),
            )
        ),
    ),
)
RULE = fields(
    "expr",
    alert=STRING,
    record=STRING,
    expr={"type": ["string", "integer"]},
    labels=STRINGS,
    annotations=STRINGS,
    keep_firing_for=DURATION,
    **{"for": DURATION},
) | {"oneOf": [{"required": ["alert"]}, {"required": ["record"], "not": {"required": ["for"]}}]}
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields(
        groups=several(
            fields(
                "name rules",
                name={"type": "string", "minLength": 1},
                interval=DURATION,
                query_offset=DURATION,
                limit=INTEGER,
                labels=STRINGS,
                rules=several(RULE),
            )
        )
    ),
)
SCALING_RULES = fields(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=several(
        fields("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=INTEGER, periodSeconds=INTEGER)
    ),
)
PROMETHEUS_TRIGGER = fields(
    "type metadata",
    type={"const": "prometheus"},
    name=STRING,
    metricType={"enum": ["AverageValue", "Value"]},
    useCachedMetrics=BOOLEAN,
    metadata=fields(  # every value is a string, numbers too
        "serverAddress query threshold",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=STRING,
        threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        activationThreshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        ignoreNullValues={"enum": ["true", "false"]},
        namespace=STRING,
        customHeaders=STRING,
        queryParameters=STRING,
        timeout=STRING,
        unsafeSsl={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    fields(
        "scaleTargetRef triggers",
        scaleTargetRef=fields("name", name=STRING, kind=STRING, apiVersion=STRING, envSourceContainerName=STRING),
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        idleReplicaCount=INTEGER,
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        initialCooldownPeriod=INTEGER,
        advanced=fields(
            restoreToOriginalReplicaCount=BOOLEAN,
            horizontalPodAutoscalerConfig=fields(
                name=STRING, behavior=fields(scaleUp=SCALING_RULES, scaleDown=SCALING_RULES)
            ),
            scalingModifiers=fields(formula=STRING, target=STRING, activationTarget=STRING, metricType=STRING),
        ),
        triggers=several(PROMETHEUS_TRIGGER, at_least=1),
    ),
)
SCHEMAS = {"PodMonitor": POD_MONITOR, "PrometheusRule": PROMETHEUS_RULE, "ScaledObject": SCALED_OBJECT}


def validate(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError; KeyError for a kind that is not here."""
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]], jsonschema.Draft202012Validator)
