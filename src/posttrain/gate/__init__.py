"""Whether a candidate may ship: checks with confidence, on evaluations that `posttrain eval` has written."""

from posttrain.gate.verdict import GateResult, Rule, Verdict, judge

__all__ = ["GateResult", "Rule", "Verdict", "judge"]
