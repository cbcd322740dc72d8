"""The composition root: a config becomes roles, and roles become a training loop. The only place that matches on a kind.

`run.py` has what every run needs, `datasets.py` the data, and one file per family of algorithms the rest.
"""

from posttrain.build.run import Run

__all__ = ["Run"]
