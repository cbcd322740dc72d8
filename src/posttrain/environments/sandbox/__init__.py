"""Runs programs that nobody trusts: no network, no files but their own, no more than they are given of anything.

`levels.py` says what this machine can do, `sandbox.py` runs a program and watches it, `launch.py` is the other side of that:
the process that locks the program in. Everything here is standard library, and Linux.
"""
