"""Names what is wrong with a run and the setting that fixes it, from its metrics. docs/doctor.md lists the rules."""

from posttrain.reporting.doctor.doctor import Doctor
from posttrain.reporting.doctor.findings import Finding, Severity, ShownAnswer, worst
