"""Kept for `posttrain doctor --rules` until it reads the rules themselves."""

from posttrain.reporting.doctor.doctor import RULES

ADVICE = {rule.id: rule.advice for rule in RULES}
