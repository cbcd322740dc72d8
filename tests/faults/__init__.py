"""The fault campaign: what posttrain promises when processes are killed, files damaged, disks full and inputs hostile.

`make faults` runs all of it (`python -m faults` with `tests/` on the path); `test_short_form.py` a part of it in CI.
One module per part. A part is a list of cases; a case is one or more faults and the check of what must hold afterwards.
"""
