"""Programs that run in the Python environments of other packages, which `env.<name>.python` names.

They import that package and the standard library, load `posttrain/processes.py` by its path, and nothing else of
posttrain.
"""
