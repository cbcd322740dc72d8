"""`posttrain doctor`: advice for a run that is over, also of other trainers. The rules are in `reporting/doctor`."""
