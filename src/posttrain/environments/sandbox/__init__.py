"""Runs untrusted programs: no network, no files but their own, limits on every resource.

`levels.py` finds what this machine supports, `sandbox.py` runs a program and watches it, `launch.py` is the process
that isolates the program. Everything here is standard library, and Linux.
"""
