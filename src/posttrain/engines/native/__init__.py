"""The native engine: continuous batching over the modules that are being trained."""

from posttrain.engines.native.engine import NativeEngine, NativeSettings

__all__ = ["NativeEngine", "NativeSettings"]
