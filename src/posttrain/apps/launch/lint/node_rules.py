"""Rules of Karpenter: NodePool and EC2NodeClass."""

from __future__ import annotations

import re

from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import (
    INSTANCE_LABEL,
    KARPENTER_CAPACITY,
    ZONE_LABEL,
    get,
    is_kind,
    list_of,
    map_of,
    number,
    quantity,
)
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "nodepool-class": "nodeClassRef has group, kind and name, and no apiVersion",
    "nodepool-disruption": "disruption is under spec, with consolidateAfter and a known consolidationPolicy",
    "nodepool-requirements": "requirements have a key, a known operator and values, and no restricted label",
    "nodepool-taints": "taints have a key and a known effect",
    "nodepool-limits": "a pool has limits",
    "nodepool-zones": "a pool for gangs has one zone",
    "nodepool-one-type": "a Spot pool has several instance types or zones to choose from",
    "nodepool-expiry": "nodes do not expire during a run",
    "nodeclass-required": "a node class has AMI, subnet and security group terms, and either role or instanceProfile",
    "nodeclass-metadata": "pods reach the metadata service: hop limit 2",
    "nodeclass-disk": "nodes have room for large images",
}

_POLICIES = ("WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DURATION = re.compile(r"(([0-9]+(s|m|h))+)|Never")
_LARGE_DISK = 200 * 1024**3


def check_nodes(manifest: Manifest) -> Findings:
    if is_kind(manifest, "karpenter.sh", "NodePool"):
        yield from _check_pool(ManifestPlace(manifest).at("spec"), map_of(manifest.body, "spec"))
    elif is_kind(manifest, "karpenter.k8s.aws", "EC2NodeClass"):
        yield from _check_class(ManifestPlace(manifest).at("spec"), map_of(manifest.body, "spec"))


def _check_pool(place: ManifestPlace, spec: JsonObject) -> Findings:
    inner_place, inner = place.at("template", "spec"), map_of(spec, "template", "spec")
    reference = map_of(inner, "nodeClassRef")
    for key, usual in (("group", "karpenter.k8s.aws"), ("kind", "EC2NodeClass"), ("name", "")):
        if not reference.get(key):
            remedy = f"add {key}: {usual}" if usual else ""
            yield inner_place.at("nodeClassRef", key).error("nodepool-class", reference.get(key), "is required", remedy)
    if "apiVersion" in reference:
        yield inner_place.at("nodeClassRef", "apiVersion").error(
            "nodepool-class", reference["apiVersion"], "is from v1beta1", "write group: karpenter.k8s.aws"
        )
    yield from _check_disruption(place, spec, inner_place, inner)
    requirements = list_of(inner, "requirements")
    for index, requirement in enumerate(requirements):
        yield from _check_requirement(inner_place.at("requirements", index), requirement)
    for index, taint in enumerate(list_of(inner, "taints")):
        if not get(taint, "key") or get(taint, "effect") not in _EFFECTS:
            yield inner_place.at("taints", index).error(
                "nodepool-taints", taint, f"needs a key and an effect of {', '.join(_EFFECTS)}"
            )
    if not spec.get("limits"):
        yield place.at("limits").warning(
            "nodepool-limits", None, "nothing bounds what is bought", "add limits of nvidia.com/gpu"
        )
    else:
        for key, value in map_of(spec, "limits").items():
            if quantity(value) is None:
                yield place.at("limits", str(key)).error("nodepool-limits", value, "is no amount")
    values = {
        str(get(r, "key")): (index, list_of(r, "values"))
        for index, r in enumerate(requirements)
        if get(r, "operator") == "In"
    }
    zones, types = values.get(ZONE_LABEL, (0, [])), values.get(INSTANCE_LABEL, (0, []))
    if len(zones[1]) > 1:
        yield inner_place.at("requirements", zones[0], "values").warning(
            "nodepool-zones", zones[1], "a gang may be split between zones, which EFA does not cross", "name one zone"
        )
    if values.get(KARPENTER_CAPACITY, (0, []))[1] == ["spot"] and len(types[1]) == 1:
        yield inner_place.at("requirements", types[0], "values").warning(
            "nodepool-one-type",
            types[1],
            "one type of Spot machine may be sold out",
            "have a pool of another type or zone ready",
        )
    expiry = inner.get("expireAfter")
    if expiry != "Never":
        yield inner_place.at("expireAfter").warning(
            "nodepool-expiry", expiry, "nodes end after 720h by default, in the middle of a run", "set Never"
        )


def _check_disruption(
    place: ManifestPlace, spec: JsonObject, inner_place: ManifestPlace, inner: JsonObject
) -> Findings:
    for key in ("disruption", "consolidationPolicy", "consolidateAfter"):
        if key in inner:
            yield inner_place.at(key).error(
                "nodepool-disruption", inner[key], "stands in the wrong place", "move it to spec.disruption"
            )
    if "disruption" not in spec:
        return
    disruption = map_of(spec, "disruption")
    policy, after = disruption.get("consolidationPolicy"), disruption.get("consolidateAfter")
    if policy not in (None, *_POLICIES):
        yield place.at("disruption", "consolidationPolicy").error(
            "nodepool-disruption", policy, f"must be one of {', '.join(_POLICIES)}"
        )
    if after is None:
        yield place.at("disruption", "consolidateAfter").error("nodepool-disruption", None, "is required", "write 5m")
    elif not isinstance(after, str) or not _DURATION.fullmatch(after):
        yield place.at("disruption", "consolidateAfter").error(
            "nodepool-disruption", after, "must be a time like 5m, or Never"
        )
    if policy in ("WhenEmptyOrUnderutilized", "Balanced"):
        yield place.at("disruption", "consolidationPolicy").warning(
            "nodepool-disruption", policy, "nodes with pods may be replaced", "WhenEmpty for training"
        )


def _check_requirement(place: ManifestPlace, requirement: object) -> Findings:
    key, operator, values = get(requirement, "key"), get(requirement, "operator"), list_of(requirement, "values")
    name = "nodepool-requirements"
    if not key:
        yield place.at("key").error(name, key, "is required")
    elif key == "kubernetes.io/hostname" or (
        str(key).partition("/")[0].endswith("karpenter.sh") and key != KARPENTER_CAPACITY
    ):
        yield place.at("key").error(name, key, "this label is restricted")
    if operator not in _OPERATORS:
        yield place.at("operator").error(name, operator, f"must be one of {', '.join(_OPERATORS)}")
    elif operator == "In" and not values:
        yield place.at("values").error(name, values, "In needs at least one value")
    if key == KARPENTER_CAPACITY:
        for index, value in enumerate(values):
            if value not in ("spot", "on-demand", "reserved"):
                yield place.at("values", index).error(name, value, "must be spot, on-demand or reserved")


def _check_class(place: ManifestPlace, spec: JsonObject) -> Findings:
    for key in ("amiSelectorTerms", "subnetSelectorTerms", "securityGroupSelectorTerms"):
        if not list_of(spec, key):
            yield place.at(key).error("nodeclass-required", spec.get(key), "needs at least one term")
    if bool(spec.get("role")) == bool(spec.get("instanceProfile")):
        yield place.at("role").error(
            "nodeclass-required", spec.get("role"), "must specify exactly one of role and instanceProfile"
        )
    hops = get(spec, "metadataOptions", "httpPutResponseHopLimit")
    if number(hops, 1) < 2:
        yield place.at("metadataOptions", "httpPutResponseHopLimit").warning(
            "nodeclass-metadata", hops, "pods cannot ask for Spot notices", "set 2"
        )
    disks = [quantity(get(mapping, "ebs", "volumeSize")) or 0 for mapping in list_of(spec, "blockDeviceMappings")]
    if spec.get("instanceStorePolicy") != "RAID0" and max(disks, default=0) < _LARGE_DISK:
        yield place.at("blockDeviceMappings").warning(
            "nodeclass-disk",
            None,
            "17Gi are left for images and files by default",
            "instanceStorePolicy: RAID0, or 500Gi of gp3",
        )
