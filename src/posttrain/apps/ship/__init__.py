"""From a trained model to production: the gate decides, the registry keeps versions, the pipeline runs all stages."""
