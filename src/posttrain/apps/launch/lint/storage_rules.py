"""Rules of the shared file system: FSx for Lustre and Managed Lustre, classes, volumes and claims."""

from __future__ import annotations

import re

from posttrain.apps.launch.lint.findings import Findings, ManifestPlace
from posttrain.apps.launch.lint.reading import get, is_kind, list_of, map_of, quantity
from posttrain.apps.launch.manifest_files import Manifest
from posttrain.files.json_files import JsonObject

RULES = {
    "storage-parameters": "parameters of a StorageClass are texts, and known to its driver",
    "storage-throughput": "throughput is one of the tiers 125, 250, 500 and 1000",
    "storage-volume": "a static volume names its file system as the driver wants it",
    "storage-flock": "FSx is mounted with flock",
    "storage-size": "sizes are those of the file system: FSx 1200Gi or multiples of 2400Gi, Managed Lustre by its tier",
    "storage-access": "a claim that several machines mount is ReadWriteMany",
    "config-size": "a ConfigMap has at most 1 MiB, and no secrets",
}

FSX, LUSTRE = "fsx.csi.aws.com", "lustre.csi.storage.gke.io"
_TIERS = ("125", "250", "500", "1000")
_GIB = 1024**3
_MAX_CONFIG_BYTES = 1024 * 1024
_LUSTRE_HANDLE = re.compile(r"[^/]+/[^/]+/[^/]+")


def check_storage(manifest: Manifest) -> Findings:
    root, body = ManifestPlace(manifest), manifest.body
    if is_kind(manifest, "storage.k8s.io", "StorageClass"):
        yield from _check_class(root, body)
    elif is_kind(manifest, "", "PersistentVolume"):
        yield from _check_volume(root.at("spec"), map_of(body, "spec"))
    elif is_kind(manifest, "", "PersistentVolumeClaim"):
        modes = list_of(body, "spec", "accessModes")
        if "ReadWriteMany" not in modes:
            yield root.at("spec", "accessModes").error(
                "storage-access", modes, "one machine alone could mount it", "[ReadWriteMany]"
            )
        if quantity(get(body, "spec", "resources", "requests", "storage")) is None:
            value = get(body, "spec", "resources", "requests", "storage")
            yield root.at("spec", "resources", "requests", "storage").error("storage-size", value, "is no amount")
    elif is_kind(manifest, "", "ConfigMap"):
        yield from _check_config_map(root, body)


def _check_class(root: ManifestPlace, body: JsonObject) -> Findings:
    parameters = map_of(body, "parameters")
    for key, value in parameters.items():
        if not isinstance(value, str):
            yield root.at("parameters", str(key)).error(
                "storage-parameters", value, "must be a text", f'write "{value}"'
            )
    tier, place = parameters.get("perUnitStorageThroughput"), root.at("parameters", "perUnitStorageThroughput")
    if body.get("provisioner") in (FSX, LUSTRE) and tier is not None and str(tier) not in _TIERS:
        yield place.error("storage-throughput", tier, f"must be one of {', '.join(_TIERS)} MB/s per TiB")
    if body.get("provisioner") == FSX:
        for key in ("subnetId", "securityGroupIds"):
            if not parameters.get(key):
                yield root.at("parameters", key).error("storage-parameters", parameters.get(key), "is required by FSx")
    if body.get("provisioner") == LUSTRE and len(str(parameters.get("filesystem", ""))) > 8:
        yield root.at("parameters", "filesystem").error(
            "storage-parameters", parameters["filesystem"], "at most 8 characters"
        )


def _check_volume(place: ManifestPlace, spec: JsonObject) -> Findings:
    driver, handle = get(spec, "csi", "driver"), get(spec, "csi", "volumeHandle")
    attributes, csi = map_of(spec, "csi", "volumeAttributes"), place.at("csi")
    if driver == FSX:
        if not str(handle).startswith("fs-"):
            yield csi.at("volumeHandle").error("storage-volume", handle, "must be the id of the file system, fs-…")
        for key in ("dnsname", "mountname"):
            if not attributes.get(key):
                yield csi.at("volumeAttributes", key).error("storage-volume", attributes.get(key), "is required by FSx")
        if "flock" not in list_of(spec, "mountOptions"):
            yield place.at("mountOptions").warning(
                "storage-flock", spec.get("mountOptions"), "locks of files do not work", "[flock]"
            )
        yield from check_size(place.at("capacity", "storage"), get(spec, "capacity", "storage"), {"provisioner": FSX})
    elif driver == LUSTRE:
        if not _LUSTRE_HANDLE.fullmatch(str(handle)):
            yield csi.at("volumeHandle").error("storage-volume", handle, "must be project/zone/instance")
        for key in ("ip", "filesystem"):
            if not attributes.get(key):
                yield csi.at("volumeAttributes", key).error(
                    "storage-volume", attributes.get(key), "is required by Managed Lustre"
                )
    if "ReadWriteMany" not in list_of(spec, "accessModes"):
        yield place.at("accessModes").error(
            "storage-access", spec.get("accessModes"), "one machine alone could mount it", "[ReadWriteMany]"
        )


def check_size(place: ManifestPlace, size: object, storage_class: JsonObject) -> Findings:
    """A size that the driver of the class can make."""
    gib = (quantity(size) or 0) / _GIB
    if storage_class.get("provisioner") == FSX and not is_fsx_size(gib):
        yield place.error("storage-size", size, "FSx has 1200Gi, or multiples of 2400Gi")
    tier = str(get(storage_class, "parameters", "perUnitStorageThroughput"))
    if storage_class.get("provisioner") == LUSTRE and tier in _TIERS and not is_lustre_size(gib, int(tier)):
        yield place.error(
            "storage-size",
            size,
            f"Managed Lustre of {tier} MB/s per TiB has multiples of {lustre_step_gib(int(tier))}Gi",
        )


def is_fsx_size(gib: float) -> bool:
    return gib == 1200 or (gib > 0 and gib % 2400 == 0)


def lustre_step_gib(tier: int) -> int:
    """The least size of Managed Lustre, and the step to the next: the slower the tier, the larger."""
    return 9_000_000 // tier


def is_lustre_size(gib: float, tier: int) -> bool:
    return gib > 0 and gib % lustre_step_gib(tier) == 0


def _check_config_map(root: ManifestPlace, body: JsonObject) -> Findings:
    from posttrain.files.redaction import redact

    total = 0
    for key in ("data", "binaryData"):
        for name, value in map_of(body, key).items():
            if not isinstance(value, str):
                yield root.at(key, str(name)).error("config-size", value, "must be a text")
                continue
            total += len(value.encode())
            if key == "data" and redact(value) != value:
                yield root.at(key, str(name)).error("literal-secret", None, "contains a secret", "put it into a Secret")
    if total > _MAX_CONFIG_BYTES:
        yield root.at("data").error("config-size", total, f"may not be more than {_MAX_CONFIG_BYTES} bytes")
