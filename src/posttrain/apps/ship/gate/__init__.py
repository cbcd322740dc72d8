"""Whether a candidate may ship: checks with confidence, on evaluations that `posttrain eval` has written."""

from posttrain.apps.ship.gate.verdict import BoundResult, GateResult, Verdict, judge

__all__ = ["BoundResult", "GateResult", "Verdict", "judge"]
