"""What uses the core: nothing in the core imports it. Each folder is one thing that a user does with a run
or a model.
"""
